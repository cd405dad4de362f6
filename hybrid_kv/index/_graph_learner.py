"""Learning of a head's graph from prefill queries: lists, projection, self-check.

The native engine makes the lists and the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from hybrid_kv.index._base import Cancellation
from hybrid_kv.index._sketch_head import HeadSketch, TierSearcher
from hybrid_kv.index._trial import HeadReport, HeldOut, Trial, log_sums
from hybrid_kv.ops.key_graph import BuildParams, KeyGraph
from hybrid_kv.ops.native import engine_state, scans
from hybrid_kv.ops.native.graph import GraphSearcher, nearest_keys, project
from hybrid_kv.ops.native.library import default_pool, pool_here
from hybrid_kv.ops.native.rows import DTYPES, QuantisedKeys, is_readable
from hybrid_kv.rotary import horizon_shares


class Found(Protocol):
    """Result of a search."""

    @property
    def ids(self) -> Tensor:
        """[1, G, K] int64, -1 for none."""
        ...

    @property
    def scores(self) -> Tensor:
        """[1, G, K] float32, -inf for none."""
        ...

    @property
    def rows_visited(self) -> int:
        """Distinct keys that were read."""
        ...


class Searcher(Protocol):
    """Searches the graph of one head."""

    def search(self, queries: Tensor, top_k: int, *, beam: int, walks: int) -> Found:
        """The best keys of queries [1, G, D], which so many walks share."""
        ...


class LearningEngine(Protocol):
    """The arithmetic of learning one head, over its keys; queries [Q, D]."""

    def nearest(self, queries: Tensor, count: int) -> Tensor:
        """The exact best keys of each query, [Q, count] int32, best first."""
        ...

    def lists(self, queries: Tensor, count: int) -> Tensor:
        """As `nearest`, but nearly: what a graph is made from need not be exact."""
        ...

    def project(self, lists: Tensor, queries: Tensor, params: BuildParams) -> KeyGraph:
        """The graph of what queries retrieved: lists [Q, K] int32."""
        ...

    def searcher(self, graph: KeyGraph) -> Searcher:
        """Searches that graph."""
        ...


BEAMS = (24, 1024)
"""The smallest and the largest that the self-check tries."""
DRIFT = 0.015
"""Recall that is lost between the prompt, where heads are checked, and the text that follows."""
_WIDER = (1.25, 2.0)
"""Of the beams that are tried where walks share a head's queries, over that of one walk."""
_METRIC_QUERIES = 16384


