"""What finds cold keys on a device, and what teaches an index there."""

from __future__ import annotations

from torch import Tensor

from hybrid_kv.ops import reference, sketch_select, tail
from hybrid_kv.ops.chosen import ChosenBackend, reaches
from hybrid_kv.ops.sketch_select import DeviceCodes
from hybrid_kv.ops.tail import Form, Tail, UnreadPart
from hybrid_kv.types import Candidates, PartialAttention


class SearchOps(ChosenBackend):
    """Selection by sketch, and exact neighbours; meaning as in `sketch_select`, `reference`."""

    __slots__ = ()

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
        if reaches(q, k) and self._chosen_triton("find_by_sketch", q):
            from hybrid_kv.ops.triton import sketch_find

            return sketch_find.find(by, q, k, new=new, width=width, times=times)
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
        return sketch_select.best_limit(scores, top_k)

    def nearest_keys(self, queries: Tensor, keys: Tensor, count: int) -> Tensor:
        if self._chosen_triton("nearest_keys", keys):
            from hybrid_kv.ops.triton import nearest

            return nearest.nearest_keys(queries, keys, count)
        return reference.nearest_keys(queries, keys, count)
