"""Kinds that choose runs of tokens by bounds of their keys, representatives or landmarks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import pad

from hybrid_kv import config
from hybrid_kv.index._base import SCRATCH_BYTES, KeyIndex, SavedIndex, rank, scan
from hybrid_kv.index._file import check_fingerprint, fingerprint, refusing_what_is_damaged
from hybrid_kv.ops.native.library import default_pool, engine
from hybrid_kv.ops.native.rows import DTYPES
from hybrid_kv.ops.native.selected import PageDigests
from hybrid_kv.plugins import INDEXES
from hybrid_kv.types import Needs, SearchResult

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
    """A digest is as large as so many keys."""

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


@INDEXES.register("blocks", paper="InfLLM (Xiao et al. 2024, section 3.2)")
class BlocksIndex(PagesIndex, SavedIndex):
    """Reads the blocks whose representative keys score highest on average (InfLLM).

    Those keys represent a block that the sampled queries of the local_tokens behind it score best
    (the last ones where it came later; without any, all keys do). Each query head chooses alone.
    """

    class Params(config.Params):
        """page_size: tokens of a block; num_representatives: keys that stand for it; local_tokens:
        so far behind it are the queries that choose them; sampled_queries: of the prompt, per head.
        """

        in_python = frozenset({"local_tokens"})

        page_size: config.Count = 128
        num_representatives: config.Count = 4
        local_tokens: config.Count = 4096
        sampled_queries: config.Tokens = 1024

        def without_effect(self) -> dict[str, str]:
            why = "with sampled_queries 0, where the mean of a block stands for it"
            names = ("num_representatives", "local_tokens")
            return {} if self.sampled_queries else dict.fromkeys(names, why)

    file_kind = "blocks"
    _rows = 1

    @classmethod
    def needs(cls, params: Any) -> Needs:
        return Needs(params.sampled_queries)

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        asked = self._keys.new_zeros(1, 0, 1) if samples is None else samples.float().mean(1)
        self._asked, self._built = pad(asked.cumsum(1), (0, 0, 1, 0)), max(1, len(self))
        super()._rebuild(samples, nearest)
        if asked.shape[1]:  # a block that comes later is judged by the last one alone
            self._asked = pad(asked[:, -1:], (0, 0, 1, 0))

    def _digest(self, first: int, pages: Tensor) -> Tensor:
        if not (known := self._asked.shape[1] - 1):  # samples, evenly spread over the keys
            return pages.mean(2)
        ends = torch.arange(first + 1, first + pages.shape[1] + 1) * self.page_tokens
        start = (ends * known // self._built).clamp_max(known - 1)
        stop = ((ends + self.params.local_tokens) * known // self._built).clamp(max=known)
        sums = self._asked[:, torch.maximum(stop, start + 1)] - self._asked[:, start]
        scores = torch.matmul(pages.float(), sums[..., None])  # [Hkv, P, S, 1]
        best = scores.topk(min(self.params.num_representatives, pages.shape[2]), 2).indices
        return pages.gather(2, best.expand(*best.shape[:3], pages.shape[3])).mean(2)

    def _describe(self) -> None:
        """Nothing for the engine: digests score as keys do."""

    def _best_pages(self, queries: Tensor, wanted: int) -> Tensor:
        return scan(queries, self._digests[:, : self._num_pages], wanted)[1]

    def shortened(self, keys: Tensor) -> Self:
        """See `SavedIndex`: the block that ends earlier now is judged as a later one."""
        new, whole = self.over(keys), keys.shape[1] // int(self.params.page_size)
        new._digests = self._digests.clone()
        if whole < new._num_pages:
            rest = keys[:, None, whole * int(self.params.page_size) :]
            new._digests[:, whole : whole + 1] = new._digest(whole, rest)
        return new

    def to_file(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """See `SavedIndex`: the blocks' digests, and what judges those that come later."""
        meta = {
            "params": self.params.model_dump(mode="json"),
            "keys": fingerprint(self._keys, len(self)),
        }
        digests = self._digests[:, : self._num_pages].float()
        return meta, {"digests": digests.numpy(), "asked": self._asked[:, 1:].float().numpy()}

    @classmethod
    def from_file(
        cls, path: Path, meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], keys: Tensor
    ) -> Self:
        """See `SavedIndex`."""
        with refusing_what_is_damaged(path):
            index = cls(cls.Params.model_validate(meta["params"]))
            count = int(meta["keys"]["shape"][1])
            check_fingerprint(path, meta["keys"], keys, count)
            index._known, index._built = keys[:, :count], max(1, count)
            digests, asked = (torch.from_numpy(arrays[name]) for name in ("digests", "asked"))
            heads, dim, pages = keys.shape[0], keys.shape[2], index._num_pages
            if digests.shape != (heads, pages, dim) or not bool(digests.isfinite().all()):
                raise ValueError(f"it has not the digests of {pages} blocks")
            if asked.shape not in ((heads, 1, dim), (1, 0, 1)) or not bool(asked.isfinite().all()):
                raise ValueError("it has not what judges later blocks")
        index._digests = index._empty_digests(with_room(pages))
        index._digests[:, :pages] = digests
        index._asked = pad(asked, (0, 0, 1, 0))
        if keys.shape[1] > count:
            index.add(keys)
        return index


