"""The engine over a paged KV cache: sketches of one layer's keys in its blocks, attention over all
entries of some blocks where they lie, and decode steps of all sequences in one call.

    keys written ──► coded[block] falls to the first slot that was written
    encode       ──► codes[block, head, slot] up to a length, coded[block] rises
    search       ──► places of a sequence by its block table ──► rows of the cache

Codes belong to slots, not to sequences: a block that is used again, shared by a prefix or given up
needs no word from the scheduler.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, byref, c_int32, pointer, sizeof
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, NonFiniteError, ShapeError
from hybrid_kv.ops.host_memory import host_array
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.bindings import (
    SEARCH_SKETCH,
    ColdStruct,
    ExtentStruct,
    KeysStruct,
    KVStruct,
    LayerStruct,
    OneStepStruct,
    ResidentStruct,
    SearchStruct,
    SketchHeadStruct,
    SketchTierStruct,
    StepReportStruct,
    StepStruct,
)
from hybrid_kv.ops.native.library import Pool, find_engine
from hybrid_kv.ops.native.rows import DTYPES, describe, described, pool_handle
from hybrid_kv.ops.native.scans import map_struct
from hybrid_kv.ops.sketch_codes import BLOCK_KEYS, LINE_BYTES, SketchMap
from hybrid_kv.ops.tail import Tail, sizes_of_moments
from hybrid_kv.types import PartialAttention

Ints = npt.NDArray[np.int32]


class SearchRange(NamedTuple):
    """The part of one sequence that a search covers.

    table: [blocks] int32 contiguous, the blocks of the sequence in order. first, num_tokens: its
    tokens from `first` on, a multiple of 16. top_k, num_rerank: results, and candidates ranked
    exactly.
    """

    table: Ints
    first: int
    num_tokens: int
    top_k: int
    num_rerank: int


class PagedSketch:
    """Codes of the keys of one layer, and their search.

    Args:
        blocks: [num_blocks, Hkv, 2, block_tokens, D] contiguous: keys, then values, as rows.
        maps: of each KV head, of one plan.
        engine: another library than the one in use.

    Raises:
        ShapeError, ConfigError: they do not fit.
        BackendUnavailable: there is no engine.
    """

    def __init__(
        self, blocks: Tensor, maps: Sequence[SketchMap], *, engine: ctypes.CDLL | None = None
    ) -> None:
        self._engine = find_engine(engine)
        num_blocks, heads, _, tokens, dim = blocks.shape
        if not blocks.is_contiguous() or blocks.shape[2] != 2 or len(maps) != heads:
            raise ShapeError(
                f"blocks must be [N, {len(maps)}, 2, tokens, D] contiguous for {len(maps)} maps, "
                f"got {list(blocks.shape)} with strides {list(blocks.stride())}"
            )
        if tokens % BLOCK_KEYS:
            raise ConfigError(
                f"a block must have a multiple of {BLOCK_KEYS} tokens, got {tokens}; set block_size"
            )
        rows = blocks.view(-1, dim)
        if len(rows) >= 2**31:
            raise ConfigError(
                f"a layer's cache must have fewer than 2^31 rows, got {len(rows)}; make the cache "
                "smaller"
            )
        self._keys, self._tokens = rows[: len(rows) - tokens], tokens
        self.maps = tuple(maps)
        self._structs = [map_struct(one) for one in maps]
        shape = [num_blocks, heads, tokens // BLOCK_KEYS, maps[0].plan.num_lines, LINE_BYTES]
        self.codes = host_array(shape, torch.uint8)  # untouched pages take no memory
        self.coded: Ints = np.zeros(num_blocks, np.int32)
        """Of each block, how many of its first slots have the codes of the keys that lie there."""
        self._described: dict[int, tuple[ctypes.Array[SketchTierStruct], _Heads]] = {}

    def overwrite(self, slots: npt.NDArray[np.int64]) -> None:
        """Take note that the keys in these slots are others than before; of every head."""
        block, slot = np.divmod(slots, self._tokens)
        np.minimum.at(self.coded, block, slot.astype(np.int32))

    def encode(self, table: Ints, length: int, pool: Pool | None = None) -> int:
        """Make the codes of a sequence's first `length` tokens that have none yet.

        Returns:
            Tokens that were encoded.

        Raises:
            NonFiniteError: a key holds NaN or infinity; nothing is taken as encoded.
        """
        ends = np.full(-(-length // self._tokens), self._tokens, np.int32)
        if not len(ends):
            return 0
        ends[-1] = length - (len(ends) - 1) * self._tokens
        own = table[: len(ends)]
        missing = np.flatnonzero(self.coded[own] < ends)
        if not len(missing):
            return 0
        block = int(missing[0])
        first = block * self._tokens + int(self.coded[own[block]]) // BLOCK_KEYS * BLOCK_KEYS
        tiers, heads = self._describe(1)
        self._place(tiers, 0, SearchRange(table, 0, length, 1, 1))
        status = self._engine.hkv_sketch_encode_pages(
            pool_handle(pool), len(tiers), tiers, heads.keys, first
        )
        library.check(self._engine, status)
        self.coded[own[block:]] = np.maximum(self.coded[own[block:]], ends[block:])
        return length - first

    def search(
        self, queries: Tensor, searched: Sequence[SearchRange], pool: Pool | None = None
    ) -> tuple[Tensor, Tensor]:
        """The best keys of the queries of some sequences, whose tokens are encoded.

        Args:
            queries: [S, Hkv, G, D] float32 contiguous.
            searched: of each of the S sequences, each with at least one token.

        Returns:
            ids [S, Hkv, G, K] int64, rows of the cache, K the largest top_k, -1 where a sequence
            has a smaller one; and scores [S, Hkv, G, K] float32, -inf there.
        """
        num, heads, group, _ = queries.shape
        width = max(one.top_k for one in searched)
        structs = self.describe(searched)
        ids = torch.empty((num, heads, group, width), dtype=torch.int64)
        scores = torch.empty((num, heads, group, width))
        status = self._engine.hkv_sketch_search(
            *(pool_handle(pool), num * heads, structs, queries.data_ptr(), group, width),
            *(ids.data_ptr(), scores.data_ptr(), None, None),
        )
        library.check(self._engine, status)
        for place, one in enumerate(searched):
            if one.top_k < width:
                ids[place, :, :, one.top_k :] = -1
                scores[place, :, :, one.top_k :] = -torch.inf
        return ids, scores

    def describe(self, searched: Sequence[SearchRange]) -> ctypes.Array[SketchHeadStruct]:
        """The engine's descriptors of some searches, [S * Hkv], until the next call."""
        heads = len(self.maps)
        tiers, described = self._describe(len(searched))
        for place, one in enumerate(searched):
            self._place(tiers, place, one)
            for head in range(place * heads, (place + 1) * heads):
                described.structs[head].num_rerank = max(one.num_rerank, one.top_k)
        return described.structs

    @property
    def bytes_per_token(self) -> int:
        """Codes of one token, of all heads."""
        return self.codes[0].nbytes // self._tokens

    def _describe(self, num: int) -> tuple[ctypes.Array[SketchTierStruct], _Heads]:
        """Descriptors of so many sequences; what differs from call to call is set by `_place`."""
        if num not in self._described:
            heads, per_head = len(self.maps), self.codes[0, 0].nbytes
            tiers = (SketchTierStruct * (num * heads))()
            for at in range(num * heads):
                head = at % heads
                tiers[at] = SketchTierStruct(
                    *(ctypes.pointer(self._structs[head]), self.codes.data_ptr() + head * per_head),
                    *(None, 0, None, self._tokens, 0),
                    *(2 * heads * self._tokens, heads * per_head, 2 * head * self._tokens),
                )
            self._described[num] = tiers, _Heads.of(self._keys, tiers)
        return self._described[num]

    def _place(
        self, tiers: ctypes.Array[SketchTierStruct], place: int, searched: SearchRange
    ) -> None:
        heads, table = len(self.maps), searched.table
        address = table.ctypes.data
        for at in range(place * heads, (place + 1) * heads):
            tier = tiers[at]
            tier.pages, tier.first, tier.count = address, searched.first, searched.num_tokens


