"""Experts of a mixture, whose weights stay packed in GGUF blocks.

See `native/include/hybrid_kv_experts.h`.
"""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.bindings import ExpertMatrixStruct, ExpertsStruct
from hybrid_kv.ops.native.library import Pool, find_engine
from hybrid_kv.ops.native.linear import PackedWeight, check_inputs
from hybrid_kv.ops.native.rows import DTYPES, pool_handle


def packed_experts(
    x: Tensor,
    weight: PackedWeight,
    num_experts: int,
    experts: Tensor,
    ends: Tensor,
    *,
    exact: bool = False,
    pool: Pool | None = None,
    engine: ctypes.CDLL | None = None,
) -> Tensor:
    """Products of groups of tokens, each with the matrix of its expert: x[group] weight[expert]^T.

    Args:
        x: [S, K], the tokens of one group behind those of another. dtypes, exact, pool: as of
            `packed_linear`.
        weight: matrices of all experts, one behind the other, [num_experts * N, K].
        experts: [groups] of int64, each group's.
        ends: [groups] of int64, behind which token each group ends, ascending to S.

    Returns:
        [S, N] in the dtype of x.

    Raises:
        ShapeError: they do not fit together.
        ConfigError: another dtype or device, or numbers of experts that there are not.
        BackendUnavailable: there is no engine.
    """
    if x.dim() != 2 or x.shape[1] != weight.columns or weight.rows % max(1, num_experts):
        raise ShapeError(
            f"x must be [S, {weight.columns}] and rows a multiple of {num_experts} experts, got "
            f"{list(x.shape)} and {weight.rows}"
        )
    numbers = (experts, ends)
    if experts.shape != ends.shape or any(
        one.dim() != 1 or one.dtype != torch.int64 or not one.is_cpu for one in numbers
    ):
        raise ShapeError(
            f"experts and ends must be [groups] of int64 on the host, got {experts.dtype} "
            f"{list(experts.shape)} and {ends.dtype} {list(ends.shape)}"
        )
    if (int(ends[-1]) if len(ends) else 0) != len(x):
        raise ShapeError(f"the last of ends must be the {len(x)} tokens of x, got {ends.tolist()}")
    check_inputs(x)
    found = find_engine(engine)
    x, experts, ends = x.contiguous(), experts.contiguous(), ends.contiguous()
    rows = weight.rows // max(1, num_experts)
    out = x.new_empty((len(x), rows))
    number, _, num_inputs, stride = weight.sizes
    status = found.hkv_packed_experts(
        *(pool_handle(pool), number, num_experts, rows, num_inputs),
        *(weight.blocks.data_ptr(), stride, DTYPES[x.dtype], len(ends)),
        *(experts.data_ptr(), ends.data_ptr(), x.data_ptr(), exact, out.data_ptr()),
    )
    library.check(found, status)
    return out


class ExpertMatrix(NamedTuple):
    """One matrix of each expert.

    weight: all their rows, one expert's behind another's. rows: which of an expert's rows these
    are. bias: [E, rows] in the dtype of the inputs, in any strides, or None.
    """

    weight: PackedWeight
    rows: range
    bias: Tensor | None = None


class ExpertWeights(NamedTuple):
    """Gated feed-forwards of E experts: gate and up [I, H], down [H, I].

    activation: SILU, GELU_TANH or CLAMPED_SILU of `bindings`, the last one with alpha and limit.
    exact: as of `packed_linear`.
    """

    num_experts: int
    gate: ExpertMatrix
    up: ExpertMatrix
    down: ExpertMatrix
    activation: int
    exact: bool
    alpha: float = 0.0
    limit: float = 0.0


class BoundMixture:
    """The sums of tokens' feed-forwards, in one call for a few of them."""

    def __init__(self, weights: ExpertWeights, *, engine: ctypes.CDLL | None = None) -> None:
        self._engine = find_engine(engine)
        self._weights = weights  # whose memory is read
        self._hidden, inner = weights.gate.weight.columns, len(weights.gate.rows)
        told = weights.activation, weights.exact, weights.alpha, weights.limit
        matrices = [
            _matrix(one, weights.num_experts) for one in (weights.gate, weights.up, weights.down)
        ]
        sizes = weights.num_experts, self._hidden, inner
        # By dtype, of which the model's may change.
        self._structs = {
            dtype: ExpertsStruct(number, *told, *sizes, *matrices)
            for dtype, number in DTYPES.items()
            if all(one.bias is None or one.bias.dtype == dtype for one in weights[1:4])
        }

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether inputs may have a dtype: where there are biases, only theirs."""
        return dtype in self._structs

    def sums(self, x: Tensor, experts: Tensor, shares: Tensor, pool: Pool | None) -> Tensor:
        """The sum over each token's experts, [T, H] in the dtype of x.

        Args:
            x: [T, H] in float32, bfloat16 or float16, at most `MAX_TOKENS`.
            experts: [T, k] of an integer dtype, each token's. shares: [T, k] of any floating dtype.

        Raises:
            ShapeError: they do not fit together.
            ConfigError: another dtype or device, or numbers of experts that there are not.
        """
        fits = experts.dim() == 2 and experts.shape == shares.shape
        if not fits or x.shape != (len(experts), self._hidden):
            raise ShapeError(
                f"x must be [T, {self._hidden}], experts and shares [T, k], got {list(x.shape)}, "
                f"{list(experts.shape)} and {list(shares.shape)}"
            )
        check_inputs(x, shares)
        if not self.takes(x.dtype):
            raise ConfigError(f"x must be of the dtype of the biases, got {x.dtype}")
        x, experts = x.contiguous(), experts.long().contiguous()
        shares = shares.float().contiguous()
        out = torch.empty_like(x)
        status = self._engine.hkv_mixture(
            *(pool_handle(pool), byref(self._structs[x.dtype]), *experts.shape),
            *(experts.data_ptr(), shares.data_ptr(), x.data_ptr(), out.data_ptr()),
        )
        library.check(self._engine, status)
        return out


def _matrix(matrix: ExpertMatrix, num_experts: int) -> ExpertMatrixStruct:
    weight, rows, bias = matrix
    number, count, _, stride = (size.value for size in weight.sizes)
    address = weight.blocks.data_ptr() + rows.start * stride
    of_expert = count // max(1, num_experts) * stride
    of_bias = (None, 0, 0) if bias is None else (bias.data_ptr(), *reversed(bias.stride()))
    return ExpertMatrixStruct(number, rows.step * stride, of_expert, address, *of_bias)
