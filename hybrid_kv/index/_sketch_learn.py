"""Learning one KV head's sketch: forecasts on some keys, a proof on all of them.

A forecast says how many candidates each layout would need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import thread_time
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from hybrid_kv.index._base import Cancellation, SavedReport
from hybrid_kv.index._sketch_head import (
    HeadSketch,
    Layout,
    SketchMaker,
    TierSearcher,
    layouts,
    why_unread,
)
from hybrid_kv.index._trial import HeldOut, Trial, log_sums
from hybrid_kv.ops.sketch_codes import SketchMap

_MARGIN, _WIDER = 1.05, 1.25
"""Candidates of the first proof over those that the forecast asks for, and of the next ones."""
_PROOFS, _LAYOUTS = 3, 3
"""Numbers of candidates that are tried for a layout, and layouts."""
_HELD_SHARE = 8
_SCORES_AT_ONCE, _RUN = 2**23, 32

_SCAN_RERANKED = 1.5
"""Candidates of the 8-bit scan, per result."""
_ROW_WORK, _KEY_WORK, _SCAN_KEY_WORK = 512, 12, 32
"""Bytes of codes that could be scanned in the time of one stored key that is ranked exactly, beside
its own; of a key's code, beside its bytes; and of a key of the 8-bit scan (docs/lab.md).
"""


@dataclass(frozen=True, slots=True)
class TierReport:
    """code_bytes: of each of its keys, of which there were `num_keys` when the index was built."""

    code_bytes: int
    num_keys: int


@dataclass(frozen=True, slots=True)
class SketchReport(SavedReport):
    """The search that serves one KV head, and the reason.

    serves: "sketch" or "flat". num_rerank: candidates that a query ranks exactly. recall, mass: the
    promise: shares of their exact top keys, and of the softmax mass of these, that held-out queries
    found. forecasts: the layouts by their bytes, with the candidates each would take and the work
    over the 8-bit scan's. top_mass: softmax mass of the exact top keys over all cold keys.
    effective_dim: of the keys as queries see them. learn_s: seconds of one thread.
    """

    serves: str
    reason: str
    tiers: tuple[TierReport, ...] = ()
    num_rerank: Annotated[int, Field(ge=0, le=2**31)] = 0
    recall: float = 0.0
    mass: float = 0.0
    forecasts: tuple[str, ...] = ()
    top_mass: float = 0.0
    effective_dim: float = 0.0
    learn_s: float = field(default=0.0, compare=False)


class SketchLearner:
    """Learns the sketches of heads, one after the other, and proves each of them.

    Args:
        params: of a sketch index.
        cancellation: looked at between pieces of the work.
    """

    def __init__(self, params: Any, cancellation: Cancellation) -> None:
        self.params, self._cancellation = params, cancellation

    def why_flat(self, keys: Tensor, samples: Tensor | None) -> str | None:
        """Reason why no head can get a sketch, whatever its keys are; None if one can."""
        if keys.shape[1] < self.params.min_keys:
            return f"{keys.shape[1]} keys, a sketch takes {self.params.min_keys}"
        if samples is None or samples.shape[2] == 0:
            return "there are no prefill queries to learn from"
        return why_unread(keys)

    def learn(
        self, keys: Tensor, samples: Tensor | None
    ) -> tuple[tuple[SketchReport, ...], dict[int, HeadSketch]]:
        """A report for each head of keys [Hkv, N, D], and the sketches by head."""
        if (reason := self.why_flat(keys, samples)) is not None:
            return tuple(SketchReport("flat", reason) for _ in keys), {}
        assert samples is not None
        learned = [self.learn_head(*head) for head in zip(keys, samples, strict=True)]
        sketches = {n: sketch for n, (sketch, _) in enumerate(learned) if sketch is not None}
        return tuple(report for _, report in learned), sketches

    def learn_head(self, keys: Tensor, samples: Tensor) -> tuple[HeadSketch | None, SketchReport]:
        """The sketch of a head's keys [N, D], if it reaches the goal; samples [G, M, D]."""
        self._cancellation.check()
        p = self.params
        goal = SketchGoal(p.check_top_k, p.target_recall, p.target_mass, p.check_queries, p.gain)
        choices = layouts(keys.shape[1], None if p.codes == "auto" else p.codes)
        return learn(keys, samples, choices, goal, self._cancellation.check)