@INDEXES.register("frames", paper="ReKV (Di et al. 2025, arXiv:2503.00540)")
class FramesIndex(PagesIndex):
    """Reads the blocks (frames of a video) whose mean key is most like the mean query (ReKV).

    Of a layer: cosine of the mean of all queries of a step and the mean key of a block, the KV
    heads' vectors behind each other; all heads read the same blocks.
    """

    class Params(config.Params):
        """page_size: tokens of a frame; shared: all heads and tokens of a step choose together
        (false: each query by its own dot products).
        """

        page_size: config.Count = 196
        shared: bool = True

    _rows = 1

    def _digest(self, first: int, pages: Tensor) -> Tensor:
        return pages.mean(2)

    def _describe(self) -> None:
        """Nothing for the engine: digests score as keys do."""

    def _best_pages(self, queries: Tensor, wanted: int) -> Tensor:
        digests = self._digests[:, : self._num_pages]
        if not self.params.shared:
            return scan(queries, digests, wanted)[1]
        frames, asked = digests.float(), queries.mean(1, keepdim=True)
        scores = (frames * asked).sum((0, 2)) / frames.square().sum((0, 2)).sqrt().clamp_min(1e-20)
        return scores.topk(wanted).indices.expand(*queries.shape[:2], -1)


@INDEXES.register("landmarks", paper="ShadowKV (Sun et al. 2024, arXiv:2410.21465)")
class LandmarksIndex(PagesIndex):
    """Reads the chunks whose mean keys score best, and first of all the outliers (ShadowKV).

    A landmark is the mean key of a chunk. Outliers are the chunks of a KV head in which some key
    has the lowest cosine with it; they are chosen when the index is built, and are part of top_k.
    The query heads of a KV head choose together, by the largest of their softmax weights.
    """

    class Params(config.Params):
        """page_size: tokens of a chunk; outlier_chunks: that are always read, at most half of what
        a search reads; shared: the query heads of a KV head choose together (false: each alone).
        """

        page_size: config.Count = 8
        outlier_chunks: config.Tokens = 48
        shared: bool = True

    _rows = 1

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.joint = params.shared
        self._outliers = torch.zeros(0, 0, dtype=torch.int64)  # [Hkv, O], of the whole chunks

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        super()._rebuild(samples, nearest)
        size = self.params.page_size
        full = len(self) // size
        keys = self._keys[:, : full * size].unflatten(1, (full, size)).float()
        alike = F.cosine_similarity(keys, self._digests[:, :full, None].float(), dim=-1).amin(-1)
        order = alike.sort(dim=-1, stable=True).indices
        self._outliers = order[:, : self.params.outlier_chunks].contiguous()

    @property
    def memory_bytes(self) -> int:
        return super().memory_bytes + self._outliers.nbytes

    def _digest(self, first: int, pages: Tensor) -> Tensor:
        return pages.mean(2)

    def _describe(self) -> None:
        """Nothing for the engine: landmarks score as keys do."""

    def _best_pages(self, queries: Tensor, wanted: int) -> Tensor:
        landmarks = self._digests[:, : self._num_pages]
        always = self._outliers[:, : wanted // 2]
        if not self.params.shared and not always.shape[1]:
            return scan(queries, landmarks, wanted)[1]
        scores = torch.matmul(queries.float(), landmarks.float().transpose(1, 2))
        if self.params.shared:
            scores = (scores * queries.shape[2] ** -0.5).softmax(-1).amax(1, keepdim=True)
        scores.scatter_(2, always[:, None].expand(-1, scores.shape[1], -1), torch.inf)
        return scores.topk(wanted).indices.expand(*queries.shape[:2], -1)
