"""Pools of pages, made up, for tests of the ops that read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_kv.types import HIDDEN, PagedKV


@dataclass(frozen=True)
class Shape:
    """Sizes of a pool and of the queries that read it; odd on purpose."""

    heads: int = 2
    slots: int = 7
    page_size: int = 16
    dim: int = 72
    group: int = 3
    new: int = 1


SHAPES = [
    Shape(dim=128, group=4),
    Shape(page_size=37, group=3, new=2),
    Shape(heads=1, group=1, slots=11, page_size=5),
    Shape(dim=128, group=5, slots=5, page_size=1),
]


def pool(
    shape: Shape, dtype: torch.dtype, device: str = "cpu", tail_fill: int | None = None
) -> PagedKV:
    """Slot n holds the n-th page of a text, so that the last slot is the newest page.

    Args:
        tail_fill: filled tokens of the last slot; half of them if None.
    """
    size = (shape.heads, shape.slots, shape.page_size, shape.dim)
    k, v = (torch.randn(size).to(dtype).to(device) for _ in range(2))
    positions = torch.arange(shape.slots * shape.page_size).view(shape.slots, -1)
    fill = (shape.page_size + 1) // 2 if tail_fill is None else tail_fill
    positions[-1, fill:] = HIDDEN
    digests = [torch.zeros(size[0], size[1], size[3], dtype=dtype, device=device) for _ in "12"]
    return PagedKV(k, v, positions.to(device), *digests)


def queries(shape: Shape, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return torch.randn(shape.heads, shape.group * shape.new, shape.dim).to(dtype).to(device)


def newest_positions(shape: Shape, pages: PagedKV) -> Tensor:
    """[T]: the last T filled positions."""
    last = int((pages.positions != HIDDEN).sum())
    return torch.arange(last - shape.new, last, device=pages.k.device)


def lists(shape: Shape, count: int, device: str = "cpu") -> Tensor:
    """[Hkv, T, C] int64: slots that differ by head and token, the last slot at the end of each."""
    chosen = torch.rand(shape.heads, shape.new, shape.slots - 1).topk(count - 1, -1).indices
    return torch.nn.functional.pad(chosen, (0, 1), value=shape.slots - 1).to(device)


def copy_of(pages: PagedKV, device: str | None = None) -> PagedKV:
    """An independent pool with the same content."""
    return PagedKV(*(None if t is None else t.clone().to(device or t.device) for t in pages))