def learn(
    keys: Tensor,
    samples: Tensor,
    choices: Sequence[Layout],
    goal: SketchGoal,
    check_cancelled: Callable[[], None],
) -> tuple[HeadSketch | None, SketchReport]:
    """The sketch of one KV head, or None where it does not pay or misses the goal.

    Args:
        keys: [N, D], N at least 1.
        samples: [G, M, D] queries of the group's heads at M positions.
        choices: the layouts that are tried; none where the head has too few channels.
        check_cancelled: called between pieces of the work.
    """
    begin = thread_time()
    build, check = hold_out_block(samples, max(1, goal.queries // samples.shape[0]))
    if not choices:
        return _scanned(f"{keys.shape[1]} channels are too few for such codes")
    if check.shape[1] == 0:
        return _scanned(f"{samples.shape[1]} sampled positions are too few")
    if not bool(torch.isfinite(samples.float().sum())):
        return _scanned("the samples hold NaN or infinity")
    maker = SketchMaker(keys, build.flatten(0, 1))
    if maker.space.is_flat:
        return _scanned("queries see no difference between the keys")
    check_cancelled()
    held = held_out(keys, check, goal.top_k)
    check_cancelled()
    found = forecasts(maker, choices, held, goal)
    sketch, report = _first_proven(maker, found, held, goal, check_cancelled)
    return sketch, replace(
        report,
        forecasts=tuple(map(str, found)),
        top_mass=held.top_mass,
        effective_dim=maker.space.effective_dim,
        learn_s=thread_time() - begin,
    )


def hold_out_block(samples: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Splits samples [G, M, D] into (build, check): the last eighth takes no part in the build.

    Neighbours of a held-out query would tell its answers; a block has them at one end only. `count`
    positions, spread over the block, are enough to check.
    """
    total = samples.shape[1]
    block = total // _HELD_SHARE
    count = min(count, block)
    held = samples[:, total - block :]
    if count:
        held = held[:, torch.arange(count) * block // count]
    return samples[:, : total - block], held


def held_out(keys: Tensor, check: Tensor, top_k: int) -> HeldOut:
    """The exact answers of queries [G, P, D] over keys [N, D]."""
    by_position = check.transpose(0, 1).float().contiguous()
    flat = by_position.flatten(0, 1)
    scale = keys.shape[1] ** -0.5  # of nearly all models; the check compares shares
    best, ids = torch.empty(len(flat), 0), torch.empty(len(flat), 0, dtype=torch.int64)
    first = 0
    for rows in keys.split(max(_RUN, _SCORES_AT_ONCE // len(flat) // _RUN * _RUN)):
        scores = flat @ rows.float().T
        found, found_ids = _best(scores, top_k)
        best, order = torch.cat([best, found], 1).topk(min(top_k, first + len(rows)))
        ids = torch.cat([ids, found_ids + first], 1).gather(1, order)
        first += len(rows)
    total = log_sums(flat, keys, best, scale)
    ids, best, total = (part.unflatten(0, by_position.shape[:2]) for part in (ids, best, total))
    return HeldOut(by_position, ids, best, total, scale)


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of scores [Q, n], with their places, unordered.

    They lie in the runs whose largest ones are the largest, which takes a third of the time.
    """
    whole = scores.shape[1] // _RUN
    if whole <= count:
        all_of_them = scores.topk(min(count, scores.shape[1]), sorted=False)
        return all_of_them.values, all_of_them.indices
    runs = scores[:, : whole * _RUN].unflatten(1, (whole, _RUN))
    picked = runs.amax(2).topk(count, sorted=False).indices
    places = (picked[..., None] * _RUN + torch.arange(_RUN)).flatten(1)
    rest = torch.arange(whole * _RUN, scores.shape[1]).expand(len(scores), -1)
    places = torch.cat([places, rest], 1)
    found = scores.gather(1, places).topk(count, sorted=False)
    return found.values, places.gather(1, found.indices)


def _scanned(reason: str) -> tuple[None, SketchReport]:
    return None, SketchReport("flat", reason)


def _first_proven(
    maker: SketchMaker,
    found: list[Forecast],
    held: HeldOut,
    goal: SketchGoal,
    check_cancelled: Callable[[], None],
) -> tuple[HeadSketch | None, SketchReport]:
    """The layout of least work that reaches the goal."""
    reason = "no layout reaches the goal by forecast"
    for forecast in found[:_LAYOUTS]:
        if forecast.num_rerank is None:
            break
        if goal.gain * forecast.work > 1:
            return _scanned(f"the 8-bit scan is less work than a sketch ({forecast})")
        sketch = maker.sketch(forecast.layout)
        check_cancelled()
        trial = _prove(sketch, maker.keys, forecast, held, goal)
        tiers = tuple(TierReport(one.map.plan.code_bytes, one.count) for one in sketch.tiers)
        reason = (
            f"recall {trial.recall:.3f}, mass {trial.mass:.4f} with {trial.beam} of {forecast.name}"
        )
        if _is_reached(trial, goal):
            sketch.num_rerank = -(-trial.beam * goal.top_k // held.ids.shape[-1])
            return sketch, SketchReport(
                "sketch", reason, tiers, trial.beam, trial.recall, trial.mass
            )
        reason = f"{reason} misses {goal.recall:g}, {goal.mass:g}"
    return _scanned(reason)


def _prove(
    sketch: HeadSketch, keys: Tensor, forecast: Forecast, held: HeldOut, goal: SketchGoal
) -> Trial:
    """Proof of a sketch: what held-out queries find with the fewest candidates that reach the goal,
    or with the most.
    """
    assert forecast.num_rerank is not None
    most = forecast.layout.most_reranked
    searcher, top_k = TierSearcher([keys], [sketch.tiers]), held.ids.shape[-1]
    ranked = max(top_k, math.ceil(_MARGIN * forecast.num_rerank))
    for _ in range(_PROOFS):
        found = [searcher.search(q[None], top_k, num_rerank=[ranked]) for q in held.queries]
        ids, scores = (
            torch.cat([one.ids for one in found]),
            torch.cat([one.scores for one in found]),
        )
        trial = held.judge(ranked, ids, scores, 1.0)
        if _is_reached(trial, goal) or ranked >= most:
            break
        ranked = min(most, math.ceil(_WIDER * ranked))
    return trial


def _is_reached(trial: Trial, goal: SketchGoal) -> bool:
    return trial.recall >= goal.recall and trial.mass >= goal.mass


_QUERIES, _KEYS = 64, 8192


@dataclass(frozen=True, slots=True)
class SketchGoal:
    """Targets of a sketch, which is good enough where it reaches both shares of the exact answer.

    top_k: the answers that are checked; recall, mass: of them; queries: held out for the check;
    gain: how much more work the 8-bit scan must be, 0 for a sketch at any price.
    """

    top_k: int
    recall: float
    mass: float
    queries: int
    gain: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast of a layout.

    num_rerank: candidates of a query, None for too many; work: of a search of the group, over that
    of the 8-bit scan.
    """

    layout: Layout
    num_rerank: int | None
    work: float

    @property
    def name(self) -> str:
        return "/".join(str(plan.code_bytes) for plan in self.layout.plans) + " B"

    def __str__(self) -> str:
        ranked = "more candidates than pay" if self.num_rerank is None else self.num_rerank
        return f"{self.name}: {ranked}, {self.work:.2f} of the scan's work"


def forecasts(
    maker: SketchMaker, choices: Sequence[Layout], held: HeldOut, goal: SketchGoal
) -> list[Forecast]:
    """Of every layout, the least work first."""
    group = held.queries.shape[1]
    num_keys, dim = maker.keys.shape
    row = _ROW_WORK + dim * maker.keys.itemsize
    scan = num_keys * (dim + 4 + _SCAN_KEY_WORK) + group * _SCAN_RERANKED * held.ids.shape[-1] * row
    sample = _Sample(maker, held)
    found = []
    for layout in choices:
        needed = sample.needed(layout, goal)
        ranked = layout.most_reranked if needed is None else needed
        work = num_keys * (layout.scanned_bytes + _KEY_WORK) + group * ranked * row
        found.append(Forecast(layout, needed, work / scan))
    return sorted(found, key=lambda one: (one.num_rerank is None, one.work))


class _Sample:
    """Some held-out queries, their best keys, and some of the other keys with equal steps between.

    The rank of a best key by its codes is estimated as that among the query's best keys, and the
    step times the number of others above it.
    """

    def __init__(self, maker: SketchMaker, held: HeldOut) -> None:
        self._maker = maker
        queries, ids = held.queries.flatten(0, 1), held.ids.flatten(0, 1)
        scores = held.scores.flatten(0, 1)
        some = slice(None, None, max(1, len(queries) // _QUERIES))
        self._queries, scores = queries[some], scores[some]
        self._step = max(1, len(maker.keys) // _KEYS)
        spread = maker.keys[:: self._step].float()
        best, self._best = ids[some].unique(return_inverse=True)
        self._rows = torch.cat([spread, maker.keys[best].float()])
        self._num_spread = len(spread)
        self._is_best = self._queries @ spread.T >= scores[:, -1:]  # [Q, S]
        self._weights = (scores * held.scale).softmax(-1)

    def needed(self, layout: Layout, goal: SketchGoal) -> int | None:
        """Candidates that reach the goal; None for more than the layout's most."""
        ranks = self._ranks(self._scores(layout), layout.most_reranked)
        order = ranks.flatten().argsort()
        share = torch.arange(1, len(order) + 1) / len(order)
        mass = self._weights.flatten()[order].double().cumsum(0) / len(ranks)
        enough = (share >= goal.recall) & (mass >= goal.mass * mass[-1])
        rank = float(ranks.flatten()[order][enough.float().argmax()])
        return math.ceil(rank) if rank <= layout.most_reranked else None

    def _scores(self, layout: Layout) -> Tensor:
        """[Q, S + answers] by the codes of a layout."""
        maps = [self._maker.map_of(plan) for plan in layout.plans]
        if layout.is_uniform:
            return self._scores_of(maps[0], self._rows)
        potential = self._maker.potential.of(self._rows)
        ascending = potential[: self._num_spread].sort().values
        cuts = ascending[[int(cut * len(ascending)) for cut in layout.cuts]]
        tier_of = torch.bucketize(potential, cuts)
        scores = torch.empty(len(self._queries), len(self._rows))
        for number, one in enumerate(maps):
            own = tier_of == number
            scores[:, own] = self._scores_of(one, self._rows[own])
        return scores

    def _scores_of(self, one: SketchMap, rows: Tensor) -> Tensor:
        zeros = one.plan.zeros
        codes = torch.addmm(zeros - one.key_offset, rows, one.key_map.T).round_()
        codes = codes.clamp_min_(0).minimum(one.plan.tops) - zeros
        return (self._queries @ one.query_map.T) @ codes.T

    def _ranks(self, scores: Tensor, most: int) -> Tensor:
        """[Q, K] float32, infinite beyond `most`."""
        others, rest = scores[:, : self._num_spread], scores[:, self._num_spread :]
        best = rest.gather(1, self._best)
        among_best = best.argsort(1, descending=True).argsort(1) + 1
        depth = min(self._num_spread, most // self._step + 2)
        above = others.masked_fill(self._is_best, -torch.inf).topk(depth, 1).values.flip(1)
        count = depth - torch.searchsorted(above.contiguous(), best.contiguous(), right=True)
        ranks = among_best + self._step * count.float()
        return ranks.masked_fill(ranks > most, torch.inf)
