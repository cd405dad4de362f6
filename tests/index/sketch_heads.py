"""Heads that sketches are tested on: queries see few of the directions that keys spread in."""

from __future__ import annotations

import torch
from torch import Tensor


def seen_head(
    num_keys: int, *, dim: int = 72, group: int = 3, positions: int = 160, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [N, D] around an offset, samples [G, M, D], and as many later queries [G, M, D]."""
    random = torch.Generator().manual_seed(seed)
    weights = torch.arange(1, dim + 1, dtype=torch.float32) ** -0.7
    turn = torch.linalg.qr(torch.randn(dim, dim, generator=random)).Q
    keys = torch.randn(num_keys, dim, generator=random) + 3 * torch.randn(dim, generator=random)
    queries = torch.randn(2, group, positions, dim, generator=random) * (2 * weights) @ turn
    return keys, queries[0], queries[1]


def seen_heads(num_heads: int, num_keys: int, **sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same for some KV heads: [H, N, D], [H, G, M, D] twice."""
    heads = [seen_head(num_keys, seed=seed, **sizes) for seed in range(num_heads)]
    keys, samples, later = (torch.stack(parts) for parts in zip(*heads, strict=True))
    return keys, samples, later
