"""How many candidates each layout would need, estimated from some of the keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_kv.index._sketch_maker import SketchMaker
from hybrid_kv.index._sketch_plans import Layout
from hybrid_kv.index._trial import HeldOut
from hybrid_kv.ops.sketch_codes import SketchMap

_QUERIES, _KEYS = 64, 8192
_SCAN_RERANKED = 1.5
"""Candidates of the 8-bit scan, per result."""
_ROW_WORK, _KEY_WORK, _SCAN_KEY_WORK = 512, 12, 32
"""Bytes of codes that could be scanned in the time of one stored key that is ranked exactly, beside
its own; of a key's code, beside its bytes; and of a key of the 8-bit scan (docs/lab.md).
"""


@dataclass(frozen=True, slots=True)
class SketchGoal:
    """When a sketch is good enough: both shares of the exact answer are reached.

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
    """What a layout would take.

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
