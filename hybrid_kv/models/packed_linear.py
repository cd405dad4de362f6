"""Linear layers and embeddings whose weights stay packed in blocks, as a GGUF file holds them.

A weight is a parameter of bytes, [rows, bytes of a row], in a mapped file or in memory. The engine
multiplies straight from it. Unpacked are the rows of an embedding that are asked for, and a few
rows of a weight at a time for prompts, where products in float32 are faster than the engine's.

Plain weights are packed into blocks of 32 values in the layouts of GGUF. Each value is rounded to
the nearest that its block can hold: in Q8_0 a 16-bit scale and 32 whole numbers of 8 bits, in Q4_1
a 16-bit step, the least value and 32 whole numbers of 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from importlib.util import find_spec
from time import perf_counter
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from hybrid_kv.errors import ConfigError
from hybrid_kv.models import gguf_file
from hybrid_kv.models.prompt_layers import MIN_TOKENS, WideningTrial, compared, tokens_tried
from hybrid_kv.ops.native.library import Pool, pool_here, trials
from hybrid_kv.ops.native.linear import PACKED_KINDS, PackedWeight, packed_linear

_VALUES = 32
_PIECE = 2**20
"""Values that are packed at a time, so that what is between lies in caches."""


def packed(weight: Tensor, kind: str) -> Tensor:
    """Blocks of a matrix, uint8 [N, bytes of a row].

    Args:
        weight: [N, K] of any floating dtype in host memory, K a multiple of 32.
        kind: a key of `PACKERS`.
    """
    rows, columns = weight.shape
    blocks = torch.empty(rows, PACKED_KINDS[kind].row_bytes(columns), dtype=torch.uint8)
    size = max(1, _PIECE // columns)
    for start in range(0, rows, size):
        piece = weight[start : start + size].float()
        made = PACKERS[kind](piece.reshape(-1, _VALUES))
        blocks[start : start + size] = made.view(len(piece), -1)
    return blocks


def unpacked(rows: Tensor, kind: str) -> Tensor:
    """Values [..., K] in float32 of packed rows [..., bytes of a row].

    Raises:
        ModelNotFoundError: nothing here unpacks this kind.
    """
    if kind != "Q8_0":
        return gguf_file.unpacked(rows, kind)
    blocks = rows.reshape(-1, PACKED_KINDS[kind].bytes)
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    return (blocks[:, 2:].view(torch.int8) * scale).view(*rows.shape[:-1], -1)


def _q8_0(values: Tensor) -> Tensor:
    scale = (values.abs().amax(1, keepdim=True) / 127).half()
    return torch.cat([_bytes(scale), _rounded(values, scale, -127, 127).view(torch.uint8)], dim=1)


def _q4_1(values: Tensor) -> Tensor:
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    step, low = ((high - low) / 15).half(), low.half()
    numbers = _rounded(values - low.float(), step, 0, 15).view(torch.uint8)
    half = _VALUES // 2
    return torch.cat([_bytes(step), _bytes(low), numbers[:, :half] | numbers[:, half:] << 4], dim=1)


def _rounded(values: Tensor, step: Tensor, least: int, most: int) -> Tensor:
    """The whole number of steps nearest to each value, int8; 0 where a step is too small for 16
    bits.
    """
    wide = step.float()
    inverse = torch.where(wide > 0, 1 / wide, 0.0)
    return values.mul(inverse).round_().clamp_(least, most).to(torch.int8)


def _bytes(halves: Tensor) -> Tensor:
    return halves.view(torch.uint8)


PACKERS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({"Q4_1": _q4_1, "Q8_0": _q8_0})
"""By kind the function that packs values [n, 32] in float32: blocks [n, bytes of a block]."""


# Products ----------------------------------------------------------------------------------------


def product(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    exact: bool = False,
    pool: Pool | None = None,
) -> Tensor:
    """As `packed_linear`; with `MIN_TOKENS` tokens and more in float32 where a trial says so, which
    rounds no inputs.
    """
    num_tokens = x.numel() // max(1, weight.columns)
    fits = x.shape[-1] == weight.columns and (bias is None or bias.shape == (weight.rows,))
    may = fits and x.is_cpu  # else it is refused
    if may and is_wide_faster(weight.kind, num_tokens, exact=exact):
        return wide_product(x, weight, bias)
    return packed_linear(x, weight, bias, exact=exact, pool=pool)


def is_wide_faster(kind: str, num_tokens: int, *, exact: bool) -> bool:
    """Whether `wide_product` takes less time for that many tokens of one matrix, by a trial."""
    if num_tokens < MIN_TOKENS or torch.is_autocast_enabled("cpu"):
        return False  # under autocast float32 would be 16 bits
    return trial(kind, num_tokens, exact=exact).pays


def wide_product(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """The product x weight^T + bias in float32, [..., N] in the dtype of x; few rows of the weight
    are unpacked at a time.

    Args:
        x: [..., K]. bias: [N].
    """
    wide = x.reshape(-1, weight.columns).float()
    out = x.new_empty((len(wide), weight.rows))
    size = max(1, _PIECE // weight.columns)
    for start in range(0, weight.rows, size):
        rows = slice(start, start + size)
        added = None if bias is None else bias[rows].float()
        piece = unpacked(weight.blocks[rows].detach(), weight.kind)
        out[:, rows] = functional.linear(wide, piece, added)
    return out.view(*x.shape[:-1], weight.rows)


_OUTPUTS, _INPUTS = 1024, 512
"""Of the matrix of a trial, which is half a piece."""

_trials: dict[Hashable, WideningTrial] = {}


def trial(kind: str, num_tokens: int, *, exact: bool) -> WideningTrial:
    """Rates of both ways for a number of tokens, measured once for each kind, exactness, power of
    two and number of threads of a process, in some 10 to 200 ms.
    """
    tokens = tokens_tried(num_tokens)
    key = kind, exact, tokens, torch.get_num_threads()
    found = _trials.get(key)
    if found is None:
        if kind != "Q8_0" and find_spec("gguf") is None:  # nothing unpacks it
            made = WideningTrial(own_gflops=1.0, widened_gflops=0.0)
        else:
            made = measure(kind, tokens, perf_counter, exact=exact)
        found = _trials[key] = trials.agree(key, made)
    return found


def measure(
    kind: str, num_tokens: int, clock: Callable[[], float], *, exact: bool
) -> WideningTrial:
    """Times the engine's product with weights of a kind, and one in float32."""
    blocks = torch.zeros(_OUTPUTS, PACKED_KINDS[kind].row_bytes(_INPUTS), dtype=torch.uint8)
    weight, x = PackedWeight(kind, blocks, _INPUTS), torch.ones(num_tokens, _INPUTS)
    own = partial(packed_linear, weight=weight, exact=exact, pool=pool_here())
    wide = partial(wide_product, weight=weight)
    for way in (own, wide):
        way(x[:MIN_TOKENS])
    work = num_tokens * _OUTPUTS * _INPUTS
    return compared(partial(own, x), partial(wide, x), work, clock)


