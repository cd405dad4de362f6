"""Pools of pages for the measurements, of random content."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.gpu_check.sizes import Sizes
from hybrid_kv.types import PagedKV


def pool(sizes: Sizes, num_pages: int, page_size: int, device: torch.device) -> PagedKV:
    """Full pages without digests; page n holds the n-th tokens of a text."""
    size = (sizes.kv_heads, num_pages, page_size, sizes.dim)
    k, v = (normal(size, sizes.dtype, device) for _ in "kv")
    positions = torch.arange(num_pages * page_size, device=device).view(num_pages, page_size)
    return PagedKV(k, v, positions)


def host_pool(sizes: Sizes, num_pages: int, page_size: int, pinned: bool) -> PagedKV:
    """The same on the host, of ones: random numbers would take longer than what is measured."""
    size = (sizes.kv_heads, num_pages, page_size, sizes.dim)
    k, v = (torch.empty(size, dtype=sizes.dtype, pin_memory=pinned).fill_(1) for _ in "kv")
    return PagedKV(k, v, torch.arange(num_pages * page_size).view(num_pages, page_size))


def normal(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(size, dtype=dtype, device=device)


def in_turn(sizes: Sizes, layer_bytes: int) -> int:
    """Layers that are visited in turn, so that none is still in a cache when its turn comes."""
    return min(64, max(2, math.ceil(sizes.working_set_bytes / layer_bytes)))
