"""The sketch of one KV head: the metric of its codes, tiers of codes, and which keys go where.

A key k becomes y = U^T R (k - mean) and a query q becomes x = U^T R^-1 q, so that x . y = q . k but
for a term that all keys share. R is the root of the queries' second moment, so queries are alike in
all directions of x, and U sorts the directions by how far the keys spread in them. Few directions
matter, and few bits of most.

Layouts of codes are uniform, or tiers whose keys get more bytes for mattering more. Their sizes are
named for a head of 128 channels; other heads get plans in proportion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from hybrid_kv.ops.native.library import engine, pool_here
from hybrid_kv.ops.native.rows import DTYPES, is_readable
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.ops.sketch_codes import (
    BLOCK_KEYS,
    MAX_DIMS,
    SketchMap,
    SketchPlan,
    SketchTier,
    dims_per_line,
)
from hybrid_kv.types import SearchResult

_SAMPLE_KEYS = 16384
_BLOCK_KEYS = 4096
_RIDGE = 1e-5
"""Of the mean second moment of the queries' channels, given to directions that no sample has."""
_STEPS = {4: 0.335, 2: 0.996}
"""Of a Gaussian's spread, between two codes: the best for all keys (Max 1960)."""
_WIDER = 1.5
"""Steps are wider than that, because the keys that matter lie outside."""
_SEED = 0x5EED
_NAMED_DIM = 128
_LINES = MappingProxyType({8: (1, 0), 16: (1, 0), 24: (2, 0), 32: (2, 2), 48: (2, 0), 64: (4, 0)})
"""Lines of 4 bytes with 8-bit and with 2-bit codes, by bytes of a key; all others have 4 bits."""
_UNIFORM = MappingProxyType({16: 400, 24: 400, 32: 400, 48: 600, 64: 600})
"""Candidates of a query above which codes of so many bytes do not pay."""
_TIERS = ((16, 32, 64), (0.6, 0.3, 0.1))
"""Of the lowest tier no fewer: it holds what the prompt never asked for, and the answer may."""
_TIERS_RERANKED = 400
_LINE_BYTES = 4


