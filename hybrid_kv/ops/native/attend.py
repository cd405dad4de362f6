"""The engine's partial attention over retrieved ids: reads keys and values where they lie."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.pool import Pool
from hybrid_kv.ops.native.rows import KeysStruct, describe, find_engine, pool_handle
from hybrid_kv.types import PartialAttention


class AttendHeadStruct(Structure):
    """`hkv_attend_head`: keys and values of one head."""

    _fields_ = (("keys", KeysStruct), ("values", KeysStruct))


@cache
def _declared(engine: ctypes.CDLL) -> ctypes.CDLL:
    library.declare(
        engine,
        "hkv_attend",
        *(c_void_p, c_int32, POINTER(AttendHeadStruct), c_void_p, c_int64, c_void_p, c_int64),
        *(c_float, c_float, c_void_p, c_void_p),
    )
    return engine


class RetrievedAttention:
    """Keys and values that are attended by id, described once.

    Args:
        keys: [H, N, D], values: [H, N, Dv], of one dtype, rows contiguous; kept by reference.

    Raises:
        ShapeError, ConfigError: they cannot be read or do not fit together.
        BackendUnavailable: there is no engine.
    """

    def __init__(self, keys: Tensor, values: Tensor, *, engine: ctypes.CDLL | None = None) -> None:
        self._engine = _declared(find_engine(engine))
        described = zip(describe("keys", keys), describe("values", values), strict=False)
        if keys.shape[:2] != values.shape[:2] or keys.dtype != values.dtype:
            raise ShapeError(
                f"values must be [{keys.shape[0]}, {keys.shape[1]}, Dv] {keys.dtype} as the keys, "
                f"got {list(values.shape)} {values.dtype}"
            )
        self.keys, self.values = keys, values
        self._structs = (AttendHeadStruct * len(keys))(
            *(AttendHeadStruct(*pair) for pair in described)
        )

    def attend(
        self,
        queries: Tensor,
        ids: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        pool: Pool | None = None,
    ) -> PartialAttention:
        """Every query over entries of its own.

        Args:
            queries: [H, M, D] float32.
            ids: [H, M, K] int64 rows, negative for none; K may be 0.
            softcap: logits become `softcap * tanh(logit / softcap)`.

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
        if queries.dtype != torch.float32 or ids.dtype != torch.int64:
            raise ConfigError(
                f"queries must be float32 and ids int64, got {queries.dtype} and {ids.dtype}"
            )
        queries, ids = queries.contiguous(), ids.contiguous()
        out = torch.empty(*queries.shape[:2], self.values.shape[2])
        lse = torch.empty(queries.shape[:2])
        status = self._engine.hkv_attend(
            pool_handle(pool),
            heads,
            self._structs,
            queries.data_ptr(),
            queries.shape[1],
            ids.data_ptr(),
            ids.shape[2],
            scale,
            softcap or 0.0,
            *(out.data_ptr(), lse.data_ptr()),
        )
        library.check(self._engine, status)
        return PartialAttention(out, lse)
