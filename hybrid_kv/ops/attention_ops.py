"""Attention, and a layer's whole step, by the back end that serves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hybrid_kv.ops import native, reference, torch_cpu
from hybrid_kv.ops.choice import NATIVE, ChosenBackend, chosen
from hybrid_kv.ops.devices import DEVICE_BACKENDS, backends_on
from hybrid_kv.ops.native import workers
from hybrid_kv.ops.native.pages import PageWriter
from hybrid_kv.ops.native.rows import DTYPES
from hybrid_kv.ops.native.step import ColdEntries, LayerPlan, ResidentPages
from hybrid_kv.ops.native.workers import pool_here
from hybrid_kv.types import PagedKV, PartialAttention

_FEW_TOKENS = 64
"""New tokens up to which each may read the pages for itself: twice what a step has by default."""
_FEW_QUERIES = 64
"""Queries of a KV head up to which the engine attends: a decode step's, not a prompt's."""


class AttentionOps(ChosenBackend):
    """Partial attention of every kind, and merging; shapes and meaning as in `reference`."""

    __slots__ = ()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        bias: Tensor | None = None,
        softcap: float | None = None,
    ) -> PartialAttention:
        here = ("native",) if native.serves(k, v) else ()
        few = bias is None and _is_few(q)
        pairs = q.shape[2] * k.shape[2]
        plain = softcap is None and _is_expressed(q, bias)
        name = self._choose("attend", q, here=here, plain=plain, pairs=pairs, few=few)
        if name == "native":
            return native.attend_rows(q, k, v, scale=scale, softcap=softcap, pool=pool_here())
        if name == "torch_cpu":
            return torch_cpu.attend(q, k, v, scale=scale, bias=bias)
        if name == "torch_cuda":
            from hybrid_kv.ops import torch_cuda

            return torch_cuda.attend(q, k, v, scale=scale)
        return reference.attend(q, k, v, scale=scale, bias=bias, softcap=softcap)

    def attend_visible(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        newest: Sequence[int],
        *,
        new: int,
        scale: float,
        softcap: float | None = None,
    ) -> PartialAttention:
        here = NATIVE if native.serves(k, v) else ()
        few, device = q.shape[2] <= _FEW_QUERIES, q.device.type
        name = chosen(
            self.backend, "attend_visible", device_type=device, dtype=q.dtype, here=here, few=few
        )
        self.served["attend_visible"] = name
        if name == "native":
            visible = native.Visible(positions, newest, new)
            pool = None if workers.here.is_alone else workers.default_pool()
            return native.attend_rows(
                q, k, v, scale=scale, softcap=softcap, visible=visible, pool=pool
            )
        return reference.attend_visible(
            *(q, k, v, positions, self._newest(newest, q.device)),
            new=new,
            scale=scale,
            softcap=softcap,
            attend=self.attend,
        )

    def _newest(self, newest: Sequence[int], device: torch.device) -> Tensor:
        """[B] int64, which no thread waits for; without a copy where all are alike."""
        if len(set(newest)) == 1:
            return torch.full([len(newest)], newest[0], device=device)
        return self.uploads(np.asarray(newest, np.int64), device)

    def attend_causal(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
    ) -> PartialAttention:
        square = q.shape[2] == k.shape[2]
        plain = square and softcap is None and window is None
        plain = plain and _is_expressed(q, None)
        pairs = q.shape[2] * k.shape[2]
        name = self._choose("attend_causal", q, plain=plain, pairs=pairs)
        if name == "torch_cpu":
            return torch_cpu.attend_causal(q, k, v, scale=scale)
        if name == "torch_cuda":
            from hybrid_kv.ops import torch_cuda

            return torch_cuda.attend_causal(q, k, v, scale=scale)
        return reference.attend_causal(q, k, v, scale=scale, softcap=softcap, window=window)

    def attend_retrieved(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ids: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        bias: Tensor | None = None,
    ) -> PartialAttention:
        """Queries q [H, M, D] over rows ids [H, M, K] of k, v [H, N, D]; a negative id is none.

        The engine reads keys and values where they lie; the others gather them first.

        Args:
            bias: [H, M, K] float32, added to the logits; None for none.
        """
        here = NATIVE if native.serves(k, v) else ()
        device = q.device.type
        name = chosen(
            self.backend, "attend_retrieved", device_type=device, dtype=q.dtype, here=here
        )
        self.served["attend_retrieved"] = name
        if name == "native":
            pool = None if workers.here.is_alone else workers.default_pool()
            return native.attend_retrieved(
                q, k, v, ids, scale=scale, softcap=softcap, bias=bias, pool=pool
            )
        heads = torch.arange(len(ids), device=ids.device)[:, None, None]
        rows = ids.clamp_min(0)
        added = torch.zeros(ids.shape, device=ids.device) if bias is None else bias
        added = added.masked_fill(ids < 0, -torch.inf)[:, :, None]
        part = self.attend(
            q[:, :, None], k[heads, rows], v[heads, rows], scale=scale, bias=added, softcap=softcap
        )
        return PartialAttention(part.out[:, :, 0], part.lse[:, :, 0])

    def attend_ragged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Sequence[int],
        lengths: Sequence[int],
        *,
        scale: float,
        softcap: float | None = None,
        bias: Tensor | None = None,
    ) -> PartialAttention:
        """See `reference.attend_ragged`."""
        here = self._here(q)
        if native.serves(k, v):
            here = here | {"native"}
        name = self._choose("attend_ragged", q, here=here, few=_is_few(q))
        if name == "native":
            return native.attend_ragged(
                *(q, k, v, starts, lengths),
                scale=scale,
                softcap=softcap,
                bias=bias,
                pool=pool_here(),
            )
        if name == "triton":
            from hybrid_kv.ops.triton import ragged

            extents = self.uploads(np.asarray([*starts, *lengths], dtype=np.int64), q.device)
            return ragged.attend_ragged(
                *(q, k, v, extents, max(lengths)), scale=scale, softcap=softcap, bias=bias
            )
        return reference.attend_ragged(
            *(q, k, v, starts, lengths),
            scale=scale,
            softcap=softcap,
            bias=bias,
            attend=self.attend,
        )

    def attend_pages(
        self,
        q: Tensor,
        pages: PagedKV,
        slots: Tensor,
        query_positions: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        tail_fill: int,
        count: Tensor | None = None,
    ) -> PartialAttention:
        """See `reference.attend_pages`.

        Args:
            tail_fill: filled tokens in the last page of every list, for back ends that go by
                lengths instead of positions; with one new token the other pages are full.
        """
        plain = False
        if self.backend == "flashinfer" and count is None:
            from hybrid_kv.ops import flashinfer

            plain = flashinfer.expresses(q, pages, slots)
        name = self._choose("attend_pages", q, here=self._here(q), plain=plain)
        if name == "flashinfer":
            from hybrid_kv.ops import flashinfer

            return flashinfer.attend_pages(q, pages, slots, tail_fill, scale=scale, softcap=softcap)
        if name == "triton":
            from hybrid_kv.ops.triton import paged

            return paged.attend_pages(
                q, pages, slots, query_positions, scale=scale, softcap=softcap, count=count
            )
        return reference.attend_pages(
            *(q, pages, slots, query_positions),
            scale=scale,
            softcap=softcap,
            count=count,
            attend=self.attend,
        )

    def reads_pages(self, q: Tensor) -> bool:
        """Whether pages are attended where they lie: then a few queries need no dense view."""
        device = q.device.type
        if device == "cpu" and self.backend not in DEVICE_BACKENDS:
            return False
        here = self._here(q)
        name = chosen(self.backend, "attend_pages", device_type=device, dtype=q.dtype, here=here)
        return q.shape[2] <= _FEW_TOKENS and name != "reference"

    def merge(self, parts: Sequence[PartialAttention], dtype: torch.dtype) -> PartialAttention:
        out = parts[0].out
        device = out.device.type
        here = NATIVE if native.serves_merge(parts, dtype) else frozenset()
        if device != "cpu" or self.backend in DEVICE_BACKENDS:
            here = here | backends_on(device)
        name = chosen(self.backend, "merge", device_type=device, dtype=out.dtype, here=here)
        self.served["merge"] = name
        if name == "native":
            pool = None if workers.here.is_alone else workers.default_pool()
            return native.merge(parts, dtype, pool=pool)
        if name == "triton":
            from hybrid_kv.ops.triton import merge

            return merge.merge(parts, dtype)
        return reference.merge(parts, dtype)

    def plan_step(
        self,
        q: Tensor,
        resident: ResidentPages | None,
        cold: ColdEntries | None,
        writer: PageWriter | None,
        whole: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> LayerPlan | None:
        """A decode step of a layer, or the part of its cold entries, as one call; None where the
        other ops make it.

        Args:
            q: [Hkv, M, D] of one token; of several where there are no pages.
            writer: of the same pages, where a step stores its token; None where none does.
            whole: k, v [Hkv, N, D] of cold entries that every query attends.
        """
        kept = [] if resident is None else [(resident.k, resident.v)]
        kept += [] if cold is None else [(extent.k, extent.v) for extent in cold.extents]
        here = self._engine_alone() if all(native.serves(*kv) for kv in (*kept, *whole)) else ()
        if self._choose("plan_step", q, here=here, few=q.dtype in DTYPES) != "native":
            return None
        return LayerPlan(q.shape[1], resident, cold, whole=whole, writer=writer)


def _is_expressed(q: Tensor, bias: Tensor | None) -> bool:
    """Whether torch has fused kernels for such queries, on a GPU."""
    if q.device.type != "cuda":
        return True
    from hybrid_kv.ops import torch_cuda

    return torch_cuda.expresses(q, bias)


def _is_few(q: Tensor) -> bool:
    return q.shape[-2] <= _FEW_QUERIES
