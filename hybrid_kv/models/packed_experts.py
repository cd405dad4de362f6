"""Experts of a mixture whose weights stay packed in blocks, as a GGUF file holds them.

transformers has the matrices of a layer's experts as one tensor [experts, rows, columns], and calls
the module with each token's experts. Here tokens are put into order by expert, so that one call of
the engine multiplies all of them, each with the matrix of its expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from hybrid_kv.errors import ShapeError
from hybrid_kv.models.packed_linear import PackedModule, is_wide_faster, wide_product
from hybrid_kv.ops.native.bindings import CLAMPED_SILU, GELU_TANH, SILU
from hybrid_kv.ops.native.experts import BoundMixture, ExpertMatrix, ExpertWeights, packed_experts
from hybrid_kv.ops.native.library import pool_here
from hybrid_kv.ops.native.linear import MAX_TOKENS, PackedWeight

_MOST_ROWS = 2**14
"""Inputs of experts that are multiplied at a time: of prompts, whose tokens pass several."""
_PIECE = 2**20
"""Inputs that are brought into another order at a time, so that their indices stay few."""
GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""The weights of most of transformers' experts, [E, 2 I, H] and [E, H, I]."""
GATE, UP = "gate_proj", "up_proj"
"""The halves of the first where they are stacks of their own."""


class PackedStack(NamedTuple):
    """Matrices of one kind, one for each expert.

    blocks: uint8 [E * N, bytes of a row], expert by expert. columns: K, the values of a row.
    columns_in: [E, K] of int64: which input each column of an expert is for; None where they are in
    order.
    """

    kind: str
    blocks: Tensor
    columns: int
    columns_in: Tensor | None = None


def weight_names(experts: nn.Module) -> tuple[str, str]:
    """Names of the two weights of plain experts."""
    return GATE_UP if experts.__dict__.get("has_gate", True) else UP, DOWN


def can_be_packed(module: nn.Module) -> bool:
    """Whether `PackedExperts` can stand for a module: experts of two matrices with a gate or an
    activation between them, with biases or without.
    """
    names, told = weight_names(module), module.__dict__
    biases = {_bias(name) for name in names}
    return (
        module._parameters.keys() in ({*names}, {*names, *biases})
        and hasattr(module, "_apply_gate")
        and "has_gate" in told
        and not told.get("has_post_expert_norm", False)
    )


def gate_rows(experts: nn.Module) -> tuple[range, range]:
    """Rows of the first matrix that are the gate's, and those that it gates."""
    count = rows_of(experts, GATE_UP).shape[1]
    return _halves(count, experts)