class _Heads(NamedTuple):
    """Descriptors of heads, each with a tier of its own over the same keys; and of the keys."""

    structs: ctypes.Array[SketchHeadStruct]
    keys: ctypes.Array[KeysStruct]

    @classmethod
    def of(cls, rows: Tensor, tiers: ctypes.Array[SketchTierStruct]) -> _Heads:
        keys = describe("keys", rows[None].expand(len(tiers), -1, -1))
        size = ctypes.sizeof(SketchTierStruct)
        structs = (SketchHeadStruct * len(tiers))()
        for at in range(len(tiers)):
            tier = SketchTierStruct.from_buffer(tiers, at * size)
            structs[at] = SketchHeadStruct(keys[at], ctypes.pointer(tier), 1, 1, len(rows))
        return cls(structs, keys)


class BlockSlice(NamedTuple):
    """Slots begin..end - 1 of a block."""

    block: int
    begin: int
    end: int


class PagedAttention:
    """Keys and values in blocks [num_blocks, Hkv, 2, block, D], described once; by reference.

    Raises:
        ShapeError, ConfigError: they cannot be read.
        BackendUnavailable: there is no engine.
    """

    def __init__(self, blocks: Tensor, *, engine: ctypes.CDLL | None = None) -> None:
        self._engine = find_engine(engine)
        self._blocks, self._kv = blocks, described(blocks[:, :, 0], blocks[:, :, 1])

    def attend(
        self,
        queries: Tensor,
        pieces: Sequence[BlockSlice],
        *,
        scale: float,
        softcap: float | None = None,
        pool: Pool | None = None,
    ) -> PartialAttention:
        """Every query over every entry of some pieces, of which there is at least one.

        Args:
            queries: [Hkv, G, D] contiguous, of a dtype of DTYPES.

        Returns:
            out [P, Hkv, G, D] float32, lse [P, Hkv, G] float32, of each of the P pieces.
        """
        heads, group, dim = queries.shape
        out = torch.empty((len(pieces), heads, group, dim))
        lse = torch.empty(out.shape[:-1])
        kv, size = type(self._kv).from_buffer_copy(self._kv), self._blocks.itemsize
        keys, values, step = kv.keys_data, kv.values_data, self._blocks.stride(0) * size
        place, place_lse = out.data_ptr(), lse.data_ptr()
        for block, begin, end in pieces:
            offset = block * step + begin * dim * size
            kv.keys_data, kv.values_data = keys + offset, values + offset
            kv.keys_count = kv.values_count = end - begin
            status = self._engine.hkv_attend_rows(
                *(pool_handle(pool), 1, heads, byref(kv), queries.data_ptr()),
                *(DTYPES[queries.dtype], group, None, scale, softcap or 0.0, place, place_lse),
            )
            if status:
                library.check(self._engine, status)
            place, place_lse = place + 4 * heads * group * dim, place_lse + 4 * heads * group
        return PartialAttention(out, lse)


