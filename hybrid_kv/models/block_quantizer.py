"""Checkpoints whose linear layers are packed into blocks while they are read, for the CPU.

A quantiser as transformers knows them: it gives an empty model packed modules, and packs each
tensor as soon as it is read, so the weights are never in memory as plain numbers. The engine then
multiplies straight from the blocks, as it does for GGUF files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from hybrid_kv.models.blocks import packed
from hybrid_kv.models.packed_linear import PackedEmbedding, PackedLinear, is_table
from hybrid_kv.ops.native.packed import PACKED_KINDS

_METHOD = "hybrid_kv_blocks"
HEAD_KIND = "Q8_0"
"""Of the output projection: its rounding moves every token, and it is read once a token."""


@register_quantization_config(_METHOD)
class BlockConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """What `from_pretrained` is given.

    Args:
        kind: of the linear layers, one that `packed` makes.
        exact: as of `PackedLinear`.
    """

    def __init__(self, kind: str, *, exact: bool = False, **_: Any) -> None:
        self.quant_method = _METHOD
        self.kind, self.exact = kind, exact


@register_quantizer(_METHOD)
class BlockQuantizer(HfQuantizer):  # type: ignore[misc]
    """Packs linear layers whose inputs come in whole blocks, and the output projection."""

    quantization_config: BlockConfig

    def param_needs_quantization(
        self, model: PreTrainedModel, param_name: str, **kwargs: Any
    ) -> bool:
        """Whether a tensor becomes blocks."""
        path, _, leaf = param_name.rpartition(".")
        return leaf == "weight" and isinstance(model.get_submodule(path), PackedLinear)

    def get_quantize_ops(self) -> _Pack:
        """The operation that makes them."""
        return _Pack()

    def is_serializable(self) -> bool:
        """Nothing would read the blocks of a folder."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Packed weights give no gradients."""
        return False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        head = model.get_output_embeddings()
        kept = [*(model._keep_in_fp32_modules or ()), *_tied_modules(model)]
        for path, module in list(model.named_modules()):
            kind = HEAD_KIND if module is head else self.quantization_config.kind
            if _comes_in_blocks(module) and should_convert_module(path, kept):
                model.set_submodule(path, self._empty(module, kind))

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **kwargs: Any
    ) -> PreTrainedModel:
        """Packs the table that is the output projection as well."""
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        if head is None or not (is_table(table) and _comes_in_blocks(head)):
            return model
        if head.weight is not table.weight:
            return model
        blocks = packed(table.weight.detach(), HEAD_KIND)
        embedding = PackedEmbedding.in_place_of(table, HEAD_KIND, blocks, table.weight.dtype)
        exact = self.quantization_config.exact
        output = PackedLinear(HEAD_KIND, blocks, head.in_features, head.bias, exact=exact)
        output.weight = embedding.weight
        model.set_input_embeddings(embedding)
        model.set_output_embeddings(output)
        return model

    def _empty(self, module: nn.Linear, kind: str) -> PackedLinear:
        size = PACKED_KINDS[kind].row_bytes(module.in_features)
        blocks = torch.empty(module.out_features, size, dtype=torch.uint8, device="meta")
        exact = self.quantization_config.exact
        return PackedLinear(kind, blocks, module.in_features, module.bias, exact=exact)


class _Pack(ConversionOps):  # type: ignore[misc]
    """Blocks in place of a tensor that was read, for the module that waits for it."""

    def convert(
        self, input_dict: dict[str, Any], model: PreTrainedModel, **kwargs: Any
    ) -> dict[str, Tensor]:
        """By name the blocks of a matrix [N, K]."""
        made: dict[str, Tensor] = {}
        for name, value in input_dict.items():
            module = model.get_submodule(name.rpartition(".")[0])
            assert isinstance(module, PackedLinear)
            matrix = value[0] if isinstance(value, list) else value
            made[name] = nn.Parameter(packed(matrix, module.kind), requires_grad=False)
        return made


def _comes_in_blocks(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.in_features % PACKED_KINDS[HEAD_KIND].values == 0


def _tied_modules(model: PreTrainedModel) -> Iterator[str]:
    for pair in model.all_tied_weights_keys.items():
        yield from (name.rpartition(".")[0] for name in pair)
