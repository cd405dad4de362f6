"""A linear layer's product with a few tokens; see `native/include/hybrid_kv_linear.h`."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.rows import DTYPES, find_engine, pool_handle
from hybrid_kv.ops.native.workers import Pool

MAX_TOKENS = 8
"""More tokens than these, over all rows, are a matter of arithmetic and not of memory."""


@cache
def _declared(engine: ctypes.CDLL) -> ctypes.CDLL:
    weight = (c_void_p, c_int32, c_int64, c_int64, c_void_p, c_int64, c_void_p)
    library.declare(engine, "hkv_linear", *weight, c_int64, c_void_p, c_void_p)
    return engine


def multiplies(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `linear` takes these: few tokens, all in one 16-bit dtype on the host."""
    return (
        weight.dtype in (torch.bfloat16, torch.float16)
        and x.dtype == weight.dtype
        and x.is_cpu
        and weight.is_cpu
        and 0 < x.numel() <= MAX_TOKENS * x.shape[-1]
        and x.shape[-1] == weight.shape[1]
        and weight.stride(1) == 1
        and (bias is None or (bias.dtype == weight.dtype and bias.stride(0) == 1))
    )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    pool: Pool | None = None,
    engine: ctypes.CDLL | None = None,
) -> Tensor:
    """The product x weight^T + bias, with sums in float32 that are rounded once.

    Args:
        x: [..., K], at most `MAX_TOKENS` vectors.
        weight: [N, K] of the same 16-bit dtype, rows contiguous.
        bias: [N] of that dtype.
        pool: threads that share the rows of weights; None for the calling one.

    Returns:
        [..., N] of that dtype.

    Raises:
        ShapeError: they do not fit together.
        ConfigError: more tokens, another dtype or another device.
        BackendUnavailable: there is no engine.
    """
    if weight.dim() != 2 or x.shape[-1:] != weight.shape[1:]:
        raise ShapeError(
            f"x must be [..., K] and weight [N, K], got {list(x.shape)} and {list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bias must be [{len(weight)}], got {list(bias.shape)}")
    if not multiplies(x, weight, bias):
        raise ConfigError(
            f"x, weight and bias must be float16 or bfloat16 on the host, in rows, with 1 to "
            f"{MAX_TOKENS} tokens, got {x.dtype} {list(x.shape)} on {x.device} and {weight.dtype} "
            f"on {weight.device}; use torch.nn.functional.linear"
        )
    library_ = _declared(find_engine(engine))
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], len(weight))
    status = library_.hkv_linear(
        pool_handle(pool),
        DTYPES[x.dtype],
        *weight.shape,
        *(weight.data_ptr(), weight.stride(0), None if bias is None else bias.data_ptr()),
        *(x.numel() // x.shape[-1], x.data_ptr(), out.data_ptr()),
    )
    library.check(library_, status)
    return out
