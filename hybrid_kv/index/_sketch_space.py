"""The metric in which queries see the keys of one head, and the codes that follow from it.

A key k becomes y = U^T R (k - mean) and a query q becomes x = U^T R^-1 q, so that x . y = q . k but
for a term that all keys share. R is the root of the queries' second moment, so queries are alike in
all directions of x, and U sorts the directions by how far the keys spread in them. Few directions
matter, and few bits of most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from hybrid_kv.ops.sketch_codes import SketchMap, SketchPlan

_SAMPLE_KEYS = 16384
_BLOCK_KEYS = 4096
_RIDGE = 1e-5
"""Of the mean second moment of the queries' channels, given to directions that no sample has."""
_STEPS = {4: 0.335, 2: 0.996}
"""Of a Gaussian's spread, between two codes: the best for all keys (Max 1960)."""
_WIDER = 1.5
"""Steps are wider than that, because the keys that matter lie outside."""
_SEED = 0x5EED


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
    """How keys and queries become codes of a plan.

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
