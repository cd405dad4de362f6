"""k-means over many small sets of points at once, and tiles of a search for nearest keys."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

_BLOCK_BYTES = 64 * 2**20


def kmeans(
    points: Tensor, num_centroids: int, iterations: int, *, spherical: bool = False
) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm, from points that are evenly spread over the set; no random numbers.

    It does not wait for a device, and takes all of its iterations there.

    Args:
        points: [B, N, D] float32, N >= 1; num_centroids: at most N are made.
        spherical: points have length 1, and so have centroids: the largest cosine is nearest.

    Returns:
        centroids [B, C, D] and the nearest one [B, N] int64 of every point. A centroid that lost
        its points stays where it was.
    """
    sets, count, _ = points.shape
    num_centroids, device = min(num_centroids, count), points.device
    first = torch.linspace(0, count - 1, num_centroids, device=device).round().long()
    centroids = points[:, first].clone()
    nearest = nearest_of(points, centroids)
    for _ in range(iterations):
        sizes = torch.zeros(sets, num_centroids, device=device).scatter_add_(
            1, nearest, torch.ones(nearest.shape, device=device)
        )
        means = means_of(points, nearest, sizes)
        means = normalize(means, dim=-1) if spherical else means
        centroids = torch.where(sizes[..., None] > 0, means, centroids)
        moved = nearest_of(points, centroids)
        if device.type == "cpu" and torch.equal(moved, nearest):
            break
        nearest = moved
    return centroids, nearest


def means_of(rows: Tensor, groups: Tensor, sizes: Tensor) -> Tensor:
    """[B, C, D] float32 means of rows [B, N, D] by group [B, N], which have sizes [B, C]."""
    if rows.device.type == "cpu":
        sums = torch.zeros(*sizes.shape, rows.shape[-1])
        for into, some, of in zip(sums, rows, groups, strict=True):
            into.index_add_(0, of, some.float())
    else:  # a device adds rows in no fixed order, and products in one
        sums = members_of(groups, sizes.shape[1]) @ rows.float()
    return sums / sizes.clamp_min(1)[..., None]


def members_of(groups: Tensor, count: int) -> Tensor:
    """[B, count, N] float32: 1 where a point is of a group, of groups [B, N]; else 0."""
    every = torch.arange(count, device=groups.device)[:, None]
    return (groups[:, None] == every).float()


def nearest_of(points: Tensor, centroids: Tensor) -> Tensor:
    """[B, N] int64: which of centroids [B, C, D] is nearest to each of points [B, N, D]."""
    sets, count, _ = points.shape
    half = centroids.square().sum(-1)[:, None] / 2
    block = max(1, _BLOCK_BYTES // (4 * sets * centroids.shape[1]))
    parts = [
        (torch.matmul(points[:, at : at + block].float(), centroids.transpose(1, 2)) - half).argmax(
            -1
        )
        for at in range(0, count, block)
    ]
    return torch.cat(parts, 1)


BLOCK_KEYS = 16
"""Keys that one maximum stands for: the candidates of a query are `count` blocks of them."""

SCRATCH_BYTES = 256 * 2**20
"""What a search takes beside its queries, its keys and its result."""


def portion(heads: int, num_keys: int, count: int) -> int:
    """Queries of each KV head that are searched at a time, at least one."""
    return max(1, SCRATCH_BYTES // (heads * query_bytes(num_keys, count)))


def query_bytes(num_keys: int, count: int) -> int:
    """Scratch of one query: a float32 for each block, the blocks it lists, and for each candidate a
    score; torch's top-k takes about as much again of what it is given.
    """
    blocks = -(-num_keys // BLOCK_KEYS)
    listed = min(count, blocks)
    return 8 * blocks + 24 * listed + 16 * listed * BLOCK_KEYS + 32 * count


def result_bytes(heads: int, num_queries: int, count: int) -> int:
    """Of the ids [H, Q, K] int32."""
    return 4 * heads * num_queries * count
