"""A linear layer's product with a few tokens; see `native/include/hybrid_kv_linear.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.library import Pool, find_engine
from hybrid_kv.ops.native.rows import DTYPES, pool_handle

MAX_TOKENS = 8
"""More tokens than these, over all rows, are a matter of arithmetic and not of memory."""

PLAIN = (Tensor, nn.Parameter)
"""Classes whose memory is what they say."""


def multiplies(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `linear` takes these: few tokens, all plain tensors in one 16-bit dtype on the host.

    A tensor of a class of its own (a quantised weight) may have other memory than it says, or none.
    """
    return (
        weight.dim() == 2
        and weight.dtype in (torch.bfloat16, torch.float16)
        and x.dtype == weight.dtype
        and x.is_cpu
        and weight.is_cpu
        and all(type(tensor) in PLAIN for tensor in (x, weight, bias) if tensor is not None)
        and 0 < x.numel() <= MAX_TOKENS * x.shape[-1]
        and x.shape[-1] == weight.shape[1]
        and weight.stride(1) == 1
        and (bias is None or (bias.dtype, bias.shape) == (weight.dtype, weight.shape[:1]))
        and (bias is None or bias.stride(0) == 1)
    )


class TensorLayout(NamedTuple):
    """Address, dtype, shape and stride of a tensor; stride in elements."""

    address: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        """Of a tensor on the host."""
        return cls(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


@dataclass(frozen=True, slots=True, eq=False)
class BoundLinear:
    """The engine's product of one weight with inputs of one shape: fixed are all arguments but the
    addresses of inputs and outputs. It holds while the weight and the bias lie where they do.

    multiply: takes these two addresses, of contiguous tensors; returns a status for `check`.
    weight, bias: where and how they lie; None for no bias. out_shape: [..., N].
    """

    multiply: Callable[[int, int], int]
    engine: ctypes.CDLL
    pool: Pool | None
    weight: TensorLayout
    bias: TensorLayout | None
    out_shape: tuple[int, ...]


def bind(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    pool: Pool | None = None,
    engine: ctypes.CDLL | None = None,
) -> BoundLinear:
    """The product of a weight with inputs like `x`; arguments and errors are those of `linear`."""
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
    found = find_engine(engine)
    own, own_bias = TensorLayout.of(weight), None if bias is None else TensorLayout.of(bias)
    num_outputs, num_inputs = weight.shape
    multiply = partial(
        found.hkv_linear,
        # As ctypes' own objects, so that no call converts them again.
        *(pool_handle(pool), c_int32(DTYPES[x.dtype]), c_int64(num_outputs), c_int64(num_inputs)),
        *(c_void_p(own.address), c_int64(weight.stride(0))),
        *(
            c_void_p(None if own_bias is None else own_bias.address),
            c_int64(x.numel() // num_inputs),
        ),
    )
    return BoundLinear(multiply, found, pool, own, own_bias, (*x.shape[:-1], num_outputs))


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
    bound = bind(x, weight, bias, pool=pool, engine=engine)
    x = x.contiguous()
    out = x.new_empty(bound.out_shape)
    library.check(bound.engine, bound.multiply(x.data_ptr(), out.data_ptr()))
    return out