class PagedDecode(NamedTuple):
    """The entries that the newest token of one sequence attends.

    near: entries that are attended whole. searched: those of which the best are; they are encoded.
    tail: moments of these, by which the others are estimated; None leaves them out.
    """

    near: Sequence[BlockSlice]
    searched: SearchRange
    tail: Tail | None


class PagedSteps:
    """Steps of one layer, described once; by reference. Not for several threads at once.

    Args:
        blocks: [num_blocks, Hkv, 2, block, D] contiguous: keys, then values, as rows.
        engine: another library than the one in use.

    Raises:
        ShapeError, ConfigError: they cannot be read.
        BackendUnavailable: there is no engine.
    """

    def __init__(self, blocks: Tensor, *, engine: ctypes.CDLL | None = None) -> None:
        self._engine = find_engine(engine)
        if not blocks.is_contiguous() or blocks.shape[2] != 2:
            raise ShapeError(
                "blocks must be [N, Hkv, 2, tokens, D] contiguous, got "
                f"{list(blocks.shape)} with strides {list(blocks.stride())}"
            )
        _, heads, _, tokens, dim = blocks.shape
        rows = blocks.view(-1, dim)
        # One array for all heads and sequences: a row's number says whose it is.
        keys, values = (part.expand(heads, -1, -1) for part in (rows[:-tokens], rows[tokens:]))
        self._blocks, self._all = blocks, described(keys, values)
        self._block = described(blocks[0, :, 0], blocks[0, :, 1])
        self._dim, self._heads = dim, (c_int32 * heads)(*range(heads))
        self._places: list[_Place] = []
        self._found: tuple[Tensor, list[int]] = torch.empty(0), []  # and the top_k of each

    @property
    def found(self) -> list[Tensor]:
        """Rows of the cache [Hkv, G, top_k] int64 that the last call found, of each sequence; -1
        where there are fewer.
        """
        ids, widths = self._found
        heads, group = ids.shape[1:3] if widths else (0, 0)
        return [
            own.flatten()[: heads * group * width].view(heads, group, width)
            for own, width in zip(ids, widths, strict=True)
        ]

    def attend(
        self,
        queries: Tensor,
        decodes: Sequence[PagedDecode],
        sketch: PagedSketch,
        *,
        scale: float,
        softcap: float | None = None,
        pool: Pool | None = None,
    ) -> tuple[PartialAttention, list[int]]:
        """One step of each of some sequences.

        Args:
            queries: [S, Hkv, G, D] of a dtype of DTYPES.
            sketch: of the same blocks.

        Returns:
            out [S, Hkv, G, D] and lse [S, Hkv, G], float32; and which of the S could not be
            searched, as a query is not finite: their results mean nothing.
        """
        num, heads, group, dim = queries.shape
        if (heads, dim) != (len(self._heads), self._dim):
            raise ShapeError(
                f"queries must be [S, {len(self._heads)}, G, {self._dim}] as the blocks, got "
                f"{list(queries.shape)}"
            )
        queries = queries.contiguous()
        out, lse = torch.empty(queries.shape), torch.empty(queries.shape[:-1])
        structs = sketch.describe([one.searched for one in decodes])
        width = max(one.searched.top_k for one in decodes)
        ids = torch.empty((num, heads, group, width), dtype=torch.int64)
        self._found = ids, [one.searched.top_k for one in decodes]
        while len(self._places) < num:
            self._places.append(_Place(self._all, self._heads))
        steps = (OneStepStruct * num)()
        for at, (one, place) in enumerate(zip(decodes, self._places, strict=False)):
            first = addressof(structs) + at * heads * sizeof(SketchHeadStruct)
            place.take(one, group, first, self._slices(one.near))
            step = place.step
            step.queries, step.ids = queries[at].data_ptr(), ids[at].data_ptr()
            step.out, step.lse = out[at].data_ptr(), lse[at].data_ptr()
            step.query_dtype, step.out_dtype = DTYPES[queries.dtype], DTYPES[out.dtype]
            step.scale, step.softcap = scale, softcap or 0.0
            steps[at] = place.one
        handle = pool_handle(pool)
        library.check(self._engine, self._engine.hkv_attend_steps(handle, num, steps))
        failed = [at for at in range(num) if steps[at].status]
        for at in failed:
            own = self._places[at]
            arguments = byref(own.layer), byref(own.step), byref(own.report)
            try:  # once more, alone, for its sentence
                library.check(self._engine, self._engine.hkv_attend_step(handle, *arguments))
            except NonFiniteError:
                continue
        return PartialAttention(out, lse), failed

    def _slices(self, near: Sequence[BlockSlice]) -> ctypes.Array[KVStruct]:
        size = self._blocks.itemsize
        step, row = self._blocks.stride(0) * size, self._dim * size
        found = (KVStruct * len(near))()
        for struct, (block, begin, end) in zip(found, near, strict=True):
            ctypes.memmove(addressof(struct), addressof(self._block), sizeof(KVStruct))
            struct.keys_data += block * step + begin * row
            struct.values_data += block * step + begin * row
            struct.keys_count = struct.values_count = end - begin
        return found