def learn(
    keys: Tensor,
    samples: Tensor,
    params: BuildParams,
    list_length: int,
    goal: Goal,
    engine: LearningEngine,
    nearest: Tensor | None = None,
    walks: int = 1,
) -> tuple[KeyGraph | None, HeadReport]:
    """The graph of one KV head, or None where it does not reach the goal.

    Args:
        keys: [N, D].
        samples: [G, M, D] prefill queries of the group's heads at M positions.
        engine: over the same keys.
        nearest: [G, M, K] int32, the exact best keys of all samples where they are known.
        walks: how many shall share the queries of a search, if they find as much.
    """
    among = num_like_later(samples.shape[1], goal.recent, keys.shape[0])
    build, check = hold_out(samples, goal.positions, among)
    if check.shape[1] == 0:
        return None, HeadReport("flat", f"{samples.shape[1]} sampled positions are too few")
    queries = build.flatten(0, 1)
    begin = perf_counter()
    known_build, known_check = (None, None)
    if nearest is not None:
        known_build, known_check = hold_out(nearest, goal.positions, among)
    lists = _nearest(engine.lists, queries, min(list_length, keys.shape[0]), known_build)
    listed = perf_counter()
    graph = engine.project(lists, queries, params)
    projected = perf_counter()
    held = _exact_answers(keys, check, goal.top_k, engine, known_check)
    searcher = engine.searcher(graph)
    trials = run_trials(held, beam_search(searcher, held.ids.shape[-1], len(keys)), goal)
    trial, reason = choose(trials, goal)
    if trial is not None and walks > 1:
        shared = _shared(trial, held, searcher, len(keys), goal, walks)
        trials += shared
        trial = next((one for one in reversed(shared) if goal.is_reached(one)), trial)
    sample = queries[:: max(1, len(queries) // _METRIC_QUERIES)].float()
    report = HeadReport(
        serves="flat" if trial is None else "graph",
        reason=reason,
        **({} if trial is None else promised(trial)),
        trials=tuple(trials),
        top_mass=held.top_mass,
        effective_dim=effective_dim(keys, sample.T @ sample / len(sample)),
        lists_s=listed - begin,
        project_s=projected - listed,
    )
    return (None if trial is None else graph), report


def _shared(
    alone: Trial, held: HeldOut, searcher: Searcher, num_keys: int, goal: Goal, walks: int
) -> list[Trial]:
    """Trials of walks that share the queries of a head which one walk serves as `alone` says.

    Each sees fewer keys, so they need wider beams, and how much wider depends on the head. Threads
    would idle otherwise, so that keys are not counted.
    """
    narrowest, widest = (min(BEAMS[1], int(factor * alone.beam)) for factor in _WIDER)
    beams = (narrowest, max(narrowest, widest))
    search = beam_search(searcher, held.ids.shape[-1], num_keys, walks)
    trials = run_trials(held, search, replace(goal, beams=beams, max_scanned=math.inf))
    return [replace(one, walks=walks) for one in trials]


def promised(trial: Trial) -> dict[str, Any]:
    """Fields of a report from the trial that decides how a head is served."""
    return {name: getattr(trial, name) for name in ("beam", "walks", "recall", "mass")}


def beam_search(
    searcher: Searcher, top_k: int, num_keys: int, walks: int = 1
) -> Callable[[Tensor, int], tuple[Tensor, Tensor, float]]:
    """Search for `run_trials`: positions [P, G, D] one by one, as decoding does."""

    def search(asked: Tensor, beam: int) -> tuple[Tensor, Tensor, float]:
        found = [searcher.search(group[None], top_k, beam=beam, walks=walks) for group in asked]
        rows = sum(result.rows_visited for result in found)
        return (
            torch.cat([result.ids for result in found]),
            torch.cat([result.scores for result in found]),
            rows / (len(found) * num_keys),
        )

    return search


def _nearest(
    find: Callable[[Tensor, int], Tensor], queries: Tensor, count: int, known: Tensor | None
) -> Tensor:
    """The exact best keys [Q, count] of queries [Q, D]; known: [..., K] the same queries'."""
    if known is None or known.shape[-1] < count:
        return find(queries, count)
    return known.reshape(-1, known.shape[-1])[:, :count].contiguous()


def _exact_answers(
    keys: Tensor, check: Tensor, top_k: int, engine: LearningEngine, known: Tensor | None
) -> HeldOut:
    """Exact answers of the held-out queries [G, P, D]; known: [G, P, K], their best keys."""
    by_position = check.transpose(0, 1).float().contiguous()  # [P, G, D]
    flat = by_position.flatten(0, 1)
    known = None if known is None else known.transpose(0, 1)
    ids = _nearest(engine.nearest, flat, min(top_k, keys.shape[0]), known).long()
    scores = torch.einsum("qkd,qd->qk", keys[ids].float(), flat)
    scale = keys.shape[1] ** -0.5  # of nearly all models; the check compares shares
    total = log_sums(flat, keys, scores, scale)
    shape = by_position.shape[:2]
    return HeldOut(
        by_position,
        ids.unflatten(0, shape),
        scores.unflatten(0, shape),
        total.unflatten(0, shape),
        scale,
    )


_QUERIES_AT_ONCE = 8192
"""Of a search for nearest keys; a build that is cancelled ends after these."""
_SKETCHED_AT_ONCE, _LIST_RERANK = 1024, 3
"""Queries of a search by sketch for lists, and candidates per key of a list."""


class GraphLearner:
    """Learns the graphs of heads, one after the other, and proves each of them.

    Args:
        params: of a graph index.
        cancellation: looked at between pieces of the work.
    """

    def __init__(self, params: Any, cancellation: Cancellation) -> None:
        self.params, self._cancellation = params, cancellation

    @property
    def build_params(self) -> BuildParams:
        """Parameters by which graphs are built, and grow."""
        p = self.params
        return BuildParams(
            max_degree=p.max_degree, cap=p.cap, candidates=p.candidates, alpha=p.alpha
        )

    def why_flat(self, keys: Tensor, samples: Tensor | None) -> str | None:
        """Reason why no graph can be learned for keys [Hkv, N, D], whatever they are; None if one
        can.
        """
        if keys.shape[1] < self.params.min_keys:
            return f"{keys.shape[1]} keys, a graph takes {self.params.min_keys}"
        if samples is None or samples.shape[2] == 0:
            return "there are no prefill queries to learn from"
        return _why_unread(keys)

    def learn_head(
        self,
        keys: Tensor,
        samples: Tensor,
        nearest: Tensor | None,
        sketch: HeadSketch | None = None,
        walks: int = 1,
    ) -> tuple[KeyGraph | None, HeadReport]:
        """The graph of a head's keys [N, D], if it reaches the goal.

        Args:
            samples: [G, M, D].
            nearest: [G, M, K] where the lists are there already.
            sketch: of the same keys, which makes the lists.
            walks: that shall share the queries of a search.
        """
        p = self.params
        goal = Goal(
            top_k=p.check_top_k,
            recall=min(1.0, p.target_recall + DRIFT),
            mass=p.target_mass,
            max_scanned=p.max_scanned,
            positions=p.check_positions,
            beams=BEAMS if p.beam == "auto" else (p.beam, p.beam),
            recent=p.recent_queries,
        )
        engine = _HeadEngine(keys, self._cancellation.check, sketch)
        shared = min(walks, samples.shape[0])
        return learn(keys, samples, self.build_params, p.list_length, goal, engine, nearest, shared)


class _HeadEngine:
    """Native engine of one head that is learned; keys [N, D] are quantised once.

    Args:
        check_cancelled: called between pieces of the work.
        sketch: of these keys or the first of them; it makes the lists of sampled queries.
    """

    def __init__(
        self, keys: Tensor, check_cancelled: Callable[[], None], sketch: HeadSketch | None
    ) -> None:
        self._check_cancelled = check_cancelled
        self._sketch = None if sketch is None else TierSearcher([keys], [sketch.tiers])
        self._num_later = 0 if sketch is None else len(keys) - sketch.count
        self._quantised = _quantise(keys[None], with_blocks=True)
        self._scan = scans.FlatScan(keys[None], self._quantised)

    def lists(self, queries: Tensor, count: int) -> Tensor:
        if self._sketch is None:
            return self.nearest(queries, count)
        ranked = min(_LIST_RERANK * count, self._scan.keys.shape[1])
        found = []
        for some in queries.split(_SKETCHED_AT_ONCE):
            self._check_cancelled()
            best = self._sketch.search(
                some[None].float(), count, num_rerank=[ranked], num_exact=self._num_later
            )
            found.append(best.ids[0].to(torch.int32))
        return torch.cat(found)

    def nearest(self, queries: Tensor, count: int) -> Tensor:
        rerank = count + count // 2
        found = []
        for some in queries.split(_QUERIES_AT_ONCE):
            self._check_cancelled()
            found.append(nearest_keys(self._scan, 0, some, count, rerank=rerank, pool=pool_here()))
        return torch.cat(found)

    def project(self, lists: Tensor, queries: Tensor, params: BuildParams) -> KeyGraph:
        self._check_cancelled()
        return project(lists, self._scan.keys[0], queries, params, pool_here())

    def searcher(self, graph: KeyGraph) -> GraphSearcher:
        keys = self._scan.keys
        rows = self._quantised.take(0, graph.keys_of.long())
        return GraphSearcher(keys, [rows], [graph])


def walks_of_each(num_heads: int) -> int:
    """Number of walks that share a head's queries, so that so many heads keep all threads busy.

    Two walks take some .6 of the time of one; more were not seen to pay.
    """
    if engine_state().isa is None:
        return 1
    return 2 if default_pool().threads >= 2 * num_heads else 1


def rows_of(keys: Tensor, graph: KeyGraph) -> QuantisedKeys:
    """Rows that searches of one head's graph read: its nodes."""
    return _quantise(keys[None]).take(0, graph.keys_of.long())


def _quantise(keys: Tensor, *, with_blocks: bool = False) -> QuantisedKeys:
    heads, _, dim = keys.shape
    quantised = QuantisedKeys(heads, dim, with_rows=True, with_blocks=with_blocks)
    quantised.build(keys, pool_here())
    return quantised


def _why_unread(keys: Tensor) -> str | None:
    """Reason why the engine does not serve these keys; None if it does."""
    if (state := engine_state()).isa is None:
        return f"no native engine: {state.detail}"
    if keys.dtype not in DTYPES or not is_readable(keys):
        return f"the engine does not read {keys.dtype} rows of strides {list(keys.stride())}"
    return None


# The self-check -----------------------------------------------------------------------------------

_HELD_SHARE, _NEAR, _RUN = 8, 0.125, 3
"""Of the samples, at most this part is held out; those are asked that stand in this share of the
horizon, which are one of so many."""


def hold_out(samples: Tensor, count: int, among: int | None = None) -> tuple[Tensor, Tensor]:
    """Splits samples [G, M, D] into (build, check): a run of them takes no part in the build.

    Neighbours in the prompt share half of their best keys, so that samples held out one by one
    would be found through those beside them, as no later query will be. Of the run those are asked
    that stand where decoding begins (`horizon_shares`): there the prompt's last keys are nearest,
    and what is found differs from the mean of the horizon by up to .05 (docs/lab.md).

    Args:
        count: positions to check with; fewer where an eighth of M has fewer there.
        among: the run is the end of so many first ones; None for all.
    """
    total = samples.shape[1]
    among = total if among is None else among
    first = among - min(total // _HELD_SHARE, _RUN * count, among)
    near = first + (horizon_shares(total)[first:among] < _NEAR).nonzero()[:, 0]
    count = min(count, len(near))
    kept = near[torch.arange(count) * len(near) // max(1, count)]
    return torch.cat([samples[:, :first], samples[:, among:]], 1), samples[:, kept]


def num_like_later(num_samples: int, recent: int, num_keys: int) -> int:
    """Number of the first samples that stand for the queries after the prompt.

    The last `recent` samples are the last positions, next to each other. Each is so like its
    neighbours in the build that the graph serves it better than later text. The samples before
    are spread over the prompt, and those among them that lie in its last positions are in the
    build a second time. All samples count where that leaves too few.
    """
    spread = max(0, num_samples - recent)
    apart = spread * max(0, num_keys - recent) // max(1, num_keys)
    return apart if apart >= num_samples // 8 else num_samples


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal of a graph, which says when it is good enough, and range of what is tried.

    top_k: the answers that are checked. recall, mass: shares of the exact answer, one of which has
    to be reached. max_scanned: share of the keys that a search of a group may score. positions:
    held out for the check. beams: the smallest and the largest that are tried. recent: samples at
    the end that are the prompt's last positions.
    """

    top_k: int
    recall: float
    mass: float
    max_scanned: float
    positions: int
    beams: tuple[int, int]
    recent: int = 0

    def is_reached(self, trial: Trial) -> bool:
        """By recall, or by mass where the last keys of the top weigh nothing."""
        return trial.recall >= self.recall or trial.mass >= self.mass


def choose(trials: Sequence[Trial], goal: Goal) -> tuple[Trial | None, str]:
    """The least work that is good enough, or None with the reason."""
    for trial in sorted(trials, key=lambda trial: trial.scanned):
        if trial.scanned > goal.max_scanned:
            break
        if goal.is_reached(trial):
            return trial, f"recall {trial.recall:.3f}, {trial.scanned:.1%} scanned"
    best = max(trials, key=lambda trial: trial.recall, default=None)
    if best is None:
        return None, "no held-out queries"
    missed = "is more work than" if best.recall >= goal.recall else "misses the target"
    return None, (
        f"recall {best.recall:.3f} at {best.scanned:.1%} scanned {missed} "
        f"{goal.recall:g} within {goal.max_scanned:.0%}"
    )


def run_trials(
    held: HeldOut,
    search: Callable[[Tensor, int], tuple[Tensor, Tensor, float]],
    goal: Goal,
) -> list[Trial]:
    """Trials that close in on the smallest beam that reaches the goal, to an eighth of it.

    Args:
        search: (queries [P, G, D], beam) -> ids, scores [P, G, K] and the mean share of distinct
            keys scored per position.
    """
    trials: list[Trial] = []

    def is_reached_by(beam: int) -> bool:
        trials.append(held.judge(beam, *search(held.queries, beam)))
        return goal.is_reached(trials[-1])

    misses, (reaches, last) = 0, goal.beams
    while not is_reached_by(reaches):
        if reaches >= last or trials[-1].scanned > goal.max_scanned:
            return trials
        misses, reaches = reaches, min(last, reaches * 8 // 5)
    while misses and reaches - misses > reaches // 8:
        middle = (misses + reaches) // 2
        if is_reached_by(middle):
            reaches = middle
        else:
            misses = middle
    return trials


def effective_dim(keys: Tensor, metric: Tensor, most: int = 4096) -> float:
    """Dimensions that keys [N, D] spread over in the metric [D, D] of the queries.

    exp of the entropy of the normalised spectrum; rises with the share of keys a search must see.
    """
    rows = keys[:: max(1, keys.shape[0] // most)].float()
    rows = rows - rows.mean(0)
    eigenvalues, vectors = torch.linalg.eigh(metric)
    root = vectors * eigenvalues.clamp_min(0).sqrt()
    spread = torch.linalg.svdvals(rows @ root).square()
    share = spread / spread.sum().clamp_min(torch.finfo(spread.dtype).tiny)
    entropy = -(share * share.clamp_min(1e-30).log()).sum()
    return float(entropy.exp())
