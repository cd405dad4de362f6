"""The metric in which queries see the keys of one head, and the codes that follow from it.

A key k becomes y = U^T R (k - mean) and a query q becomes x = U^T R^-1 q, so that x . y = q . k but
for a term that all keys share. R is the root of the queries' second moment, so queries are alike in
all directions of x, and U sorts the directions by how far the keys spread in them. Few directions
matter, and few bits of most.

Layouts of codes are uniform, or tiers whose keys get more bytes for mattering more. Their sizes are
named for a head of 128 channels; other heads get plans in proportion.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from hybrid_kv.ops.sketch_codes import MAX_DIMS, SketchMap, SketchPlan, dims_per_line

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
