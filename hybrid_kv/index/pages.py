"""`pages`: page digests bound the scores of whole pages; the best pages are read.

Source: Quest (Tang et al. 2024), section 3.3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._base import SCRATCH_BYTES, KeyIndex, rank, scan
from hybrid_kv.ops.native.library import engine
from hybrid_kv.ops.native.pages import PageDigests
from hybrid_kv.ops.native.rows import DTYPES
from hybrid_kv.ops.native.workers import default_pool
from hybrid_kv.plugins import INDEXES
from hybrid_kv.types import SearchResult

_LEAST_ROOM, _ROOM_SHARE = 64, 16


def with_room(num_pages: int) -> int:
    """Digests that are allocated for so many pages: a sixteenth more, so that the pages which leave
    the window find room in every layer, and the step in which there is none left is a rare one.
    """
    return num_pages + max(_LEAST_ROOM, num_pages // _ROOM_SHARE)


@INDEXES.register("pages", paper="Quest (Tang et al. 2024)")
class PagesIndex(KeyIndex):
    """Reads the pages whose digests promise the highest scores (Quest).

    A query takes the ceil(top_k / page_size) pages with the highest upper bounds and returns the
    top_k best of their tokens by true score; fewer if the partly filled last page is among them.
    """

    class Params(config.Params):
        """page_size: tokens per digest; need not be the page size of the cache."""

        page_size: config.Count = 16

    _rows = 2
    """What a digest is as large as, in keys."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.page_tokens = params.page_size
        self._digests = torch.empty(0, 0, 0)  # [Hkv, capacity, 2 D]: maximum, minimum
        self._described: PageDigests | None = None  # the pages in use, for the engine

    @classmethod
    def bytes_per_key(cls, params: Any, num_keys: int, head_dim: int) -> int:
        pages = with_room(-(-num_keys // params.page_size))
        return int(-(-4 * cls._rows * head_dim * pages // max(1, num_keys)))  # of keys in 32 bit

    @property
    def memory_bytes(self) -> int:
        return self._digests.numel() * self._digests.itemsize

    @property
    def _num_pages(self) -> int:
        return -(-len(self) // int(self.params.page_size))

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        self._digests = self._empty_digests(with_room(self._num_pages))
        self._append(0)

    def _append(self, known: int) -> None:
        size = self.params.page_size
        first = known // size  # a page that was partly filled is summarised anew
        if self._num_pages > self._digests.shape[1]:
            grown = self._empty_digests(with_room(self._num_pages))
            grown[:, :first] = self._digests[:, :first]
            self._digests = grown
        full = len(self) // size
        whole = self._keys[:, first * size : full * size].unflatten(1, (full - first, size))
        self._write_whole(first, whole)
        if full < self._num_pages:
            rest = self._keys[:, None, full * size :]
            self._digests[:, full : full + 1] = self._digest(full, rest)
        self._describe()

    def _describe(self) -> None:
        """Tells the engine where the digests lie."""
        highs, lows = self._digests[:, : self._num_pages].chunk(2, -1)
        served = highs.dtype in DTYPES and engine() is not None
        self._described = PageDigests(lows, highs) if served else None

    def _write_whole(self, first: int, pages: Tensor) -> None:
        """Digests of full pages [Hkv, P, S, D], block by block."""
        step = max(1, SCRATCH_BYTES // max(1, pages[:, :1].nbytes))
        for start in range(0, pages.shape[1], step):
            block = pages[:, start : start + step]
            places = slice(first + start, first + start + block.shape[1])
            self._digests[:, places] = self._digest(first + start, block)

    def _digest(self, first: int, pages: Tensor) -> Tensor:
        """[Hkv, P, ...] digests of pages [Hkv, P, S, D], the first of which has this number."""
        return torch.cat([pages.amax(2), pages.amin(2)], -1)

    def _empty_digests(self, pages: int) -> Tensor:
        heads, _, dim = self._keys.shape
        return self._keys.new_empty(heads, pages, self._rows * dim)

    def upper_bounds(self, queries: Tensor) -> Tensor:
        """[Hkv, M, P] float32, no score of a page is higher, for queries [Hkv, M, D]."""
        pages = self._digests[:, : self._num_pages].float()
        return torch.matmul(_split_signs(queries.float()), pages.transpose(1, 2))

    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        wanted = min(-(-count // int(self.params.page_size)), self._num_pages)
        returned = min(most, wanted * int(self.params.page_size))
        heads, num_queries, dim = queries.shape
        step = max(1, SCRATCH_BYTES // (4 * heads * wanted * self.params.page_size * dim))
        parts = [
            self._find_few(queries[:, start : start + step], returned, wanted)
            for start in range(0, num_queries, step)
        ]
        return SearchResult(
            torch.cat([part.ids for part in parts], 1),
            torch.cat([part.scores for part in parts], 1),
            sum(part.scored for part in parts),
            read_bytes=self._digests[:, : self._num_pages].nbytes  # which every choice reads
            + sum(part.read_bytes or 0 for part in parts),
        )

    def _find_few(self, queries: Tensor, count: int, wanted: int) -> SearchResult:
        pages = self._best_pages(queries, wanted)
        size = self.params.page_size
        ids = (pages[..., None] * size + torch.arange(size)).flatten(2)
        beyond = ids >= len(self)
        heads = torch.arange(ids.shape[0])[:, None, None]
        rows = self._keys[heads, ids.clamp_max(len(self) - 1)].float()
        scores = torch.matmul(rows, queries[..., None])[..., 0].masked_fill(beyond, -torch.inf)
        scored = queries.shape[0] * queries.shape[1] * self._num_pages + int((~beyond).sum())
        read = self._key_bytes(int((~beyond).sum()))
        scores, ids = rank(scores, ids, count)
        return SearchResult(ids, scores, scored, read_bytes=read)

    def _best_pages(self, queries: Tensor, wanted: int) -> Tensor:
        """[Hkv, M, wanted] pages with the highest bounds, unordered."""
        if self._described is not None:
            return self._described.search(queries, wanted, pool=default_pool())[1]
        # max(q lo, q hi) per channel = relu(q) hi - relu(-q) lo: the bound is a dot product, and
        # pages are chosen by an exact scan over the digests.
        return scan(_split_signs(queries), self._digests[:, : self._num_pages], wanted)[1]


def _split_signs(queries: Tensor) -> Tensor:
    """[..., 2 D]: positive parts, then negative parts."""
    return torch.cat([queries.clamp_min(0), queries.clamp_max(0)], -1)