class _Place:
    """The engine's descriptors of the step of one sequence."""

    def __init__(self, kv: KVStruct, heads: ctypes.Array[c_int32]) -> None:
        self._num_heads = len(heads)
        none = KVStruct.from_buffer_copy(kv)
        none.keys_count = none.values_count = 0
        self._search = SearchStruct(SEARCH_SKETCH, len(heads), addressof(heads))
        self._extent = ExtentStruct(kv, pointer(self._search), 1)
        self.layer = LayerStruct(len(heads), 0, ResidentStruct(none))
        self.layer.cold = ColdStruct(pointer(self._extent), 1)
        self.step, self.report = StepStruct(), StepReportStruct()
        self.one = OneStepStruct(*map(pointer, (self.layer, self.step, self.report)))
        self._keeps: object = heads
        self._tail: Tail | None = None

    def take(self, one: PagedDecode, group: int, heads: int, near: ctypes.Array[KVStruct]) -> None:
        """Tells of the next step; heads: address of the descriptors of what it searches."""
        self.layer.num_queries = group
        self.layer.whole, self.layer.num_whole = near, len(near)
        self._search.head = heads
        self._search.width = self.layer.cold.width = one.searched.top_k
        if one.tail is not self._tail:
            self._tell(one.tail)
        if one.tail is not None:
            self._extent.tail.entries = one.searched.num_tokens

    def _tell(self, tail: Tail | None) -> None:
        struct, self._tail = self._extent.tail, tail
        if tail is None:
            struct.keys = None
            return
        struct.clusters = tail.clusters
        dim = tail.keys.shape[-1]
        for name, size in sizes_of_moments(self._num_heads, tail.clusters, dim).items():
            tensor: Tensor = getattr(tail, name)
            if tensor.shape != size or tensor.dtype != torch.float32 or not tensor.is_contiguous():
                raise ShapeError(
                    f"moments '{name}' must be {list(size)} float32, contiguous, got "
                    f"{list(tensor.shape)} {tensor.dtype}"
                )
            setattr(struct, name, tensor.data_ptr())