@dataclass(frozen=True, slots=True)
class QuerySpace:
    """mean [D]; of_keys, of_queries [D, D]: rows give y and x; spread [D]: of the keys along y,
    descending. Everything is float64.
    """

    mean: Tensor
    of_keys: Tensor
    of_queries: Tensor
    spread: Tensor

    @classmethod
    def learn(cls, keys: Tensor, queries: Tensor) -> Self:
        """From keys [N, D], N at least 1, and queries [Q, D], all finite, on any device; the space
        lies on the host.
        """
        sample = keys[:: max(1, len(keys) // _SAMPLE_KEYS)].double()
        mean = sample.mean(0)
        sample = sample - mean
        queries = queries.double()
        moment = (queries.T @ queries / len(queries)).cpu()
        covariance = (sample.T @ sample / len(sample)).cpu()
        ridge = _RIDGE * moment.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
        values, vectors = torch.linalg.eigh(moment)
        roots = (values.clamp_min(0) + ridge).sqrt()
        root = vectors * roots @ vectors.T
        inverse = vectors / roots @ vectors.T
        spread, turn = torch.linalg.eigh(root @ covariance @ root)
        turn, spread = turn.flip(1), spread.flip(0).clamp_min(0).sqrt()
        return cls(mean.cpu(), turn.T @ root, turn.T @ inverse, spread)

    @property
    def effective_dim(self) -> float:
        """Directions that the keys spread over: exp of the entropy of their shares."""
        share = self.spread.square() / self.spread.square().sum().clamp_min(1e-300)
        return float(torch.special.entr(share).sum().exp())

    @property
    def is_flat(self) -> bool:
        """Whether queries see no difference between keys."""
        return not float(self.spread[0]) > 1e-6 * float((self.of_keys @ self.mean).norm())

    def keys(self, keys: Tensor, dims: int) -> Iterator[Tensor]:
        """The first dims of y for keys [N, D], in blocks [n, dims] float32, where the keys lie."""
        turn = self.of_keys[:dims].float().to(keys.device)
        offset = (self.of_keys[:dims] @ self.mean).float().to(keys.device)
        for block in keys.split(_BLOCK_KEYS):
            yield torch.addmm(-offset, block.float(), turn.T)

    def queries(self, queries: Tensor, dims: int) -> Tensor:
        """The first dims of x for queries [Q, D], [Q, dims] float32."""
        return queries.float() @ self.of_queries[:dims].float().T

    def largest(self, keys: Tensor, dims: int) -> Tensor:
        """[dims] float64, the largest distance of keys [N, D] from 0 along y."""
        found = torch.zeros(dims, device=keys.device)
        for block in self.keys(keys, dims):
            torch.maximum(found, block.abs().amax(0), out=found)
        return found.double().cpu()


def sketch_map(space: QuerySpace, plan: SketchPlan, largest: Tensor) -> SketchMap:
    """Map by which keys and queries become codes of a plan.

    The first dims have 8 bits and one step that holds every key; further groups are turned at
    random, which makes their dims alike, and have one step each.

    Args:
        largest: [at least the dims of 8 bits] float64, as `QuerySpace.largest` gives it.
    """
    key_rows, query_rows, first = [], [], 0
    tiny = 1e-9 * float(space.spread[0]) + 1e-30
    for dims, bits in plan.groups:
        group = slice(first, first + dims)
        of_keys, of_queries = space.of_keys[group], space.of_queries[group]
        if bits == 8:
            step = float(largest[group].max()) / 127
        else:
            step = float(space.spread[group].square().mean().sqrt()) * _STEPS[bits] * _WIDER
            turn = _random_turn(dims, first)
            of_keys, of_queries = turn @ of_keys, turn @ of_queries
        step = max(step, tiny)
        key_rows.append(of_keys / step)
        query_rows.append(of_queries * step)
        first += dims
    key_map = torch.cat(key_rows)
    offset = (key_map @ space.mean).float()
    return SketchMap(plan, key_map.float(), offset, torch.cat(query_rows).float())


def _random_turn(dims: int, seed: int) -> Tensor:
    """A rotation [dims, dims] float64, the same for the same arguments."""
    random = torch.Generator().manual_seed(_SEED + seed)
    turn, upper = torch.linalg.qr(torch.randn(dims, dims, generator=random, dtype=torch.float64))
    signed: Tensor = turn * upper.diagonal().sign()
    return signed


@dataclass(frozen=True, slots=True)
class Layout:
    """A plan for each tier of a head.

    shares: of the keys, from those of the lowest potential up; (1.0,) is a uniform sketch.
    most_reranked: candidates of a query above which it does not pay.
    """

    plans: tuple[SketchPlan, ...]
    shares: tuple[float, ...]
    most_reranked: int

    @property
    def is_uniform(self) -> bool:
        return len(self.plans) == 1

    @property
    def scanned_bytes(self) -> float:
        """Of a key, on average, that a search reads."""
        pairs = zip(self.plans, self.shares, strict=True)
        return sum(plan.code_bytes * share for plan, share in pairs)

    @property
    def cuts(self) -> list[float]:
        """Quantiles of the potential between the tiers."""
        return list(accumulate(self.shares))[:-1]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "tiers": [
                {"code_bytes": plan.code_bytes, "share": share}
                for plan, share in zip(self.plans, self.shares, strict=True)
            ]
        }


def plan_of(named_bytes: int, head_dim: int) -> SketchPlan | None:
    """The plan that has so many bytes at 128 channels, in proportion; None below 4 channels."""
    dim = min(head_dim, MAX_DIMS)
    scale = dim / _NAMED_DIM
    first, last = (round(lines * scale) for lines in _LINES[named_bytes])
    first = max(1, first)
    middle = max(0, round(named_bytes / _LINE_BYTES * scale) - first - last)
    groups = []
    for bits, lines in ((8, first), (4, middle), (2, last)):
        dims = min(lines, dim // dims_per_line(bits)) * dims_per_line(bits)
        if dims:
            groups.append((dims, bits))
        dim -= dims
    return SketchPlan(tuple(groups)) if groups else None


def layouts(head_dim: int, named: str | None = None) -> list[Layout]:
    """All that are tried for a head of so many channels; none below 4 channels.

    Args:
        named: only the one of so many bytes, or those in "tiers" that the head has channels enough
            to tell apart.
    """
    uniform = {
        str(size): Layout((plan,), (1.0,), most)
        for size, most in _UNIFORM.items()
        if (plan := plan_of(size, head_dim)) is not None
    }
    sizes, shares = _TIERS
    plans = tuple(plan for size in sizes if (plan := plan_of(size, head_dim)) is not None)
    told_apart = len(set(plans)) == len(sizes)
    tiers = [Layout(plans, shares, _TIERS_RERANKED)] if told_apart else []
    if named == "tiers":
        return tiers
    if named is not None:
        return [uniform[named]] if named in uniform else []
    return list({layout.plans: layout for layout in (*uniform.values(), *tiers)}.values())


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
        from hybrid_kv.ops import portable

        return portable
    from hybrid_kv.ops.native import scans as native

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
