"""Pages of resident entries: stored, summed up in digests, chosen, copied."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_kv.ops import native, reference
from hybrid_kv.ops.chosen import ChosenBackend, reaches
from hybrid_kv.ops.devices import DEVICE_BACKENDS
from hybrid_kv.ops.native.append import PageWriter
from hybrid_kv.types import PagedKV


class PageOps(ChosenBackend):
    """What is done to pages; shapes and meaning as in `reference`."""

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
