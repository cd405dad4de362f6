"""The engine's attention over all entries of some blocks of a paged KV cache, where they lie."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.attend import described
from hybrid_kv.ops.native.library import Pool, find_engine
from hybrid_kv.ops.native.rows import DTYPES, pool_handle
from hybrid_kv.types import PartialAttention


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
