"""The engine's partial attention and the merge of parts: reads keys and values where they lie."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, byref, c_int64
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.bindings import (
    KeysStruct,
    KVStruct,
    PartStruct,
    VisibleStruct,
)
from hybrid_kv.ops.native.library import Pool, find_engine
from hybrid_kv.ops.native.rows import DTYPES, described
from hybrid_kv.types import PartialAttention

FEW_QUERIES = 64
"""Queries of a KV head for which there is no other kernel of the engine than `attend_rows`."""
ROW_QUERIES = 16
"""Queries of a KV head up to which `attend_rows`, which then reads each key once, beats tiles: with
36 tiles take .6 to .7 of its time (Xeon, 8K and 32K keys, bfloat16 and float32, AVX-512 and AVX2).
"""


class Visible(NamedTuple):
    """Limits of visibility: a query sees entries at its own position and before.

    positions: [B, N] int64 of the entries. newest: [B] position of each row's newest token. new:
    T; query m is that of token m % T.
    """

    positions: Tensor
    newest: Sequence[int]
    new: int


def serves_merge(parts: Sequence[PartialAttention], dtype: torch.dtype) -> bool:
    """Whether the engine is there and merges parts of these dtypes."""
    for out, lse in parts:
        if not (out.is_cpu and out.dtype in DTYPES and lse.dtype == torch.float32):
            return False
    return dtype in DTYPES and library.engine() is not None


def folded(kv: KVStruct) -> tuple[KeysStruct, KeysStruct]:
    """The structures of keys and of values that an `hkv_kv` is made of."""
    own = KVStruct.values_data.offset
    return KeysStruct.from_buffer_copy(kv), KeysStruct.from_buffer_copy(kv, own)


class RetrievedAttention:
    """Keys and values that are attended by id, described once.

    Args:
        keys: [H, N, D], values: [H, N, Dv], of one dtype, rows contiguous; kept by reference.

    Raises:
        ShapeError, ConfigError: they cannot be read or do not fit together.
        BackendUnavailable: there is no engine.
    """

    def __init__(self, keys: Tensor, values: Tensor, *, engine: ctypes.CDLL | None = None) -> None:
        self._engine = find_engine(engine)
        if keys.dim() != 3:
            raise ShapeError(f"keys must be [H, N, D], got shape {list(keys.shape)}")
        self._kv = described(keys, values)
        self.keys, self.values = keys, values

    def attend(
        self,
        queries: Tensor,
        ids: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        bias: Tensor | None = None,
        pool: Pool | None = None,
    ) -> PartialAttention:
        """Every query over entries of its own.

        Args:
            queries: [H, M, D] of a dtype of DTYPES.
            ids: [H, M, K] int64 rows, negative for none; K may be 0.
            softcap: logits become `softcap * tanh(logit / softcap)` before the bias.
            bias: [H, M, K] float32, added to the logits.

        Returns:
            out [H, M, Dv] float32, lse [H, M] float32.

        Raises:
            ShapeError, ConfigError: an argument does not fit or an id does not exist.
        """
        heads, _, dim = self.keys.shape
        if queries.dim() != 3 or (queries.shape[0], queries.shape[2]) != (heads, dim):
            raise ShapeError(
                f"queries must be [{heads}, M, {dim}] as the keys, got shape {list(queries.shape)}"
            )
        if ids.dim() != 3 or ids.shape[:2] != queries.shape[:2]:
            raise ShapeError(
                f"ids must be [{heads}, {queries.shape[1]}, K] as the queries, got shape "
                f"{list(ids.shape)}"
            )
        if queries.dtype not in DTYPES or ids.dtype != torch.int64:
            raise ConfigError(
                f"queries must be float32, float16 or bfloat16 and ids int64, got {queries.dtype} "
                f"and {ids.dtype}"
            )
        if bias is not None:
            bias = checked_bias(bias, ids.shape).contiguous()
        queries, ids = queries.contiguous(), ids.contiguous()
        out = torch.empty((heads, queries.shape[1], self.values.shape[2]))
        lse = torch.empty((heads, queries.shape[1]))
        status = self._engine.hkv_attend(
            None if pool is None else pool.handle,
            heads,
            byref(self._kv),
            *(queries.data_ptr(), DTYPES[queries.dtype]),
            queries.shape[1],
            ids.data_ptr(),
            ids.shape[2],
            None if bias is None else bias.data_ptr(),
            scale,
            softcap or 0.0,
            *(out.data_ptr(), lse.data_ptr()),
        )
        if status:
            library.check(self._engine, status)
        return PartialAttention(out, lse)


def attend_retrieved(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    ids: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    pool: Pool | None = None,
) -> PartialAttention:
    """See `RetrievedAttention.attend`."""
    attention = RetrievedAttention(keys, values)
    return attention.attend(queries, ids, scale=scale, softcap=softcap, bias=bias, pool=pool)


def attend_rows(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    visible: Visible | None = None,
    pool: Pool | None = None,
    engine: ctypes.CDLL | None = None,
) -> PartialAttention:
    """Every query over every entry of its KV head, or those that it sees; for few queries.

    Args:
        queries: [B, H, M, D] of a dtype of DTYPES.
        keys: [B, H, N, D], values: [B, H, N, Dv], of one dtype, rows contiguous.
        visible: None where every query sees every entry.

    Returns:
        out [B, H, M, Dv] float32, lse [B, H, M] float32.

    Raises:
        ShapeError, ConfigError: an argument does not fit.
        BackendUnavailable: there is no engine.
    """
    engine = find_engine(engine)
    batch, heads, count, dim = keys.shape
    if queries.dim() != 4 or (*queries.shape[:2], queries.shape[3]) != (batch, heads, dim):
        raise ShapeError(
            f"queries must be [{batch}, {heads}, M, {dim}] as the keys, got shape "
            f"{list(queries.shape)}"
        )
    if queries.dtype not in DTYPES:
        raise ConfigError(f"queries must be float32, float16 or bfloat16, got {queries.dtype}")
    hidden = None if visible is None else _visible(visible, batch, count)
    queries = queries.contiguous()
    num_queries = queries.shape[2]
    out = torch.empty((batch, heads, num_queries, values.shape[3]))
    lse = torch.empty((batch, heads, num_queries))
    status = engine.hkv_attend_rows(
        *(None if pool is None else pool.handle, batch, heads, byref(described(keys, values))),
        *(queries.data_ptr(), DTYPES[queries.dtype], num_queries),
        *(None if hidden is None else byref(hidden), scale, softcap or 0.0),
        *(out.data_ptr(), lse.data_ptr()),
    )
    if status:
        library.check(engine, status)
    return PartialAttention(out, lse)


def checked_bias(bias: Tensor, size: Sequence[int]) -> Tensor:
    """The log weights, where they fit; ShapeError where they do not."""
    if bias.shape != torch.Size(size) or bias.dtype != torch.float32 or not bias.is_cpu:
        raise ShapeError(
            f"bias must be {list(size)} torch.float32 on the host, got {list(bias.shape)} "
            f"{bias.dtype} on {bias.device}"
        )
    return bias


def _visible(visible: Visible, batch: int, count: int) -> VisibleStruct:
    positions, newest, new = visible
    if positions.shape != (batch, count) or len(newest) != batch:
        raise ShapeError(
            f"positions must be [{batch}, {count}] and newest [{batch}] as the keys, got "
            f"{list(positions.shape)} and [{len(newest)}]"
        )
    if positions.dtype != torch.int64 or (count > 1 and positions.stride(1) != 1):
        raise ConfigError(
            f"positions must be int64 in contiguous rows, got {positions.dtype} with strides "
            f"{list(positions.stride())}"
        )
    array = (c_int64 * batch)(*newest)
    struct = VisibleStruct(positions.data_ptr(), positions.stride(0), addressof(array), new)
    struct.array = array  # lives as long
    return struct


def merge(
    parts: Sequence[PartialAttention],
    dtype: torch.dtype,
    *,
    pool: Pool | None = None,
    engine: ctypes.CDLL | None = None,
) -> PartialAttention:
    """See `reference.merge`; out of dtypes of DTYPES, lse float32.

    Raises:
        ConfigError: another dtype.
        BackendUnavailable: there is no engine.
    """
    engine = find_engine(engine)
    structs, kept = (PartStruct * len(parts))(), []
    for struct, part in zip(structs, parts, strict=True):
        out, lse = part.out.contiguous(), part.lse.contiguous()
        kept.append((out, lse))
        if not (out.dtype in DTYPES and lse.dtype == torch.float32 and dtype in DTYPES):
            raise ConfigError(
                f"out must be float32, float16 or bfloat16 and lse float32, got {out.dtype} and "
                f"{lse.dtype} to be merged to {dtype}"
            )
        struct.out, struct.lse = out.data_ptr(), lse.data_ptr()
        struct.dtype = DTYPES[out.dtype]
    out, lse = torch.empty_like(kept[0][0], dtype=dtype), torch.empty_like(kept[0][1])
    status = engine.hkv_merge(
        *(
            None if pool is None else pool.handle,
            len(parts),
            structs,
            lse.numel(),
            out.shape[-1],
            DTYPES[dtype],
        ),
        *(out.data_ptr(), lse.data_ptr()),
    )
    if status:
        library.check(engine, status)
    return PartialAttention(out, lse)
