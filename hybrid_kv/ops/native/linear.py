"""A linear layer's product with few tokens: of plain weights, or of weights packed in GGUF blocks.

See `native/include/hybrid_kv_linear.h` and `native/include/hybrid_kv_packed.h`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
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


# Of weights that stay packed in GGUF blocks -------------------------------------------------------


class PackedKind(NamedTuple):
    """A layout of packed weights; values and bytes of one block, number: in the GGUF format."""

    name: str
    values: int
    bytes: int
    number: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` values.

        Raises:
            ShapeError: a row is no whole number of blocks.
        """
        if columns % self.values:
            raise ShapeError(
                f"columns must be a multiple of {self.values} for {self.name}, got {columns}"
            )
        return columns // self.values * self.bytes


PACKED_KINDS: Mapping[str, PackedKind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            PackedKind("Q4_0", 32, 18, 2),
            PackedKind("Q4_1", 32, 20, 3),
            PackedKind("Q5_0", 32, 22, 6),
            PackedKind("Q5_1", 32, 24, 7),
            PackedKind("Q8_0", 32, 34, 8),
            PackedKind("Q4_K", 256, 144, 12),
            PackedKind("Q5_K", 256, 176, 13),
            PackedKind("Q6_K", 256, 210, 14),
            PackedKind("IQ4_NL", 32, 18, 20),
            PackedKind("MXFP4", 32, 17, 39),
        )
    }
)
"""The kinds that the engine multiplies, by GGUF's names."""


INSTRUCTIONS: Mapping[str, str] = MappingProxyType(
    {
        "baseline": "plain C++",
        "avx2": "AVX2",
        "avxvnni": "AVX2 with VNNI",
        "avx512": "AVX-512 with VNNI",
    }
)
"""Instructions of products of packed weights, by the instruction set of the engine's library."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix of weights in blocks.

    rows: N, the outputs of a product. sizes: kind, rows, columns and stride as ctypes' own objects,
    so that no call converts them again.

    Args:
        kind: a key of `PACKED_KINDS`.
        blocks: [N, bytes of a row] of uint8, rows contiguous; it may lie in a mapped file, at any
            alignment.
        columns: K, the values of a row.

    Raises:
        ConfigError: unknown kind, or blocks of another dtype or device.
        ShapeError: blocks are not those of `columns` values.
    """

    kind: str
    blocks: Tensor
    columns: int
    rows: int = field(init=False)
    sizes: tuple[c_int32, c_int64, c_int64, c_int64] = field(init=False)

    def __post_init__(self) -> None:
        if self.kind not in PACKED_KINDS:
            raise ConfigError(
                f"kind must be one of {', '.join(PACKED_KINDS)}, got '{self.kind}'; dequantise "
                "others with package gguf"
            )
        blocks, row_bytes = self.blocks, PACKED_KINDS[self.kind].row_bytes(self.columns)
        if blocks.dtype != torch.uint8 or not blocks.is_cpu:
            raise ConfigError(
                f"blocks must be uint8 on the host, got {blocks.dtype} on {blocks.device}"
            )
        if blocks.dim() != 2 or blocks.shape[1] != row_bytes:
            raise ShapeError(
                f"blocks must be [N, {row_bytes}] for {self.columns} columns of {self.kind}, got "
                f"{list(blocks.shape)}"
            )
        if blocks.numel() and blocks.stride(1) != 1:
            raise ConfigError("blocks must have contiguous rows; call .contiguous()")
        rows, row_stride = blocks.shape[0], blocks.stride(0)
        sizes = c_int64(rows), c_int64(self.columns), c_int64(row_stride)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "sizes", (c_int32(PACKED_KINDS[self.kind].number), *sizes))


def multiplies_packed(kind: str, device: torch.device | str = "cpu") -> bool:
    """Whether `packed_linear` serves weights of a kind for tensors on a device: a kind of
    `PACKED_KINDS`, on a CPU, with the native engine. Others must be dequantised.
    """
    on_cpu = torch.device(device).type == "cpu"
    return on_cpu and kind in PACKED_KINDS and library.engine() is not None


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    exact: bool = False,
    pool: Pool | None = None,
    engine: ctypes.CDLL | None = None,
) -> Tensor:
    """The product x weight^T + bias, for any number of tokens.

    Inputs are rounded to 8 bits by blocks of 32: an error of about half a percent of the outputs'
    root mean square. From 48 tokens on, on a CPU with AMX, inputs and weights are rounded to
    bfloat16 instead, an error of a quarter of a percent. Sums are float32 and rounded once.

    Args:
        x: [..., K] in float32, bfloat16 or float16.
        bias: [N] of any floating dtype.
        exact: adds what the rounding leaves, in another 8 bits: an error of about 3e-5.
        pool: threads that share the rows of weights; None for the calling one.

    Returns:
        [..., N] in the dtype of x.

    Raises:
        ShapeError: they do not fit together.
        ConfigError: another dtype or device.
        BackendUnavailable: there is no engine.
    """
    if x.shape[-1:] != (weight.columns,):
        raise ShapeError(f"x must be [..., {weight.columns}], got {list(x.shape)}")
    if bias is not None and bias.shape != (weight.rows,):
        raise ShapeError(f"bias must be [{weight.rows}], got {list(bias.shape)}")
    check_inputs(x, bias)
    found = find_engine(engine)
    x = x.contiguous()
    wide_bias = None if bias is None else bias.float().contiguous()
    before = x.shape[:-1]
    out = x.new_empty((*before, weight.rows))
    number, num_outputs, num_inputs, stride = weight.sizes
    status = found.hkv_packed_linear(
        *(pool_handle(pool), number, num_outputs, num_inputs, weight.blocks.data_ptr(), stride),
        *(None if wide_bias is None else wide_bias.data_ptr(), DTYPES[x.dtype]),
        *(math.prod(before), x.data_ptr(), exact, out.data_ptr()),
    )
    library.check(found, status)
    return out


def check_inputs(x: Tensor, bias: Tensor | None = None) -> None:
    """Raises ConfigError unless a product of packed weights takes these."""
    if x.dtype not in DTYPES or not x.is_cpu or (bias is not None and not bias.is_cpu):
        raise ConfigError(
            "x must be float32, float16 or bfloat16 on the host, and so must be a bias, got "
            f"{x.dtype} on {x.device}"
        )
