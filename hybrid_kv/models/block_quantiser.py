"""Packs linear layers and experts into the engine's blocks: while transformers reads a checkpoint,
or later.

`BlockQuantizer` packs plain weights; what it has in common with those that read packed ones is
`IntoBlocks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from hybrid_kv.models.packed_experts import (
    DOWN,
    GATE,
    GATE_UP,
    UP,
    PackedExperts,
    PackedStack,
    can_be_packed,
    rows_of,
    weight_names,
)
from hybrid_kv.models.packed_linear import PackedEmbedding, PackedLinear, is_table, packed
from hybrid_kv.models.weight_kinds import HEAD_BLOCKS
from hybrid_kv.ops.native.linear import PACKED_KINDS


class IntoBlocks(HfQuantizer):
    """A quantizer that puts packed modules in the place of others.

    misfits: names, stored shapes and expected ones of tensors that were left out.
    """

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.misfits: set[tuple[str, torch.Size, torch.Size]] = set()

    def param_needs_quantization(
        self, model: PreTrainedModel, param_name: str, **kwargs: Any
    ) -> bool:
        """Whether a tensor becomes blocks."""
        path, _, leaf = param_name.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(module, PackedExperts):
            return leaf in module.kinds
        return leaf == "weight" and isinstance(module, PackedLinear)

    def is_serializable(self) -> bool:
        """Nothing would read the blocks of a folder."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Packed weights give no gradients."""
        return False


_METHOD = "hybrid_kv_blocks"


@register_quantization_config(_METHOD)
class BlockConfig(QuantizationConfigMixin):
    """Settings of `BlockQuantizer`, as `from_pretrained` takes them.

    Args:
        kind: of linear layers and experts, one that `packed` makes.
        exact: as of `PackedLinear`; the output projection is exact in any case.
    """

    def __init__(self, kind: str, *, exact: bool = False, **_: Any) -> None:
        self.quant_method = _METHOD  # type: ignore[assignment]  # or any registered name
        self.kind, self.exact = kind, exact


@register_quantizer(_METHOD)
class BlockQuantizer(IntoBlocks):
    """Packs linear layers and experts whose inputs come in whole blocks, and the output."""

    quantization_config: BlockConfig

    def get_quantize_ops(self) -> _Pack:
        """The operation that makes them."""
        return _Pack(self.misfits)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        pack_matrices(model, self.quantization_config)

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **kwargs: Any
    ) -> PreTrainedModel:
        pack_tied_table(model)
        return model


def pack_matrices(model: PreTrainedModel, config: BlockConfig) -> None:
    """Puts packed modules in the place of linear layers and experts, one after the other.

    Of weights on the meta device they are empty. What is tied to another weight is left.
    """
    head = model.get_output_embeddings()
    kept = [*(model._keep_in_fp32_modules or ()), *_tied_modules(model)]
    for path, module in list(model.named_modules()):
        if _comes_in_blocks(module) and should_convert_module(path, kept):
            made = _packed_head(module) if module is head else _packed_linear(module, config)
            model.set_submodule(path, made)
        elif _are_in_blocks(module) and should_convert_module(path, kept):
            model.set_submodule(path, _packed_experts(module, config))


