"""The ops of a requested back end: every call is computed by what `choose_backend` says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_kv.errors import BackendUnavailable, unknown_name
from hybrid_kv.ops import (
    flashinfer,
    native,
    reference,
    sketch_select,
    tail,
    torch_cpu,
    torch_cuda,
)
from hybrid_kv.ops.choice import BACKENDS, FUSED, choose_backend
from hybrid_kv.ops.devices import DEVICE_BACKENDS, backends_on, device_state
from hybrid_kv.ops.native import workers
from hybrid_kv.ops.native.append import PageWriter
from hybrid_kv.ops.native.rows import DTYPES
from hybrid_kv.ops.native.step import ColdEntries, LayerPlan, ResidentPages
from hybrid_kv.ops.native.workers import pool_here
from hybrid_kv.ops.sketch_select import DeviceCodes
from hybrid_kv.ops.tail import Tail
from hybrid_kv.ops.upload import Uploads
from hybrid_kv.types import Candidates, PagedKV, PartialAttention

_FEW_TOKENS = 64
"""New tokens up to which each may read the pages for itself: twice what a step has by default."""
_FEW_QUERIES = 64
"""Queries of a KV head up to which the engine attends: a decode step's, not a prompt's."""
_NATIVE = frozenset({"native"})


@dataclass(frozen=True, slots=True)
class Ops:
    """The ops of one requested back end; shapes and meaning as in `reference`.

    served: what computed the latest call of each op. uploads: index arrays on their devices.
    """

    backend: str = "auto"
    served: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    uploads: Uploads = field(default_factory=Uploads, compare=False, repr=False)

    # Attention ----------------------------------------------------------------------------------

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
        plain = softcap is None and (q.device.type != "cuda" or torch_cuda.expresses(q, bias))
        name = self._choose("attend", q, here=here, plain=plain, pairs=pairs, few=few)
        if name == "native":
            return native.attend_rows(q, k, v, scale=scale, softcap=softcap, pool=pool_here())
        if name == "torch_cpu":
            return torch_cpu.attend(q, k, v, scale=scale, bias=bias)
        if name == "torch_cuda":
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
        here = _NATIVE if native.serves(k, v) else ()
        few, device = q.shape[2] <= _FEW_QUERIES, q.device.type
        name = _chosen(
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
            *(q, k, v, positions, newest),
            new=new,
            scale=scale,
            softcap=softcap,
            attend=self.attend,
        )

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
        plain = plain and (q.device.type != "cuda" or torch_cuda.expresses(q, None))
        pairs = q.shape[2] * k.shape[2]
        name = self._choose("attend_causal", q, plain=plain, pairs=pairs)
        if name == "torch_cpu":
            return torch_cpu.attend_causal(q, k, v, scale=scale)
        if name == "torch_cuda":
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
        here = _NATIVE if native.serves(k, v) else ()
        device = q.device.type
        name = _chosen(
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
    ) -> PartialAttention:
        """See `reference.attend_pages`.

        Args:
            tail_fill: filled tokens in the last page of every list, for back ends that go by
                lengths instead of positions; with one new token the other pages are full.
        """
        plain = flashinfer.expresses(q, pages, slots)
        name = self._choose("attend_pages", q, here=self._here(q), plain=plain)
        if name == "flashinfer":
            return flashinfer.attend_pages(q, pages, slots, tail_fill, scale=scale, softcap=softcap)
        if name == "triton":
            from hybrid_kv.ops.triton import paged

            return paged.attend_pages(
                q, pages, slots, query_positions, scale=scale, softcap=softcap
            )
        return reference.attend_pages(
            q, pages, slots, query_positions, scale=scale, softcap=softcap, attend=self.attend
        )

    def reads_pages(self, q: Tensor) -> bool:
        """Whether pages are attended where they lie: then a few queries need no dense view."""
        device = q.device.type
        if device == "cpu" and self.backend not in DEVICE_BACKENDS:
            return False
        here = backends_on(device, self.backend)
        name = _chosen(self.backend, "attend_pages", device_type=device, dtype=q.dtype, here=here)
        return q.shape[2] <= _FEW_TOKENS and name != "reference"

    def merge(self, parts: Sequence[PartialAttention], dtype: torch.dtype) -> PartialAttention:
        out = parts[0].out
        device = out.device.type
        here = _NATIVE if native.serves_merge(parts, dtype) else frozenset()
        if device != "cpu" or self.backend in DEVICE_BACKENDS:
            here = here | backends_on(device)
        name = _chosen(self.backend, "merge", device_type=device, dtype=out.dtype, here=here)
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
        resident: ResidentPages,
        cold: ColdEntries | None,
        writer: PageWriter | None,
    ) -> LayerPlan | None:
        """A whole decode step of a layer as one call; None where the other ops make it.

        Args:
            q: [Hkv, M, D] of one token.
            writer: of the same pages, where a step stores its token; None where none does.
        """
        kept = [(resident.k, resident.v)] + ([] if cold is None else [(cold.k, cold.v)])
        here = self._engine_alone() if all(native.serves(*kv) for kv in kept) else ()
        if self._choose("plan_step", q, here=here, few=q.dtype in DTYPES) != "native":
            return None
        return LayerPlan(q.shape[1], resident, cold, writer=writer)

    # Pages --------------------------------------------------------------------------------------

    def page_scores(self, q: Tensor, key_min: Tensor, key_max: Tensor) -> Tensor:
        """[H, M, P] float32 upper bounds of the scores in each page, for queries q [H, M, D].

        key_min, key_max: [H, P, D], the digests of the pages; see `reference.page_scores`.
        """
        here = self._here(q)
        if native.serves(key_min, key_max):
            here = here | {"native"}
        name = self._choose("page_scores", q, here=here)
        if name == "native":
            return native.page_scores(q, key_min, key_max)
        if name == "triton":
            from hybrid_kv.ops.triton import scores

            return scores.group_page_scores(q, key_min, key_max, new=q.shape[1])
        return reference.page_scores(q, key_min, key_max)

    def choose_pages(
        self,
        q: Tensor,
        key_min: Tensor,
        key_max: Tensor,
        *,
        new: int,
        oldest: int,
        newest: int,
        count: int,
    ) -> Tensor:
        if self._chosen_triton("choose_pages", q):
            from hybrid_kv.ops.triton import scores

            shared = scores.group_page_scores(q, key_min, key_max, new=new)
            return reference.best_pages(shared, oldest, newest, count)
        return reference.choose_pages(
            q,
            key_min,
            key_max,
            new=new,
            oldest=oldest,
            newest=newest,
            count=count,
            page_scores=self.page_scores,
        )

    def page_writer(self, pages: PagedKV) -> PageWriter | None:
        """What stores new tokens one by one where the engine does; None where `append` does."""
        here = self._engine_alone() if native.serves(pages.k, pages.v) else ()
        if self._choose("page_writer", pages.k, here=here) != "native":
            return None
        return PageWriter(pages)

    def append(
        self,
        pages: PagedKV,
        k: Tensor,
        v: Tensor,
        places: npt.NDArray[np.int64] | range,
        first_position: int,
    ) -> None:
        """Stores k, v [Hkv, n, D] at consecutive positions and keeps the digests of their pages.

        Args:
            places: [n], n > 0; see `reference.append`.
        """
        start, count = int(places[0]), len(places)
        if pages.k.is_cpu and self.backend not in DEVICE_BACKENDS:
            self.served["append"] = "reference"
        elif count == 1 and self._chosen_triton("append", pages.k):
            from hybrid_kv.ops.triton import digests

            digests.append_token(pages, k[:, 0], v[:, 0], start, first_position)
            return
        if count == 1:  # nearly every step: as `reference.append`, in fewer words
            shape = pages.k.shape
            slot, offset = divmod(start, shape[2])
            pages.k[:, slot, offset], pages.v[:, slot, offset] = k[:, 0], v[:, 0]
            pages.positions[slot, offset] = first_position
        else:
            self._append_many(pages, k, v, places, first_position)
        if pages.key_min is not None:
            self.update_digests(pages, np.unique(np.asarray(places) // pages.k.shape[2]))

    def _append_many(
        self,
        pages: PagedKV,
        k: Tensor,
        v: Tensor,
        places: npt.NDArray[np.int64] | range,
        first_position: int,
    ) -> None:
        start, count, device = int(places[0]), len(places), pages.k.device
        rows: slice | Tensor = slice(start, start + count)  # a plain copy where places lie together
        if not isinstance(places, range) and (np.diff(places) != 1).any():
            rows = self.uploads(places, device)
        positions = torch.arange(first_position, first_position + count, device=device)
        reference.append(pages, k, v, rows, positions)

    def update_digests(self, pages: PagedKV, slots: npt.NDArray[np.int64]) -> None:
        if pages.key_min is None or len(slots) == 0:
            return
        where = self.uploads(slots, pages.k.device)
        if self._chosen_triton("update_digests", pages.k):
            from hybrid_kv.ops.triton import digests

            digests.update_digests(pages, where)
        else:
            reference.update_digests(pages, where)

    def copy_pages(
        self, source: PagedKV, target: PagedKV, source_slots: Tensor, target_slots: Tensor
    ) -> None:
        """See `reference.copy_pages`; a kernel reads the host only where its memory is pinned."""
        if _reaches(target.k, source.k) and self._chosen_triton("copy_pages", target.k):
            from hybrid_kv.ops.triton import pages

            pages.copy_pages(source, target, source_slots, target_slots)
        else:
            self.served["copy_pages"] = "reference"
            reference.copy_pages(source, target, source_slots, target_slots)

    # Selection by sketch ------------------------------------------------------------------------

    def encode_sketch(self, to: DeviceCodes, keys: Tensor, first: int) -> None:
        """See `sketch_select.encode`."""
        if self._chosen_triton("encode_sketch", keys):
            from hybrid_kv.ops.triton import sketch_encode

            sketch_encode.encode(to, keys, first)
        else:
            sketch_select.encode(to, keys, first)

    def find_by_sketch(
        self,
        by: DeviceCodes,
        q: Tensor,
        k: Tensor,
        *,
        new: int,
        width: int,
        times: float = 1.0,
    ) -> Candidates:
        """See `sketch_select.find`; kernels read keys on the host where they are page-locked."""
        if _reaches(q, k) and self._chosen_triton("find_by_sketch", q):
            from hybrid_kv.ops.triton import sketch_find

            return sketch_find.find(by, q, k, new=new, width=width, times=times)
        self.served["find_by_sketch"] = "reference"
        return sketch_select.find(by, q, k, new=new, width=width, times=times)

    def score_candidates(self, q: Tensor, k: Tensor, ids: Tensor) -> Tensor:
        """See `sketch_select.exact_scores`."""
        if _reaches(q, k) and self._chosen_triton("find_by_sketch", q):
            from hybrid_kv.ops.triton import sketch_rank

            return sketch_rank.exact_scores(q, k, ids)
        self.served["find_by_sketch"] = "reference"
        return sketch_select.exact_scores(q, k, ids)

    def attend_candidates(
        self,
        found: Candidates,
        v: Tensor,
        limit: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> PartialAttention:
        """See `sketch_select.attend`."""
        if _reaches(found.scores, v) and self._chosen_triton("attend_candidates", found.scores):
            from hybrid_kv.ops.triton import sketch_attend

            return sketch_attend.attend(found, v, limit, scale=scale, softcap=softcap)
        self.served["attend_candidates"] = "reference"
        return sketch_select.attend(found, v, limit, scale=scale, softcap=softcap)

    def attend_unread(
        self,
        known: Tail,
        q: Tensor,
        scores: Tensor,
        limit: Tensor,
        own: slice,
        seen: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> PartialAttention:
        """See `tail.attend_unread`."""
        if self._chosen_triton("attend_unread", q):
            from hybrid_kv.ops.triton import unread

            return unread.attend_unread(
                *(known, q, scores, limit, own, seen), scale=scale, softcap=softcap
            )
        return tail.attend_unread(
            *(known, q, scores, limit, own, seen), scale=scale, softcap=softcap
        )

    def best_limit(self, scores: Tensor, top_k: int) -> Tensor:
        """See `sketch_select.best_limit`."""
        if self._choose("attend_candidates", scores, here=self._here(scores)) == "triton":
            from hybrid_kv.ops.triton import sketch_limit

            return sketch_limit.best_limit(scores, top_k)
        return sketch_select.best_limit(scores, top_k)

    # Building an index --------------------------------------------------------------------------

    def nearest_keys(self, queries: Tensor, keys: Tensor, count: int) -> Tensor:
        if self._chosen_triton("nearest_keys", keys):
            from hybrid_kv.ops.triton import nearest

            return nearest.nearest_keys(queries, keys, count)
        return reference.nearest_keys(queries, keys, count)

    # The choice ---------------------------------------------------------------------------------

    def _engine_alone(self) -> frozenset[str]:
        """What may do the work of several ops at once: the engine, or nothing."""
        return _NATIVE if self.why_op_by_op is None else frozenset()

    @property
    def why_op_by_op(self) -> str | None:
        """Why the engine makes no decode step of a layer in one call; None where it may."""
        if self.backend in ("reference", *FUSED, *DEVICE_BACKENDS):
            return f"backend '{self.backend}' computes each op"
        if os.environ.get("HYBRID_KV_ONE_CALL") == "0":
            return "HYBRID_KV_ONE_CALL=0"
        return why_unavailable("native")

    def _here(self, tensor: Tensor) -> frozenset[str]:
        return backends_on(tensor.device.type, self.backend)

    def _chosen_triton(self, op: str, tensor: Tensor) -> bool:
        return self._choose(op, tensor, here=self._here(tensor)) == "triton"

    def _choose(
        self,
        op: str,
        tensor: Tensor,
        *,
        here: tuple[str, ...] | frozenset[str] = (),
        plain: bool = True,
        pairs: int = 1,
        few: bool = True,
    ) -> str:
        name = _chosen(
            self.backend,
            op,
            device_type=tensor.device.type,
            dtype=tensor.dtype,
            here=here,
            plain=plain,
            pairs=min(pairs, 1),
            few=few,
        )
        self.served[op] = name
        return name


def _reaches(near: Tensor, far: Tensor) -> bool:
    """Whether kernels on the device of one tensor read the other where it lies."""
    return near.device == far.device or far.is_pinned()


_chosen = cache(choose_backend)  # each step asks a few times in the same words


def _is_few(q: Tensor) -> bool:
    return q.shape[-2] <= _FEW_QUERIES


def get_ops(backend: str) -> Ops:
    """The ops of a back end.

    Raises:
        ConfigError: no such back end; the message lists the known ones.
        BackendUnavailable: a back end was asked for by name and cannot serve here.
    """
    if backend not in BACKENDS:
        raise unknown_name("backend", backend, BACKENDS)
    if (reason := why_unavailable(backend)) is not None:
        raise BackendUnavailable(
            f"backend '{backend}' cannot serve here: {reason}; use backend='auto'"
        )
    return Ops(backend)


def device_of(backend: str) -> str | None:
    """The only type of device whose models a back end is for; None: any, or it is not there."""
    if backend in FUSED:
        return FUSED[backend]
    return device_state(backend).device_type if backend in DEVICE_BACKENDS else None


def why_unavailable(backend: str) -> str | None:
    """Why a known back end cannot serve on this machine, None where it can."""
    if backend == "torch_cuda" and not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    if backend == "native":
        state = native.engine_state()
        return state.detail if state.isa is None else None
    if backend in DEVICE_BACKENDS:
        device = device_state(backend)
        return device.detail if device.device_type is None else None
    return None
