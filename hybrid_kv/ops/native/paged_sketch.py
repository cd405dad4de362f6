"""The engine's sketches of keys that lie in the blocks of a paged KV cache, one layer of it.

    keys written ──► coded[block] falls to the first slot that was written
    encode       ──► codes[block, head, slot] up to a length, coded[block] rises
    search       ──► places of a sequence by its block table ──► rows of the cache

Codes belong to slots, not to sequences: a block that is used again, shared by a prefix or given up
needs no word from the scheduler.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.host_memory import host_array
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.bindings import KeysStruct, SketchHeadStruct, SketchTierStruct
from hybrid_kv.ops.native.library import Pool, find_engine
from hybrid_kv.ops.native.rows import describe, pool_handle
from hybrid_kv.ops.native.scans import map_struct
from hybrid_kv.ops.sketch_codes import BLOCK_KEYS, LINE_BYTES, SketchMap

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
