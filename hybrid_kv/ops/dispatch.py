"""The ops of a requested back end: every call is computed by what the table of operations says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_kv.errors import BackendUnavailable, unknown_name
from hybrid_kv.ops import native
from hybrid_kv.ops import operations as op
from hybrid_kv.ops.devices import DEVICE_BACKENDS
from hybrid_kv.ops.native.attend import FEW_QUERIES, ROW_QUERIES
from hybrid_kv.ops.native.rows import DTYPES, PageWriter
from hybrid_kv.ops.native.step import ColdEntries, LayerPlan, ResidentPages
from hybrid_kv.ops.operations import (
    BACKENDS,
    FUSED,
    ChosenBackend,
    chosen,
    reaches,
    why_unavailable,
)
from hybrid_kv.ops.tail import Form, Tail, UnreadPart
from hybrid_kv.types import BlockMask, Candidates, PagedKV, PartialAttention

if TYPE_CHECKING:
    from hybrid_kv.ops.sketch_select import DeviceCodes

_FEW_TOKENS = 64
"""New tokens up to which each may read the pages for itself: twice what a step has by default."""
_FEW_PRODUCTS = 2**26
"""Products of a query's channel with a key's up to which no trial is worth its time."""


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
        is_native = bias is None and native.serves(k, v)
        attend = self._take(
            *(op.ATTEND, q),
            native=is_native,
            plain=softcap is None and _is_expressed(q, bias),
            pairs=bool(q.numel() and k.shape[2]),
            suited=is_native and self._is_suited(q, k),
        )
        return attend(q, k, v, scale=scale, bias=bias, softcap=softcap)

    def _is_suited(self, q: Tensor, k: Tensor) -> bool:
        """Whether the engine has a kernel for queries [B, Hq, T, D], no slower than torch's."""
        if _needs_gradient(q):
            return False
        few = q.shape[1] * q.shape[2] <= ROW_QUERIES * k.shape[1]
        if few or self.backend != "auto" or q.numel() * k.shape[2] <= _FEW_PRODUCTS:
            return True
        from hybrid_kv.ops.native.prompt import tiles_serve

        return tiles_serve(q.dtype, q.shape[3])

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
        name = self._choose(op.ATTEND_VISIBLE, q, native=native.serves(k, v), few=_is_few(q))
        given = newest if name == "native" else self._newest(newest, q.device)
        attend = self.bound(op.ATTEND_VISIBLE, name)
        return attend(q, k, v, positions, given, new=new, scale=scale, softcap=softcap)

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
        new, stored = q.shape[2], k.shape[2]
        is_native = native.serves(k, v)
        name = self._choose(
            *(op.ATTEND_CAUSAL, q),
            native=is_native,
            plain=softcap is None and window is None and _is_expressed(q, None),
            pairs=bool(q.numel() and stored),
            suited=is_native and self._is_suited(q, k),
        )
        attend = self.bound(op.ATTEND_CAUSAL, name)
        old = stored - new
        if name not in FUSED or not old:
            return attend(q, k, v, scale=scale, softcap=softcap, window=window)
        # Torch's kernels take a square: what is older is visible to all, a rectangle without mask.
        grouped = q.reshape(len(q), k.shape[1], -1, q.shape[3])
        past = self.attend(grouped, k[:, :, :old], v[:, :, :old], scale=scale)
        past = PartialAttention(past.out.reshape(q.shape), past.lse.reshape(q.shape[:3]))
        square = attend(q, k[:, :, old:], v[:, :, old:], scale=scale)
        return self.merge([square, past], square.out.dtype)

    def attend_with_masses(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None
    ) -> tuple[PartialAttention, Tensor]:
        """`attend_causal`, and the softmax weights [B, Hq, N] float32 that each entry got from all
        queries.
        """
        is_native = native.serves(k, v)
        suited = is_native and self._is_suited(q, k)
        name = self._choose(op.ATTEND_WITH_MASSES, q, native=is_native, suited=suited)
        if name == "native":
            return self.bound(op.ATTEND_WITH_MASSES, name)(q, k, v, scale=scale, softcap=softcap)
        from hybrid_kv.masses import causal_masses

        part = self.attend_causal(q, k, v, scale=scale, softcap=softcap)
        rows = zip(q, k, part.lse, strict=True)
        known = [
            causal_masses(own, keys, scale=scale, softcap=softcap, lse=lse)
            for own, keys, lse in rows
        ]
        return part, torch.stack(known)

    def attend_blocks(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: BlockMask,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> PartialAttention:
        """See `reference.attend_blocks`."""
        suited = not _needs_gradient(q)
        name = self._choose(op.ATTEND_BLOCKS, q, native=native.serves(k, v), suited=suited)
        return self.bound(op.ATTEND_BLOCKS, name)(q, k, v, mask, scale=scale, softcap=softcap)

    def attend_at(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> PartialAttention:
        """See `reference.attend_at`."""
        attend = self._take(op.ATTEND_AT, q, native=native.serves(k, v))
        return attend(q, k, v, positions, scale=scale, softcap=softcap)

    def block_masses(
        self, q: Tensor, k: Tensor, positions: Tensor, *, scale: float, softcap: float | None = None
    ) -> Tensor:
        """See `reference.block_masses`."""
        masses = self._take(op.BLOCK_MASSES, q, native=native.serves(k, k))
        return masses(q, k, positions, scale=scale, softcap=softcap)

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
        """See `reference.attend_retrieved`; the engine reads keys and values where they lie."""
        attend = self._take(op.ATTEND_RETRIEVED, q, native=native.serves(k, v))
        return attend(q, k, v, ids, scale=scale, softcap=softcap, bias=bias)

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
        attend = self._take(op.ATTEND_RAGGED, q, native=native.serves(k, v), few=_is_few(q))
        return attend(q, k, v, starts, lengths, scale=scale, softcap=softcap, bias=bias)

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
        name = self._choose(op.ATTEND_PAGES, q, plain=plain)
        attend = self.bound(op.ATTEND_PAGES, name)
        if name == "flashinfer":
            return attend(q, pages, slots, tail_fill, scale=scale, softcap=softcap)
        return attend(q, pages, slots, query_positions, scale=scale, softcap=softcap, count=count)

    def reads_pages(self, q: Tensor) -> bool:
        """Whether pages are attended where they lie: then a few queries need no dense view."""
        device = q.device.type
        if device == "cpu" and self.backend not in DEVICE_BACKENDS:
            return False
        here = self._here(q)
        name = chosen(self.backend, "attend_pages", device_type=device, dtype=q.dtype, here=here)
        return q.shape[2] <= _FEW_TOKENS and name != "reference"

    def merge(self, parts: Sequence[PartialAttention], dtype: torch.dtype) -> PartialAttention:
        is_native = native.serves_merge(parts, dtype)
        return self._take(op.MERGE, parts[0].out, native=is_native)(parts, dtype)

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
        is_native = q.dtype in DTYPES and all(native.serves(*kv) for kv in (*kept, *whole))
        is_native = is_native and self.why_op_by_op is None
        if self._choose(op.PLAN_STEP, q, native=is_native) != "native":
            return None
        return LayerPlan(q.shape[1], resident, cold, whole=whole, writer=writer)


def _needs_gradient(q: Tensor) -> bool:
    """Whether somebody may go backwards, for which the engine has no pass."""
    return torch.is_grad_enabled() and q.requires_grad


def _is_expressed(q: Tensor, bias: Tensor | None) -> bool:
    """Whether torch has fused kernels for such queries, on a GPU."""
    if q.device.type != "cuda":
        return True
    from hybrid_kv.ops.fused import expresses_on_cuda

    return expresses_on_cuda(q, bias)


def _is_few(q: Tensor) -> bool:
    return q.shape[-2] <= FEW_QUERIES


class PageOps(ChosenBackend):
    """Ops on pages; shapes and meaning as in `reference`."""

    __slots__ = ()

    def page_scores(self, q: Tensor, key_min: Tensor, key_max: Tensor) -> Tensor:
        """[H, M, P] float32 upper bounds of the scores in each page, for queries q [H, M, D].

        key_min, key_max: [H, P, D], the digests of the pages; see `reference_pages.page_scores`.
        """
        score = self._take(op.PAGE_SCORES, q, native=native.serves(key_min, key_max))
        return score(q, key_min, key_max)

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
        choose = self._take(op.CHOOSE_PAGES, q)
        return choose(q, key_min, key_max, new=new, oldest=oldest, newest=newest, count=count)

    def page_writer(self, pages: PagedKV) -> PageWriter | None:
        """Writer of single new tokens where the engine stores them; None where `append` does."""
        is_native = native.serves(pages.k, pages.v) and self.why_op_by_op is None
        if self._choose(op.PAGE_WRITER, pages.k, native=is_native) != "native":
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
            places: [n], n > 0; see `PagedKV.store`.
        """
        start, count = int(places[0]), len(places)
        name = self._choose(op.APPEND, pages.k, few=count == 1)
        if name != "reference":
            self.bound(op.APPEND, name)(pages, k[:, 0], v[:, 0], start, first_position)
            return
        if count == 1:  # nearly every step: as `PagedKV.store`, in fewer words
            shape = pages.k.shape
            slot, offset = divmod(start, shape[2])
            pages.k[:, slot, offset], pages.v[:, slot, offset] = k[:, 0], v[:, 0]
            # As an element it would be copied from plain memory, which waits for the device.
            pages.positions[slot, offset : offset + 1] = first_position
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
        pages.store(k, v, rows, positions)

    def append_at(
        self, pages: PagedKV, k: Tensor, v: Tensor, numbers: Tensor, table: Tensor
    ) -> None:
        """Stores a token k, v [Hkv, D] where the device is told; as `reference_pages.append_at`."""
        self._take(op.APPEND_AT, pages.k)(pages, k, v, numbers, table)

    def choose_listed(
        self, q: Tensor, pages: PagedKV, table: Tensor, numbers: Tensor, *, oldest: int, most: int
    ) -> Tensor:
        """Slots [Hkv, 1, most] of a table's best pages for one token, the best ones first.

        Args:
            q, table, numbers, oldest: see `reference_pages.listed_page_scores`; the device is told
                how many of the pages count.
        """
        scores = self._take(op.CHOOSE_LISTED, q)
        found = scores(q, pages.key_min, pages.key_max, table, numbers, oldest)
        return table[found.topk(min(most, len(table)), -1).indices]

    def update_digests(self, pages: PagedKV, slots: npt.NDArray[np.int64]) -> None:
        if pages.key_min is not None and len(slots):
            update = self._take(op.UPDATE_DIGESTS, pages.k)
            update(pages, self.uploads(slots, pages.k.device))

    def copy_pages(
        self, source: PagedKV, target: PagedKV, source_slots: Tensor, target_slots: Tensor
    ) -> None:
        """See `reference_pages.copy_pages`; a kernel reads the host only in pinned memory."""
        copy = self._take(op.COPY_PAGES, target.k, source.k)
        copy(source, target, source_slots, target_slots)


class SearchOps(ChosenBackend):
    """Selection by sketch, and exact neighbours; meaning as in `sketch_select`, `reference`.

    Kernels read keys and values of the host where they are page-locked.
    """

    __slots__ = ()

    def encode_sketch(self, to: DeviceCodes, keys: Tensor, first: int) -> None:
        """See `sketch_select.encode`."""
        self._take(op.ENCODE_SKETCH, keys)(to, keys, first)

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
        """See `sketch_select.find`."""
        find = self._take(op.FIND_BY_SKETCH, q, k)
        return find(by, q, k, new=new, width=width, times=times)

    def finds_in_place(self, q: Tensor, v: Tensor) -> bool:
        """Whether what a search of queries needs is read where it lies, so that the work can be
        recorded; else rows of the host are copied, which waits for the device of q.
        """
        if q.device == v.device:
            return True
        return reaches(q, v) and self._choose(op.FIND_BY_SKETCH, q) == "triton"

    def score_candidates(self, q: Tensor, k: Tensor, ids: Tensor) -> Tensor:
        """See `sketch_select.exact_scores`."""
        return self._take(op.SCORE_CANDIDATES, q, k)(q, k, ids)

    def attend_candidates(
        self,
        found: Candidates,
        v: Tensor,
        limit: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        discount: Tensor | None = None,
    ) -> PartialAttention:
        """See `sketch_select.attend`."""
        attend = self._take(op.ATTEND_CANDIDATES, found.scores, v)
        return attend(found, v, limit, scale=scale, softcap=softcap, discount=discount)

    def best_limit(self, scores: Tensor, top_k: int) -> Tensor:
        """See `sketch_select.best_limit`."""
        return self._take(op.BEST_LIMIT, scores)(scores, top_k)

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
        form: Form = "gaussian",
    ) -> UnreadPart:
        """See `tail.attend_unread`."""
        given = known, q, scores, limit, own, seen
        attend = self._take(op.ATTEND_UNREAD, q)
        return attend(*given, scale=scale, softcap=softcap, form=form)

    def nearest_keys(self, queries: Tensor, keys: Tensor, count: int) -> Tensor:
        return self._take(op.NEAREST_KEYS, keys)(queries, keys, count)


class Ops(AttentionOps, PageOps, SearchOps):
    """The ops of one requested back end; shapes and meaning as in `reference`."""

    __slots__ = ()


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
