"""Copies of pages between pools; the source may be pinned host memory, read over the bus."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid_kv.ops.devices import on
from hybrid_kv.ops.triton._common import padded
from hybrid_kv.types import PagedKV

_BLOCK = 1024


def copy_pages(
    source: PagedKV, target: PagedKV, source_slots: Tensor, target_slots: Tensor
) -> None:
    """See `reference.copy_pages`; the slots lie on the device of the target.

    One launch for all pages of all heads: a copy each would cost microseconds of launch for 4 KiB.
    """
    if source_slots.numel() == 0:
        return
    heads, num_pages = source_slots.shape
    elements = target.k[0, 0].numel()
    with on(target.k):
        _copy_kernel[(num_pages, heads)](
            source.k,
            source.v,
            target.k,
            target.v,
            source_slots.contiguous(),
            target_slots.contiguous(),
            source.k.stride(0),
            target.k.stride(0),
            ELEMENTS=elements,
            BLOCK=min(_BLOCK, padded(elements)),
        )


@triton.jit
def _copy_kernel(
    source_k,
    source_v,
    target_k,
    target_v,
    source_slots,
    target_slots,
    source_stride,
    target_stride,
    ELEMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    pair = head * tl.num_programs(0) + tl.program_id(0)
    source_slot, target_slot = tl.load(source_slots + pair), tl.load(target_slots + pair)
    # A limit rather than a mask of one value: the interpreter widens that to integers.
    limit = tl.where((source_slot >= 0) & (target_slot >= 0), ELEMENTS, 0)
    from_ = head * source_stride + source_slot * ELEMENTS
    to = head * target_stride + target_slot * ELEMENTS
    for start in range(0, ELEMENTS, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < limit
        keys = tl.load(source_k + from_ + offsets, mask=inside)
        values = tl.load(source_v + from_ + offsets, mask=inside)
        tl.store(target_k + to + offsets, keys, mask=inside)
        tl.store(target_v + to + offsets, values, mask=inside)