def pack_tied_table(model: PreTrainedModel) -> None:
    """Packs an embedding table that is the output projection as well, for both at once."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not (is_table(table) and _comes_in_blocks(head) and head.weight is table.weight):
        return
    output = _packed_head(head)
    dtype = table.weight.dtype
    embedding = PackedEmbedding.in_place_of(table, HEAD_BLOCKS, output.weight.detach(), dtype)
    embedding.weight = output.weight
    model.set_input_embeddings(embedding)
    model.set_output_embeddings(output)


def _packed_head(module: nn.Linear) -> PackedLinear:
    """The output projection: exact, since only last tokens pass it."""
    return _packed_linear(module, BlockConfig(HEAD_BLOCKS, exact=True))


def _packed_linear(module: nn.Linear, config: BlockConfig) -> PackedLinear:
    if module.weight.is_meta:
        return empty_linear(module, config.kind, exact=config.exact)
    blocks = packed(module.weight.detach(), config.kind)
    return PackedLinear(config.kind, blocks, module.in_features, module.bias, exact=config.exact)


def empty_linear(module: nn.Linear, kind: str, *, exact: bool) -> PackedLinear:
    """A module for a linear layer's place, whose blocks are still to be read."""
    size = PACKED_KINDS[kind].row_bytes(module.in_features)
    # Till then they have the dtype of what is read: transformers before 5.24 casts it to theirs.
    blocks = torch.empty(module.out_features, size, dtype=module.weight.dtype, device="meta")
    return PackedLinear(kind, blocks, module.in_features, module.bias, exact=exact)


def _packed_experts(module: nn.Module, config: BlockConfig) -> PackedExperts:
    if rows_of(module, DOWN).is_meta:
        return empty_experts(module, config.kind, exact=config.exact)
    made = {}
    for name in weight_names(module):
        rows = rows_of(module, name)
        blocks = packed(rows.flatten(0, 1), config.kind)
        made[name] = PackedStack(config.kind, blocks, rows.shape[-1])
    down = made.pop(DOWN)
    return PackedExperts(module, made, down, exact=config.exact)


def empty_experts(
    module: nn.Module, kind: str, *, exact: bool, is_split: bool = False
) -> PackedExperts:
    """A module for the place of experts, whose blocks are still to be read.

    Args:
        is_split: the gate and what it gates are two stacks.
    """
    empty = {}
    for name in weight_names(module):
        weight = rows_of(module, name)
        experts, rows, columns = weight.shape
        size = PACKED_KINDS[kind].row_bytes(columns)
        parts = (GATE, UP) if is_split and name == GATE_UP else (name,)
        for part in parts:
            blocks = torch.empty(
                experts * rows // len(parts), size, dtype=weight.dtype, device="meta"
            )
            empty[part] = PackedStack(kind, blocks, columns)
    down = empty.pop(DOWN)
    return PackedExperts(module, empty, down, exact=exact)


class _Pack(ConversionOps):
    """Blocks in place of a tensor that was read, for the module that waits for it.

    An error here would come out as a table of transformers', so a shape that does not fit is
    recorded.
    """

    def __init__(self, misfits: set[tuple[str, torch.Size, torch.Size]]) -> None:
        self._misfits = misfits

    def convert(self, input_dict: dict[str, Any], *_: Any, **kwargs: Any) -> dict[str, Any]:
        """By name the blocks of a matrix [N, K], or of those of all experts, [E, N, K]."""
        model, made = kwargs["model"], {}
        for name, value in input_dict.items():
            path, leaf = name.rpartition(".")[::2]
            module = model.get_submodule(path)
            matrix = value[0] if isinstance(value, list) else value
            assert isinstance(module, PackedExperts | PackedLinear)
            if isinstance(module, PackedExperts) and module.is_transposed:
                matrix = matrix.mT
            if matrix.shape != (wanted := module.shape_of(leaf)):
                self._misfits.add((name, matrix.shape, wanted))
                continue
            blocks = packed(matrix.flatten(0, -2), module.kind_of(leaf))
            made[name] = nn.Parameter(blocks, requires_grad=False)
        return made


def _comes_in_blocks(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.in_features % PACKED_KINDS[HEAD_BLOCKS].values == 0


def _are_in_blocks(module: nn.Module) -> bool:
    """Whether these are experts whose rows are whole blocks."""
    values = PACKED_KINDS[HEAD_BLOCKS].values
    return can_be_packed(module) and all(
        rows_of(module, name).shape[-1] % values == 0 for name in weight_names(module)
    )


def _tied_modules(model: PreTrainedModel) -> Iterator[str]:
    for pair in model.all_tied_weights_keys.items():
        yield from (name.rpartition(".")[0] for name in pair)
