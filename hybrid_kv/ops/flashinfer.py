"""FlashInfer's paged decode: KV heads stand in for the requests of a batch.

FlashInfer gives all KV heads of a request the same pages; ours have pages of their own. So each KV
head is a request with one KV head, over the pool seen as [Hkv * slots, 1, S, D], a view; its page
number is `head * slots + slot`. FlashInfer's log-sum-exp has base 2: it is converted here and
nowhere else. Written for FlashInfer 0.6 and 0.7.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid_kv.errors import BackendUnavailable
from hybrid_kv.ops.devices import on
from hybrid_kv.types import PagedKV, PartialAttention

_HEAD_DIMS = (64, 128, 256)
_GROUPS = (1, 2, 3, 4, 6, 8, 16)
_WORKSPACE_BYTES = 128 * 2**20
_LN2 = math.log(2)


def expresses(q: Tensor, pages: PagedKV, slots: Tensor) -> bool:
    """Whether FlashInfer has a kernel for q [Hkv, G * T, D] over lists slots [Hkv, T, C].

    One new token only: visibility goes by the length of a list.
    """
    _, new, num_pages = slots.shape
    _, group, dim = q.shape
    same = q.dtype == pages.k.dtype
    return same and new == 1 and num_pages > 0 and dim in _HEAD_DIMS and group in _GROUPS


def attend_pages(
    q: Tensor,
    pages: PagedKV,
    slots: Tensor,
    tail_fill: int,
    *,
    scale: float,
    softcap: float | None = None,
) -> PartialAttention:
    """See `Ops.attend_pages`, for what `expresses` allows.

    Returns:
        out [Hkv, G, D] in the dtype of q, lse [Hkv, G] float32, natural.

    Raises:
        BackendUnavailable: FlashInfer is there and does not work.
    """
    heads, group, dim = q.shape
    num_slots, page_size = pages.k.shape[1:3]
    plan = Schedule(slots.shape[2], tail_fill, group, dim, page_size, q.dtype, scale, softcap)
    decoder = _decoder(q.device, heads)
    with on(q):
        first = torch.arange(heads, device=slots.device)[:, None] * num_slots
        ids = slots[:, 0] + first
        paged = tuple(t.view(heads * num_slots, 1, page_size, dim) for t in (pages.k, pages.v))
        with _named_failures():
            decoder.prepare(plan, ids)
            out, lse = decoder.run(q, paged)
    return PartialAttention(out, lse * _LN2)


@contextmanager
def _named_failures() -> Iterator[None]:
    """FlashInfer compiles at its first use, for which much has to be in place."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        what = str(error).strip().split("\n")[0] or "no message"
        raise BackendUnavailable(
            f"backend 'flashinfer' failed in its paged decode: {type(error).__name__}: {what}; "
            "mend its installation (versions of torch, CUDA and FlashInfer must match) or use "
            "backend='auto'"
        ) from error


class Schedule(NamedTuple):
    """All that FlashInfer's schedule depends on; the numbers of the pages are not among it."""

    num_pages: int
    tail_fill: int
    group: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    scale: float
    softcap: float | None


class PagedDecoder:
    """FlashInfer's wrapper for some number of KV heads, planned again only when a plan differs.

    The layers of a model have equal lengths at a step: one plan serves them all. Page numbers lie
    in a buffer of ours, which each call overwrites; FlashInfer reads such a buffer in its mode for
    CUDA graphs.
    """

    def __init__(self, device: torch.device, num_heads: int) -> None:
        self._device, self._num_heads = device, num_heads
        # FlashInfer takes it to be zero when it is first used.
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._ids = torch.empty(0, dtype=torch.int32, device=device)
        self._wrapper: Any = None
        self._planned: Schedule | None = None

    def prepare(self, plan: Schedule, ids: Tensor) -> None:
        """Takes page numbers ids [H, C], and plans where the plan is another."""
        count = ids.numel()
        if count > self._ids.numel():
            self._make_wrapper(count)
        self._ids[:count].copy_(ids.flatten())
        if plan == self._planned:
            return
        self._planned = None
        ends = torch.arange(self._num_heads + 1, dtype=torch.int32) * plan.num_pages
        # Lengths on the host: tensors on the device would be copied back, which waits for it.
        self._wrapper.plan(
            ends,
            self._ids[:count],
            torch.full((self._num_heads,), plan.tail_fill, dtype=torch.int32),
            plan.group,
            1,
            plan.head_dim,
            plan.page_size,
            q_data_type=plan.dtype,
            kv_data_type=plan.dtype,
            logits_soft_cap=plan.softcap,
            sm_scale=plan.scale,
        )
        self._planned = plan

    def run(self, q: Tensor, paged: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Out [H, G, D] and lse [H, G] of base 2."""
        out, lse = self._wrapper.run(q.contiguous(), paged, return_lse=True)
        return out, lse

    def _make_wrapper(self, count: int) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        # Doubling: lists that grow by a page at a time do not each need a wrapper of their own.
        size, heads, device = max(count, 2 * self._ids.numel()), self._num_heads, self._device
        ids = torch.zeros(size, dtype=torch.int32, device=device)
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "HND",
            use_cuda_graph=True,
            paged_kv_indptr_buffer=torch.zeros(heads + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buffer=ids,
            paged_kv_last_page_len_buffer=torch.zeros(heads, dtype=torch.int32, device=device),
        )
        self._ids, self._planned = ids, None


@cache
def _decoder(device: torch.device, num_heads: int) -> PagedDecoder:
    return PagedDecoder(device, num_heads)
