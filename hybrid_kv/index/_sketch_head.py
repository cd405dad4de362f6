"""The sketch of one KV head: how it is made, tiers of codes, and which keys go where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from hybrid_kv.index._sketch_space import Layout, QuerySpace, sketch_map
from hybrid_kv.ops.native.library import engine
from hybrid_kv.ops.native.rows import DTYPES, is_readable
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.ops.native.workers import pool_here
from hybrid_kv.ops.sketch_codes import BLOCK_KEYS, MAX_DIMS, SketchMap, SketchPlan, SketchTier
from hybrid_kv.types import SearchResult

DIMS = 48
_QUERIES = 1024
_RANK = 1000
"""The key of this rank of a query has potential 0 for it."""
_POTENTIAL_KEYS = 4096
"""Keys that say what that score is."""
_KEYS_AT_ONCE = 1024
_FIRST_SHARE = 8
"""At most one dim in so many has 8 bits."""


@dataclass(frozen=True, slots=True)
class Potential:
    """A key's is max over queries q of (q . k - t_q) / sd_q in the first dims of their space.

    t_q is the score of the key of rank 1000, sd_q the spread of the scores.

    of_keys [d, D], weights [d, Q] int8, scale [Q], thresholds [Q]; float32 but for the weights.
    """

    of_keys: Tensor
    weights: Tensor
    scale: Tensor
    thresholds: Tensor

    @classmethod
    def learn(cls, space: QuerySpace, keys: Tensor, queries: Tensor) -> Self:
        """From keys [N, D] and queries [Q, D]."""
        queries = queries[:: max(1, len(queries) // _QUERIES)][:_QUERIES]
        dims = min(DIMS, keys.shape[1])
        wanted = space.queries(queries, dims).T
        largest = wanted.abs().amax(0).clamp_min(1e-30)
        weights = (wanted * (127 / largest)).round().to(torch.int8)
        of_keys = space.of_keys[:dims].float()
        rows = keys[:: max(1, len(keys) // _POTENTIAL_KEYS)].float() @ of_keys.T
        scores = (weights * (largest / 127)).T @ rows.T
        spread = scores.std(1, correction=0).clamp_min(1e-30)
        rank = max(1, min(len(rows), round(_RANK * len(rows) / len(keys))))
        cut = scores.topk(rank, 1).values[:, -1]
        return cls(of_keys, weights, largest / 127 / spread, cut / spread)

    def of(self, keys: Tensor) -> Tensor:
        """[n] float32, for keys [n, D]."""
        weights = self.weights * self.scale
        found = [
            torch.addmm(-self.thresholds, block.float() @ self.of_keys.T, weights).amax(1)
            for block in keys.split(_KEYS_AT_ONCE)
        ]
        return torch.cat(found) if found else torch.empty(0)

    @property
    def nbytes(self) -> int:
        return sum(
            part.nbytes for part in (self.of_keys, self.weights, self.scale, self.thresholds)
        )


def why_unread(keys: Tensor) -> str | None:
    """Reason why keys [..., N, D] cannot be sketched where they lie; None if they can."""
    if keys.dtype not in DTYPES or not is_readable(keys):
        return f"sketches do not read {keys.dtype} rows of strides {list(keys.stride())}"
    return None


def new_tier(sketch_map: SketchMap, *, with_ids: bool) -> SketchTier:
    """An empty tier."""
    tier: SketchTier = _module().SketchTier(sketch_map, with_ids=with_ids)
    return tier


def restored_tier(
    sketch_map: SketchMap, codes: Tensor, ids: Tensor | None, count: int
) -> SketchTier:
    """A tier of codes that were made before; raises as `SketchTier.restore`."""
    tier: SketchTier = _module().SketchTier.restore(sketch_map, codes, ids, count)
    return tier


def encode(tier: Any, keys: Tensor, rows: Tensor | None = None) -> None:
    """As `SketchTier.append`, on the threads of whoever calls."""
    tier.append(keys, rows, **_pool())


class TierSearcher:
    """Searches the tiers of some heads; to be made anew after these have grown.

    Args:
        keys: [N, D] of each head.
        tiers: of each head.
    """

    def __init__(self, keys: Sequence[Tensor], tiers: Sequence[Sequence[SketchTier]]) -> None:
        self._searcher = _module().SketchSearcher(keys, tiers)

    def follow(self, keys: Sequence[Tensor]) -> None:
        """As `SketchSearcher.follow`."""
        self._searcher.follow(keys)

    def search(self, queries: Tensor, top_k: int, **how: Any) -> SearchResult:
        """As `SketchSearcher.search`, on the threads of whoever calls."""
        found: SearchResult = self._searcher.search(queries, top_k, **how, **_pool())
        return found

    def plan(self, top_k: int, **how: Any) -> EngineSearch | None:
        """The same search as a part of a step that is one call; None where there is no engine."""
        if engine() is None:
            return None
        planned: EngineSearch = self._searcher.plan(top_k, **how)
        return planned


def _module() -> Any:
    if engine() is None:
        from hybrid_kv.ops.portable import sketch as portable

        return portable
    from hybrid_kv.ops.native import sketch as native

    return native


def _pool() -> dict[str, Any]:
    return {} if engine() is None else {"pool": pool_here()}


@dataclass(frozen=True, slots=True)
class Placing:
    """Assignment of keys to tiers: its potential lies between two cuts, [tiers - 1] ascending."""

    potential: Potential
    cuts: Tensor

    def of(self, keys: Tensor) -> Tensor:
        """[n] int64 tier of each key [n, D]."""
        return torch.bucketize(self.potential.of(keys), self.cuts)

    @property
    def nbytes(self) -> int:
        return self.potential.nbytes + self.cuts.nbytes


class HeadSketch:
    """Codes of the first `count` keys of a head.

    Args:
        tiers: a single one without ids holds all keys; several hold those that `placing` gives
            them.
        num_rerank: candidates that are ranked exactly, for the number of results checked.
        mean: [D] float32 of the keys, where a device has made the codes: it asks for it again.
    """

    def __init__(
        self,
        tiers: Sequence[SketchTier],
        num_rerank: int,
        placing: Placing | None = None,
        mean: Tensor | None = None,
    ) -> None:
        self.tiers, self.num_rerank, self.placing = tuple(tiers), num_rerank, placing
        self.mean = mean
        self.count = sum(tier.count for tier in tiers)

    @classmethod
    def of(cls, maps: Sequence[SketchMap], keys: Tensor, placing: Placing | None) -> HeadSketch:
        """Of all keys [N, D]."""
        tiers = [new_tier(one, with_ids=placing is not None) for one in maps]
        sketch = cls(tiers, 0, placing)
        sketch.append(keys)
        return sketch

    def append(self, keys: Tensor) -> None:
        """Encodes the rows of keys [N, D] from `count` on."""
        if self.placing is None:
            encode(self.tiers[0], keys)
        else:
            tier_of = self.placing.of(keys[self.count :])
            for number, tier in enumerate(self.tiers):
                encode(tier, keys, (tier_of == number).nonzero()[:, 0] + self.count)
        self.count = len(keys)

    def copy(self) -> HeadSketch:
        """The same in memory of its own, to be appended to by itself."""
        return self.first(self.count)

    def first(self, count: int) -> HeadSketch:
        """The codes of so many first keys, in memory of their own."""
        tiers = []
        for one in self.tiers:
            ids = one.ids
            held = min(one.count, count) if ids is None else int(torch.searchsorted(ids, count))
            codes = one.codes[: -(-held // BLOCK_KEYS)]
            tiers.append(restored_tier(one.map, codes, None if ids is None else ids[:held], held))
        return HeadSketch(tiers, self.num_rerank, self.placing, self.mean)

    @property
    def memory_bytes(self) -> int:
        parts = sum(tier.memory_bytes + tier.map.nbytes for tier in self.tiers)
        return parts + (0 if self.placing is None else self.placing.nbytes)


class SketchMaker:
    """Makes sketches of keys [N, D] in the space that queries [Q, D] see."""

    def __init__(self, keys: Tensor, queries: Tensor) -> None:
        self.keys, self.queries = keys, queries
        self.space = QuerySpace.learn(keys, queries)
        self._maps: dict[SketchPlan, SketchMap] = {}

    def map_of(self, plan: SketchPlan) -> SketchMap:
        if plan not in self._maps:
            self._maps[plan] = sketch_map(self.space, plan, self._largest)
        return self._maps[plan]

    @cached_property
    def potential(self) -> Potential:
        return Potential.learn(self.space, self.keys, self.queries)

    def sketch(self, layout: Layout) -> HeadSketch:
        """All keys in the codes of a layout."""
        placing = None
        if not layout.is_uniform:
            potential = self.potential.of(self.keys)
            cuts = potential.sort().values[[int(cut * len(potential)) for cut in layout.cuts]]
            placing = Placing(self.potential, cuts)
        return HeadSketch.of([self.map_of(plan) for plan in layout.plans], self.keys, placing)

    @cached_property
    def _largest(self) -> Tensor:
        return self.space.largest(self.keys, min(self.keys.shape[1], MAX_DIMS // _FIRST_SHARE))