# Modules -----------------------------------------------------------------------------------------

WAY_OUT = "load the model unpacked (dequantize=True for what is stored packed, else no weights=)"
"""Of what packed weights cannot."""
_IN_GRAPHS = (
    "products of packed weights cannot be part of a graph; call torch.compile without "
    f"fullgraph=True, or {WAY_OUT}"
)
_PIECE_BYTES = 2**20
"""Of packed rows that are unpacked at a time, where values are asked for."""


class PackedModule(nn.Module):
    """A module with packed weights: its parameters of bytes, without gradients.

    kind: names in PACKED_KINDS, for messages. exact: whether 8 bits of inputs are not all.
    """

    kind: str
    exact = True

    def forward(self, *inputs: Tensor) -> Tensor:
        """Calls `compute`, around which a graph of torch.compile is cut."""
        if is_dynamo_compiling():
            return _computed_apart(self, *inputs)
        return self.compute(*inputs)

    def compute(self, *inputs: Tensor) -> Tensor:
        """The output of the module."""
        raise NotImplementedError

    def check_gradients(self, x: Tensor) -> None:
        """Raises ConfigError where gradients are asked for."""
        if x.requires_grad and torch.is_grad_enabled():
            raise ConfigError(
                f"weights packed in {self.kind} give no gradients; {WAY_OUT} to train, or compute "
                "under torch.no_grad()"
            )

    def _blocks(self) -> Tensor:
        """One of the packed weights; the first parameter is one."""
        first = next(iter(self._parameters.values()))
        assert first is not None
        return first

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Moves and casts what is no packed weight; blocks stay what and where they are.

        Raises:
            ConfigError: they are to go to another device.
        """
        tried = fn(self._blocks().new_empty(0, dtype=torch.uint8))
        if tried.device.type not in ("cpu", "meta") or tried.dtype != torch.uint8:
            raise ConfigError(
                f"weights packed in {self.kind} must stay bytes on the CPU, got {tried.dtype} on "
                f"'{tried.device}'; {WAY_OUT}"
            )
        return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def _save_to_state_dict(self, *args: Any) -> None:
        """Raises ConfigError: no checkpoint holds weights in this form.

        An empty module, whose weight is still to be read, gives its name all the same.
        """
        if self._blocks().is_meta:
            super()._save_to_state_dict(*args)
            return
        raise ConfigError(
            f"a model whose weights are packed in {self.kind} has no state_dict; copy the files "
            f"that it came from, or {WAY_OUT} to save plain weights"
        )


def _computed(module: PackedModule, *inputs: Tensor) -> Tensor:
    return module.compute(*inputs)


_computed_apart: Callable[..., Tensor] = torch.compiler.disable(_computed, reason=_IN_GRAPHS)


class _OneWeight(PackedModule):
    """A module with one packed weight [rows, columns].

    weight: its blocks, uint8 [rows, bytes of a row], without gradients.

    Args:
        kind: a name in PACKED_KINDS.
    """

    def __init__(self, kind: str, blocks: Tensor, columns: int) -> None:
        super().__init__()
        self.kind, self.columns = kind, columns
        self.weight = nn.Parameter(blocks, requires_grad=False)
        self._packed: PackedWeight | None = None

    @property
    def packed(self) -> PackedWeight:
        """The weight as the engine takes it."""
        known, blocks = self._packed, self._parameters["weight"]
        if known is None or known.blocks is not blocks:
            assert blocks is not None
            known = self._packed = PackedWeight(self.kind, blocks, self.columns)
        return known

    def kind_of(self, name: str) -> str:
        """Kind of its blocks."""
        return self.kind

    def shape_of(self, name: str) -> torch.Size:
        """Of its values."""
        return torch.Size((len(self.weight), self.columns))

    def unpacked(self) -> Tensor:
        """All values [rows, columns] in float32, a copy."""
        return unpacked(self.weight.detach(), self.kind)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is made again: copies and pickles hold the blocks once."""
        return {**self.__dict__, "_packed": None}


