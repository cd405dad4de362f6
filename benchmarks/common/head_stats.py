"""What makes the keys and queries of one head easy or hard to search.

None of these numbers predicts the cost of an index exactly; together they say what kind of head it
is, and whether made-up data resembles a trained model's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_SAMPLE = 5000
"""Vectors whose distances are averaged."""
_SCORES = 2**24
"""Scores held at once."""
_HUBS = 10


@dataclass(frozen=True, slots=True)
class HeadStats:
    """Statistics of one head.

    query_distance, key_distance: mean Mahalanobis distance to the keys' mean and covariance, of
        queries and of keys that took no part in them. Far more for queries means that an index
        built from keys alone looks in the wrong places.
    top100_mass, top1000_mass: softmax mass of the best keys at scale 1 / sqrt(D).
    hub_share: share of queries whose best key is one of the ten most frequent best keys.
    effective_dim: exponential of the entropy of the keys' spectrum as queries weigh it.
    """

    query_distance: float
    key_distance: float
    top100_mass: float
    top1000_mass: float
    hub_share: float
    effective_dim: float

    @property
    def distance_ratio(self) -> float:
        return self.query_distance / self.key_distance


@torch.no_grad()
def head_stats(keys: Tensor, prompt_queries: Tensor, test_queries: Tensor) -> HeadStats:
    """Statistics of keys [N, D] under queries [M, D] of the prompt and [M', D] after it.

    Distances and effective dimension use the former, masses and hubs the latter.
    """
    query_distance, key_distance = _distances(keys, prompt_queries)
    top100, top1000, best = _masses(keys, test_queries)
    return HeadStats(
        query_distance=query_distance,
        key_distance=key_distance,
        top100_mass=top100,
        top1000_mass=top1000,
        hub_share=int(best.bincount().sort(descending=True).values[:_HUBS].sum()) / len(best),
        effective_dim=effective_dim(keys, prompt_queries),
    )


@torch.no_grad()
def effective_dim(keys: Tensor, queries: Tensor) -> float:
    """In how many directions keys [N, D] differ, as queries [M, D] see them.

    With S = E[q q'], the keys (k - mean) S^(1/2) lie as far apart as their scores differ on
    average. The result is exp(-sum p log p) over the normalised eigenvalues p of their covariance.
    """
    seen = queries.float().T @ queries.float() / len(queries)
    covariance = torch.cov(keys.float().T, correction=0)
    # S^(1/2) C S^(1/2) and L' C L with L L' = S have the same eigenvalues.
    values, vectors = torch.linalg.eigh(seen.double())
    root = vectors * values.clamp_min(0).sqrt()
    share = torch.linalg.eigvalsh(root.T @ covariance.double() @ root).clamp_min(0)
    share = share / share.sum()
    return float(torch.special.entr(share).sum().exp())


def _distances(keys: Tensor, queries: Tensor) -> tuple[float, float]:
    """Mean Mahalanobis distances of queries and of left-out keys."""
    generator = torch.Generator().manual_seed(0)
    sample = min(_SAMPLE, len(keys) // 4)
    order = torch.randperm(len(keys), generator=generator)
    out = keys[order[:sample].sort().values].double()
    rest = keys[order[sample:].sort().values].float()
    mean = rest.mean(0, keepdim=True)
    spread = torch.cov(rest.T).double()
    spread.diagonal().add_(1e-6 * spread.diagonal().mean())  # channels of real heads may be alike
    factor = torch.linalg.cholesky(spread)
    asked = queries[torch.randperm(len(queries), generator=generator)[:sample]].double()

    def distance(vectors: Tensor) -> float:
        white = torch.linalg.solve_triangular(factor, (vectors - mean).T, upper=False)
        return float(white.norm(dim=0).mean())

    return distance(asked), distance(out)


def _masses(keys: Tensor, queries: Tensor) -> tuple[float, float, Tensor]:
    """Mean mass of the top 100 and of the top 1000, and the best key of each query."""
    scale = keys.shape[1] ** -0.5
    masses, best = [], []
    for part in queries.split(max(1, _SCORES // len(keys))):
        scores = (part @ keys.T).mul_(scale)
        top = scores.topk(min(1000, len(keys)))
        mass = (top.values - scores.logsumexp(1, keepdim=True)).exp_()
        masses.append(torch.stack([mass[:, :100].sum(1), mass.sum(1)], 1))
        best.append(top.indices[:, 0])
    mean = torch.cat(masses).mean(0)
    return float(mean[0]), float(mean[1]), torch.cat(best)
