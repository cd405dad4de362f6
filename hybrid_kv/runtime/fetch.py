"""Found cold entries come to the device: the union of what a KV head's queries found, each once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_kv.ops import Ops
from hybrid_kv.store import ColdExtent
from hybrid_kv.transfer import Executor
from hybrid_kv.types import PagedKV


class Fetched(NamedTuple):
    """Entries on a device.

    k, v: [Hkv, C * S, D], C pages of S entries for each head.
    ids: [Hkv, M, K] rows of them, -1 for none.
    copied_bytes: K and V that travelled.
    """

    k: Tensor
    v: Tensor
    ids: Tensor
    copied_bytes: int


def fetch(
    ops: Ops, executor: Executor, extent: ColdExtent, ids: Tensor, device: torch.device
) -> Fetched:
    """Copies entries of an extent to a device, by whole pages where the index chooses pages.

    Args:
        ids: [Hkv, M, K] rows of the extent, -1 for none, on the host.
    """
    size = 1 if extent.index is None else extent.index.page_tokens
    source = extent.pages(size)
    if source.k.shape[1] * size < extent.length:  # no whole page is left for the last entries
        size, source = 1, extent.pages(1)
    wanted, columns = _union(ids.div(size, rounding_mode="floor"), source.k.shape[1])
    heads, count = wanted.shape
    remapped = torch.where(ids < 0, -1, columns * size + ids % size)
    k, v = (
        torch.empty(heads, count, size, tensor.shape[-1], dtype=tensor.dtype, device=device)
        for tensor in (source.k, source.v)
    )
    free = torch.arange(count, device=device).expand(heads, -1)
    ops.copy_pages(source, PagedKV(k, v, free), executor.to_device(wanted, device), free)
    per_page = size * k.shape[-1] * (k.itemsize + v.itemsize)
    return Fetched(
        k.flatten(1, 2),
        v.flatten(1, 2),
        executor.to_device(remapped, device),
        int((wanted >= 0).sum()) * per_page,
    )


def _union(pages: Tensor, num_pages: int) -> tuple[Tensor, Tensor]:
    """Each head's pages once.

    Args:
        pages: [Hkv, M, K] in 0..num_pages - 1, negative for none.

    Returns:
        The pages [Hkv, C], -1 behind those of a head with fewer than C, and where in its head's
        list each of `pages` stands, [Hkv, M, K].
    """
    heads = torch.arange(len(pages))[:, None, None]
    is_one = pages >= 0
    union, places = torch.unique((heads * num_pages + pages)[is_one], return_inverse=True)
    head = union // num_pages
    counts = torch.bincount(head, minlength=len(pages))
    column = torch.arange(len(union)) - (counts.cumsum(0) - counts)[head]
    lists = torch.full((len(pages), int(counts.max())), -1)
    lists[head, column] = union % num_pages
    columns = torch.zeros_like(pages)
    columns[is_one] = column[places]
    return lists, columns
