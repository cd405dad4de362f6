"""A decoder layer around its attention, for a few tokens: two calls of the engine.

See `native/include/hybrid_kv_decoder.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref
from itertools import accumulate, pairwise, starmap
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.bindings import NORM, SILU, DecoderStruct, MatrixStruct, NormStruct
from hybrid_kv.ops.native.library import Pool, find_engine
from hybrid_kv.ops.native.linear import PackedWeight
from hybrid_kv.ops.native.rows import DTYPES, pool_handle

_NONE = 0, None, None
"""No channels are rotated."""


class Norm(NamedTuple):
    """The root mean square norm of vectors; weight: [size]. form: NORM, NORM_ONCE or NORM_CENTRED
    of `bindings`, the last with a weight that is stored less 1.
    """

    weight: Tensor
    epsilon: float
    form: int = NORM


class Matrix(NamedTuple):
    """A linear layer.

    weight: packed, or [N, K] in the 16-bit dtype of hidden states, rows contiguous. bias: [N] in
    the dtype of hidden states, or None. exact: see `packed_linear`.
    """

    weight: PackedWeight | Tensor
    bias: Tensor | None = None
    exact: bool = False

    def parts(self, shares: Sequence[int]) -> list[Matrix]:
        """Layers that lie one after the other in this one, by their shares of its outputs."""
        if len(shares) == 1:
            return [self]
        weight, bias, exact = self
        rows = weight if isinstance(weight, Tensor) else weight.blocks
        ends = [len(rows) * one // sum(shares) for one in accumulate(shares)]
        found = []
        for own in starmap(slice, pairwise([0, *ends])):
            part: PackedWeight | Tensor = rows[own]
            if isinstance(weight, PackedWeight):
                part = PackedWeight(weight.kind, rows[own], weight.columns)
            found.append(Matrix(part, None if bias is None else bias[own], exact))
        return found


class DecoderWeights(NamedTuple):
    """Weights of a decoder layer: hidden states pass a norm, attention, a norm and a gated
    feed-forward, or up to that norm where the feed-forward is none of these.

    of_queries, of_keys: norms of each head, or None. after_attention, after_feed_forward: norms of
    what is added to the hidden states, or None. activation: SILU or GELU_TANH of `bindings`.
    residual_scale: what is added is multiplied by it; not 0.
    """

    before_attention: Norm
    query: Matrix
    key: Matrix
    value: Matrix
    of_queries: Norm | None
    of_keys: Norm | None
    output: Matrix
    before_feed_forward: Norm | None = None
    gate: Matrix | None = None
    up: Matrix | None = None
    down: Matrix | None = None
    after_attention: Norm | None = None
    after_feed_forward: Norm | None = None
    activation: int = SILU
    residual_scale: float = 1.0


class AttentionInputs(NamedTuple):
    """Queries, keys and values [T, heads, D] of some tokens; queries and keys are rotated."""

    queries: Tensor
    keys: Tensor
    values: Tensor


class BoundDecoder:
    """The two calls for one layer. It does not hold the weights, which must stay where they are.

    has_feed_forward: whether the second one computes it.

    Args:
        weights: on the host, norms and biases in the dtype of hidden states: float32, bfloat16 or
            float16.
        head_dim: D of queries, keys and values.
        partial: rotations may be of the first channels of a head alone.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        head_dim: int,
        *,
        partial: bool = False,
        engine: ctypes.CDLL | None = None,
    ) -> None:
        self._engine, self._partial = find_engine(engine), partial
        self._dtype, self._head_dim = weights.before_attention.weight.dtype, head_dim
        parts = {
            name: _matrix(one) if isinstance(one, Matrix) else _norm(one)
            for name, one in weights._asdict().items()
            if name not in ("activation", "residual_scale")
            and not (one is None and name in ("gate", "up", "down"))
        }
        self.has_feed_forward = weights.gate is not None
        layer = DecoderStruct(
            dtype=DTYPES[self._dtype],
            head_dim=head_dim,
            activation=weights.activation,
            residual_scale=weights.residual_scale,
            **parts,
        )
        self._layer, self._address = layer, byref(layer)
        self._heads = [one.num_outputs // head_dim for one in (layer.query, layer.key, layer.value)]
        self._hidden: int = layer.query.num_inputs

    def takes(self, hidden: Tensor, rotation: Sequence[Tensor] | None) -> bool:
        """Whether hidden states [B, T, hidden] fit, and cosines and sines [B or 1, T, R], R at most
        D and even, or none.
        """
        if rotation is None or hidden.ndim != 3 or hidden.shape[2] != self._hidden:
            return False
        rows, tokens, _ = hidden.shape
        channels = self._head_dim
        if self._partial and rotation:
            channels = min(channels, rotation[0].shape[-1] // 2 * 2)
        return (
            len(rotation) in (0, 2)
            and all(
                part.ndim == 3 and part.shape[1:] == (tokens, channels) and len(part) in (1, rows)
                for part in rotation
            )
            and all(
                part.__class__ is Tensor and part.dtype is self._dtype and part.is_cpu
                for part in (hidden, *rotation)
            )
        )

    def inputs(
        self, hidden: Tensor, rotation: Sequence[Tensor], pool: Pool | None
    ) -> AttentionInputs:
        """Queries, keys and values of hidden states [B, T, hidden], B T at most `MAX_TOKENS`.

        Args:
            rotation: cosines and sines, each [B or 1, T, R]; of no channels, if there are none.
        """
        rows, tokens = hidden.shape[:2]
        hidden = hidden.contiguous()
        angles = [
            (part if len(part) == rows else part.expand(rows, -1, -1)).contiguous()
            for part in rotation
        ]
        turned = (angles[0].shape[-1], *(part.data_ptr() for part in angles)) if angles else _NONE
        count = rows * tokens
        new = AttentionInputs(
            *(hidden.new_empty((count, heads, self._head_dim)) for heads in self._heads)
        )
        status = self._engine.hkv_decoder_inputs(
            *(pool_handle(pool), self._address, count, hidden.data_ptr()),
            *turned,
            *(new.queries.data_ptr(), new.keys.data_ptr(), new.values.data_ptr()),
        )
        library.check(self._engine, status)
        return new

    def outputs(self, hidden: Tensor, attended: Tensor, pool: Pool | None) -> Tensor:
        """The layer's output [B, T, hidden] of its hidden states, before the second norm where it
        has no feed-forward; attended: [B, T, Hq, D].
        """
        hidden, attended = hidden.contiguous(), attended.contiguous()
        out = torch.empty_like(hidden)
        status = self._engine.hkv_decoder_outputs(
            *(pool_handle(pool), self._address, hidden.shape[0] * hidden.shape[1]),
            *(hidden.data_ptr(), attended.data_ptr(), out.data_ptr()),
        )
        library.check(self._engine, status)
        return out


def _norm(norm: Norm | None) -> NormStruct:
    if norm is None:
        return NormStruct()
    return NormStruct(norm.weight.data_ptr(), norm.epsilon, norm.form)


def _matrix(matrix: Matrix) -> MatrixStruct:
    weight, bias, exact = matrix
    if isinstance(weight, PackedWeight):
        number, *sizes = (size.value for size in weight.sizes)
        address = weight.blocks.data_ptr()
    else:
        number, sizes, address = 0, [*weight.shape, weight.stride(0)], weight.data_ptr()
    of_bias = None if bias is None else bias.data_ptr()
    return MatrixStruct(number, exact, *sizes, address, of_bias)
