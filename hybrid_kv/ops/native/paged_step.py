"""Decode steps of one layer over the blocks of a paged KV cache, all sequences in one call.

    sinks, window  ─► slices of blocks, attended whole ─┐
    the rest       ─► search by sketch ─► found rows    ├► one output
                      moments ─────────► the unread    ─┘

Descriptors are made once; a step changes what is new in them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, byref, c_int32, pointer, sizeof
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_kv.errors import NonFiniteError, ShapeError
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.attend import described
from hybrid_kv.ops.native.bindings import (
    SEARCH_SKETCH,
    ColdStruct,
    ExtentStruct,
    KVStruct,
    LayerStruct,
    OneStepStruct,
    ResidentStruct,
    SearchStruct,
    SketchHeadStruct,
    StepReportStruct,
    StepStruct,
)
from hybrid_kv.ops.native.library import Pool, find_engine
from hybrid_kv.ops.native.paged_attention import BlockSlice
from hybrid_kv.ops.native.paged_sketch import PagedSketch, SearchRange
from hybrid_kv.ops.native.rows import DTYPES, pool_handle
from hybrid_kv.ops.tail import Tail, sizes_of_moments
from hybrid_kv.types import PartialAttention


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