class PackedLinear(_OneWeight):
    """`nn.Linear` with a packed weight [out_features, in_features].

    Args:
        bias: [out_features], a parameter in the dtype that the model computes in, or None.
        exact: multiply activations in 8 bits and the 8-bit remainder, with errors of 5e-5 in place
            of 1e-2 of a product's root mean square; 8% dearer for one token.
        columns_in: [in_features] of int64: which input each column of the weight is for; None
            where they are in order.
    """

    def __init__(
        self,
        kind: str,
        blocks: Tensor,
        in_features: int,
        bias: nn.Parameter | None = None,
        *,
        exact: bool = False,
        columns_in: Tensor | None = None,
    ) -> None:
        super().__init__(kind, blocks, in_features)
        self.in_features, self.out_features, self.exact = in_features, len(blocks), exact
        self.register_parameter("bias", bias)
        self.register_buffer("columns_in", columns_in, persistent=False)

    def compute(self, x: Tensor) -> Tensor:  # type: ignore[override]  # one input
        """The product of x [..., in_features] with the weight, [..., out_features] in x's dtype.

        Raises:
            ConfigError: gradients are asked for.
        """
        self.check_gradients(x)
        order = self._buffers["columns_in"]
        x = x if order is None else x.index_select(-1, order)
        bias = self._parameters["bias"]
        return product(x, self.packed, bias, exact=self.exact, pool=pool_here())

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, kind={self.kind}, exact={self.exact}"
        )


class PackedEmbedding(_OneWeight):
    """`nn.Embedding` with a packed table: the rows asked for are unpacked.

    Args:
        dtype: of what it gives.
        scale: what every row is multiplied by, in that dtype, as some models have it; None for 1.
    """

    embed_scale: Tensor

    def __init__(
        self,
        kind: str,
        blocks: Tensor,
        embedding_dim: int,
        dtype: torch.dtype,
        *,
        scale: float | None = None,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__(kind, blocks, embedding_dim)
        self.num_embeddings, self.embedding_dim = len(blocks), embedding_dim
        self.padding_idx = padding_idx
        factor = torch.tensor(1.0 if scale is None else scale, dtype=dtype)
        self.register_buffer("embed_scale", factor, persistent=False)  # follows `.to(dtype)`
        self.is_scaled = scale is not None

    @classmethod
    def in_place_of(
        cls, table: nn.Embedding, kind: str, blocks: Tensor, dtype: torch.dtype
    ) -> PackedEmbedding:
        """A module that gives the rows a plain table would; arguments as of the class."""
        scale = getattr(table, "embed_scale", None)
        return cls(
            *(kind, blocks, table.embedding_dim, dtype),
            scale=None if scale is None else float(scale),
            padding_idx=table.padding_idx,
        )

    def compute(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]  # one input
        """Rows [..., embedding_dim] of ids [...]."""
        scale = self.embed_scale
        flat = input_ids.reshape(-1)
        out = torch.empty(len(flat), self.embedding_dim, dtype=scale.dtype)
        size = max(1, _PIECE_BYTES // self.weight.shape[1])
        for start in range(0, len(flat), size):
            rows = self.weight.index_select(0, flat[start : start + size])
            out[start : start + size] = unpacked(rows, self.kind)
        out = out.view(*input_ids.shape, self.embedding_dim)
        return out * scale if self.is_scaled else out

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, kind={self.kind}"


def is_table(module: nn.Module | None) -> TypeGuard[nn.Embedding]:
    """Whether `PackedEmbedding` can stand for an embedding: one as torch has it, or one that a
    model multiplies by one number.
    """
    if type(module) is nn.Embedding:
        return module.max_norm is None
    return isinstance(module, nn.Embedding) and hasattr(module, "embed_scale")
