"""The ops of a requested back end: every call is computed by what `choose_backend` says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_kv.errors import BackendUnavailable, unknown_name
from hybrid_kv.ops import native, reference, tail
from hybrid_kv.ops.attention_ops import AttentionOps
from hybrid_kv.ops.choice import BACKENDS, ChosenBackend, reaches, why_unavailable
from hybrid_kv.ops.devices import DEVICE_BACKENDS
from hybrid_kv.ops.native.pages import PageWriter
from hybrid_kv.ops.tail import Form, Tail, UnreadPart
from hybrid_kv.types import Candidates, PagedKV, PartialAttention

if TYPE_CHECKING:
    from hybrid_kv.ops.sketch_select import DeviceCodes


class SearchOps(ChosenBackend):
    """Selection by sketch, and exact neighbours; meaning as in `sketch_select`, `reference`."""

    __slots__ = ()

    def encode_sketch(self, to: DeviceCodes, keys: Tensor, first: int) -> None:
        """See `sketch_select.encode`."""
        if self._chosen_triton("encode_sketch", keys):
            from hybrid_kv.ops.triton import sketch_encode

            sketch_encode.encode(to, keys, first)
        else:
            from hybrid_kv.ops import sketch_select

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
        if reaches(q, k) and self._chosen_triton("find_by_sketch", q):
            from hybrid_kv.ops.triton import sketch_find

            return sketch_find.find(by, q, k, new=new, width=width, times=times)
        from hybrid_kv.ops import sketch_select

        self.served["find_by_sketch"] = "reference"
        return sketch_select.find(by, q, k, new=new, width=width, times=times)

    def finds_in_place(self, q: Tensor, v: Tensor) -> bool:
        """Whether what a search of queries needs is read where it lies, so that the work can be
        recorded; else rows of the host are copied, which waits for the device of q.
        """
        return q.device == v.device or (reaches(q, v) and self._chosen_triton("find_by_sketch", q))

    def score_candidates(self, q: Tensor, k: Tensor, ids: Tensor) -> Tensor:
        """See `sketch_select.exact_scores`."""
        if reaches(q, k) and self._chosen_triton("find_by_sketch", q):
            from hybrid_kv.ops.triton import sketch_rank

            return sketch_rank.exact_scores(q, k, ids)
        from hybrid_kv.ops import sketch_select

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
        discount: Tensor | None = None,
    ) -> PartialAttention:
        """See `sketch_select.attend`."""
        if reaches(found.scores, v) and self._chosen_triton("attend_candidates", found.scores):
            from hybrid_kv.ops.triton import sketch_attend

            return sketch_attend.attend(
                *(found, v, limit), scale=scale, softcap=softcap, discount=discount
            )
        from hybrid_kv.ops import sketch_select

        self.served["attend_candidates"] = "reference"
        return sketch_select.attend(
            *(found, v, limit), scale=scale, softcap=softcap, discount=discount
        )

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
        if self._chosen_triton("attend_unread", q):
            from hybrid_kv.ops.triton import unread

            return unread.attend_unread(
                *(known, q, scores, limit, own, seen), scale=scale, softcap=softcap, form=form
            )
        return tail.attend_unread(
            *(known, q, scores, limit, own, seen), scale=scale, softcap=softcap, form=form
        )

    def best_limit(self, scores: Tensor, top_k: int) -> Tensor:
        """See `sketch_select.best_limit`."""
        if self._choose("attend_candidates", scores, here=self._here(scores)) == "triton":
            from hybrid_kv.ops.triton import sketch_limit

            return sketch_limit.best_limit(scores, top_k)
        from hybrid_kv.ops import sketch_select

        return sketch_select.best_limit(scores, top_k)

    def nearest_keys(self, queries: Tensor, keys: Tensor, count: int) -> Tensor:
        if self._chosen_triton("nearest_keys", keys):
            from hybrid_kv.ops.triton import nearest

            return nearest.nearest_keys(queries, keys, count)
        return reference.nearest_keys(queries, keys, count)


class PageOps(ChosenBackend):
    """Ops on pages; shapes and meaning as in `reference`."""

    __slots__ = ()

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
        """Writer of single new tokens where the engine stores them; None where `append` does."""
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
            # As an element it would be copied from plain memory, which waits for the device.
            pages.positions[slot, offset : offset + 1] = first_position
        else:
            self._append_many(pages, k, v, places, first_position)
        if pages.key_min is not None:
            self.update_digests(pages, np.unique(np.asarray(places) // pages.k.shape[2]))

    def append_at(
        self, pages: PagedKV, k: Tensor, v: Tensor, numbers: Tensor, table: Tensor
    ) -> None:
        """Stores one token's k, v [Hkv, D] where the device is told; see `reference.append_at`."""
        if self._chosen_triton("append_at", pages.k):
            from hybrid_kv.ops.triton import digests

            digests.append_at(pages, k, v, numbers, table)
        else:
            reference.append_at(pages, k, v, numbers, table)

    def choose_listed(
        self, q: Tensor, pages: PagedKV, table: Tensor, numbers: Tensor, *, oldest: int, most: int
    ) -> Tensor:
        """Slots [Hkv, 1, most] of a table's best pages for one token, the best ones first.

        Args:
            q, table, numbers, oldest: see `reference.listed_page_scores`; the device is told how
                many of the pages count.
        """
        assert pages.key_min is not None
        assert pages.key_max is not None
        given = q, pages.key_min, pages.key_max, table, numbers, oldest
        if self._chosen_triton("choose_listed", q):
            from hybrid_kv.ops.triton import scores

            found = scores.listed_page_scores(*given)
        else:
            found = reference.listed_page_scores(*given)
        return table[found.topk(min(most, len(table)), -1).indices]

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
        if reaches(target.k, source.k) and self._chosen_triton("copy_pages", target.k):
            from hybrid_kv.ops.triton import pages

            pages.copy_pages(source, target, source_slots, target_slots)
        else:
            self.served["copy_pages"] = "reference"
            reference.copy_pages(source, target, source_slots, target_slots)


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