def _halves(count: int, experts: nn.Module) -> tuple[range, range]:
    if _is_interleaved(experts):
        return range(0, count, 2), range(1, count, 2)
    return range(count // 2), range(count // 2, count)


def _sliced(rows: range) -> slice:
    return slice(rows.start, rows.stop, rows.step)


def _is_interleaved(experts: nn.Module) -> bool:
    return not experts.__dict__.get("is_concatenated", True)


def rows_of(experts: nn.Module, name: str) -> Tensor:
    """A weight of plain experts with a row for each output, [E, N, K]."""
    weight = experts.get_parameter(name).detach()
    return weight.mT if experts.__dict__.get("is_transposed", False) else weight


def activation_of(module: object) -> int | None:
    """Activation of a feed-forward as the engine counts them; None where it has no such."""
    if type(module) in (nn.SiLU, SiLUActivation):
        return SILU
    if type(module) is not GELUTanh:
        return None
    act: Any = module.act
    is_own = isinstance(act, partial) and act.func is nn.functional.gelu and not act.args
    return GELU_TANH if is_own and act.keywords == {"approximate": "tanh"} else None


def _bias(name: str) -> str:
    return f"{name}_bias"


def order_name(name: str) -> str:
    """Name of the buffer with the order of a weight's columns, as `PackedStack.columns_in`."""
    return f"{name}_columns_in"


class _Gate(NamedTuple):
    """Operations of the engine between its products. Fields: as of `ExpertWeights`."""

    activation: int
    alpha: float = 0.0
    limit: float = 0.0


_OF_GPT_OSS = "transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts._apply_gate"


def _gate_of(plain: Any) -> _Gate | None:
    """The gate of plain experts; None for one that the engine does not have."""
    own = getattr(type(plain), "_apply_gate", None)
    if plain.has_gate and own is _default_apply_gate and not _is_interleaved(plain):
        activation = activation_of(getattr(plain, "act_fn", None))
        return None if activation is None else _Gate(activation)
    if own is not None and (own.__module__, own.__qualname__) == _OF_GPT_OSS:
        return _Gate(CLAMPED_SILU, plain.alpha, plain.limit)
    return None


class _Routed(NamedTuple):
    """Tokens by expert. experts, ends: as of `packed_experts`. chosen: the expert of each."""

    experts: Tensor
    ends: Tensor
    chosen: Tensor


class PackedExperts(PackedModule):
    """Experts of transformers' layout with packed weights.

    Parameters have the names of `up` and "down_proj": blocks, without gradients. Biases have those
    of the plain module, and are its own.

    Args:
        plain: the module that this one stands for (see `can_be_packed`); its weights are dropped,
            what it does between its products is kept.
        up: one stack of [E, 2 I, H], without a gate [E, I, H]; or those of the gate and of what it
            gates, [E, I, H] each.
        down: [E, H, I].
        exact: as of `PackedLinear`.
    """

    _bound: tuple[list[Any], BoundMixture | None] | None = None
    """How exact products are and where the weights lie, and the call that knows it."""

    def __init__(
        self, plain: nn.Module, up: Mapping[str, PackedStack], down: PackedStack, *, exact: bool
    ) -> None:
        super().__init__()
        stacks = {**up, DOWN: down}
        self.num_experts: int = plain.get_parameter(DOWN).shape[0]
        self.is_transposed = bool(plain.__dict__.get("is_transposed", False))
        self.kinds = {name: stack.kind for name, stack in stacks.items()}
        self.columns = {name: stack.columns for name, stack in stacks.items()}
        self.exact, self._up, self._names = exact, tuple(up), weight_names(plain)
        for name, stack in stacks.items():
            self.register_parameter(name, nn.Parameter(stack.blocks, requires_grad=False))
            self.register_buffer(order_name(name), stack.columns_in, persistent=False)
            self.set_kind(name, stack.kind)
        for name in self._names:
            self.register_parameter(_bias(name), plain._parameters.get(_bias(name)))
            plain.register_parameter(name, None)
        # No part of this module, or transformers would fill the weights that it has no more.
        self._plain = (plain,)

    def compute(  # type: ignore[override]  # of these inputs
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """The sum over each token's experts, [T, H] in the dtype of `hidden_states`.

        Args:
            hidden_states: [T, H]. top_k_index: [T, k], each token's experts. top_k_weights: [T, k].

        Raises:
            ConfigError: gradients are asked for, or there is no such expert.
            ShapeError: a token has other numbers of experts and shares.
        """
        self.check_gradients(hidden_states)
        if top_k_weights.shape != top_k_index.shape:
            raise ShapeError(
                f"top_k_weights must be {list(top_k_index.shape)}, a share for each expert of a "
                f"token, got {list(top_k_weights.shape)}"
            )
        mixture = self._mixture() if len(hidden_states) <= MAX_TOKENS else None
        if mixture is not None and mixture.takes(hidden_states.dtype):
            return mixture.sums(hidden_states, top_k_index, top_k_weights, pool_here())
        out = torch.empty_like(hidden_states)
        size = max(1, _MOST_ROWS // max(1, top_k_index.shape[-1]))
        for start in range(0, len(out), size):
            some = slice(start, start + size)
            out[some] = self._sum(hidden_states[some], top_k_index[some], top_k_weights[some])
        return out

    def kind_of(self, name: str) -> str:
        """Kind of the blocks of a weight."""
        return self.kinds[name]

    def set_kind(self, name: str, kind: str) -> None:
        """Says of which kind the blocks of a weight are that are still to be read."""
        self.kinds[name] = kind
        self.kind = " and ".join(dict.fromkeys(self.kinds.values()))

    def shape_of(self, name: str) -> torch.Size:
        """Of its values, [E, N, K]."""
        rows = self.get_parameter(name).shape[0] // self.num_experts
        return torch.Size((self.num_experts, rows, self.columns[name]))

    def __getstate__(self) -> dict[str, Any]:
        """Attributes for a copy or a pickle, without addresses."""
        return {name: one for name, one in self.__dict__.items() if name != "_bound"}

    def _mixture(self) -> BoundMixture | None:
        """The engine's one call for a few tokens; None where it does not know what is between its
        products.
        """
        places = [(one.data_ptr(), one.dtype, one.shape) for one in self.parameters()]
        told = [self.exact, *places]
        if self._bound is None or self._bound[0] != told:
            self._bound = told, self._bind()
        return self._bound[1]

    def _bind(self) -> BoundMixture | None:
        plain: Any = self._plain[0]
        gate = _gate_of(plain)
        if gate is None or any(self._buffers[order_name(name)] is not None for name in self.kinds):
            return None
        inner, width = self.columns[DOWN], self.shape_of(DOWN)[1]
        halves = _halves(2 * inner, plain)
        of_up, of_down = (self._parameters[_bias(name)] for name in self._names)
        biases = [None if of_up is None else of_up.detach()[:, _sliced(half)] for half in halves]
        rows = halves if len(self._up) == 1 else (range(inner), range(inner))
        of_gate, of_gated = (
            ExpertMatrix(self._packed(name), one, bias)
            for name, one, bias in zip((self._up[0], self._up[-1]), rows, biases, strict=True)
        )
        down = ExpertMatrix(self._packed(DOWN), range(width), of_down)
        told = gate.activation, self.exact, gate.alpha, gate.limit
        return BoundMixture(ExpertWeights(self.num_experts, of_gate, of_gated, down, *told))

    def _packed(self, name: str) -> PackedWeight:
        blocks = self.get_parameter(name).detach()
        return PackedWeight(self.kinds[name], blocks, self.columns[name])

    def _sum(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        chosen, order = top_k_index.flatten().sort(stable=True)
        if len(hidden_states) > MAX_TOKENS:
            experts, counts = chosen.unique_consecutive(return_counts=True)
            groups = _Routed(experts, counts.cumsum(0), chosen)
        else:  # each by itself: sums of a step must not depend on the tokens that it is joined with
            groups = _Routed(chosen, torch.arange(1, len(chosen) + 1), chosen)
        tokens = order // top_k_index.shape[-1]
        x = hidden_states.index_select(0, tokens)
        up = self._joined([self._product(name, x, groups) for name in self._up])
        of_up, of_down = (self._parameters[_bias(name)] for name in self._names)
        if of_up is not None:
            up += of_up.index_select(0, chosen)
        parts = self._product(DOWN, self._activated(up), groups).float()
        if of_down is not None:
            parts += of_down.index_select(0, chosen)
        parts *= top_k_weights.flatten().index_select(0, order)[:, None]
        # By expert, in whatever order a token has them.
        return torch.zeros(hidden_states.shape).index_add_(0, tokens, parts)

    def _joined(self, products: list[Tensor]) -> Tensor:
        """Outputs of the gate, and those that it gates, where the plain module has them."""
        if len(products) > 1 and _is_interleaved(self._plain[0]):
            return torch.stack(products, dim=-1).flatten(-2)
        return torch.cat(products, dim=-1)

    def _activated(self, up: Tensor) -> Tensor:
        plain: Any = self._plain[0]
        activated: Tensor = (plain._apply_gate if plain.has_gate else plain.act_fn)(up)
        return activated

    def _product(self, name: str, x: Tensor, groups: _Routed) -> Tensor:
        weight = self._packed(name)
        if (order := self._buffers[order_name(name)]) is not None:
            x = _ordered(x, order, groups.chosen)
        per_expert = len(x) // max(1, len(groups.experts))
        if is_wide_faster(weight.kind, per_expert, exact=self.exact):
            return self._wide_product(x, weight, groups)
        return packed_experts(
            *(x, weight, self.num_experts, groups.experts, groups.ends),
            exact=self.exact,
            pool=pool_here(),
        )

    def _wide_product(self, x: Tensor, weight: PackedWeight, groups: _Routed) -> Tensor:
        size, begin, parts = weight.rows // self.num_experts, 0, []
        for expert, end in zip(groups.experts.tolist(), groups.ends.tolist(), strict=True):
            rows = weight.blocks[expert * size : (expert + 1) * size]
            one = PackedWeight(weight.kind, rows, weight.columns)
            parts.append(wide_product(x[begin:end], one))
            begin = end
        return torch.cat(parts)

    def extra_repr(self) -> str:
        kinds = ", ".join(f"{name}={kind}" for name, kind in self.kinds.items())
        return f"{self.num_experts}, {kinds}, exact={self.exact}"


def _ordered(x: Tensor, order: Tensor, chosen: Tensor) -> Tensor:
    """Inputs [n, K], each in the order of its expert's columns.

    Args:
        order: as of `PackedStack`. chosen: [n], those experts.
    """
    out = torch.empty_like(x)
    size = max(1, _PIECE // x.shape[1])
    for start in range(0, len(x), size):
        some = slice(start, start + size)
        experts = chosen[some].clamp(0, len(order) - 1)  # others are refused by the product
        out[some] = x[some].gather(1, order.index_select(0, experts))
    return out
