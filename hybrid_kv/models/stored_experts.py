"""Reads checkpoints whose experts are packed in MXFP4, as gpt-oss's are, into the engine's blocks.

A matrix [N, K] of an expert is stored as bytes [N, K / 32, 16] of two values each, the earlier one
in the lower half, and [N, K / 32] exponents. A block of the engine's has its exponent first, then
the bytes, whose lower halves are values 0 to 15. transformers reads the tensors; what a checkpoint
left plain stays plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from hybrid_kv.models.block_quantiser import IntoBlocks, empty_experts
from hybrid_kv.models.packed_experts import DOWN, GATE_UP, PackedExperts, can_be_packed
from hybrid_kv.models.stored_checkpoint import told_by

MXFP4 = "mxfp4"
"""transformers' name for the method."""
_METHOD, _KIND = "hybrid_kv_mxfp4", "MXFP4"
_VALUES, _HALF = 32, 16
_LOW = 0x0F0F0F0F0F0F0F0F
_PIECE = 2**14
"""Blocks that are brought into order at a time, so that what is between lies in caches."""


def mxfp4_settings(config: PreTrainedConfig, *, dequantize: bool, exact: bool) -> dict[str, Any]:
    """The quantization_config by which transformers reads such a checkpoint.

    Args:
        dequantize: make plain weights of it. exact: as of `PackedExperts`.
    """
    told = told_by(config)
    if dequantize:
        return {**told, "dequantize": True}
    return {"quant_method": _METHOD, "told": told, "exact": exact}


def mxfp4_blocks(values: Tensor, exponents: Tensor) -> Tensor:
    """Blocks of the engine's, uint8 [..., K / 32 * 17].

    Args:
        values: uint8 [..., K / 32, 16]. exponents: uint8 [..., K / 32].
    """
    count = exponents.numel()
    blocks = torch.empty(count, 1 + _HALF, dtype=torch.uint8)
    blocks[:, 0] = exponents.reshape(-1)
    whole = values.reshape(count, _HALF)
    whole = whole.clone() if whole.storage_offset() % 8 else whole.contiguous()
    words = whole.view(torch.int64)  # of 16 values
    for start in range(0, count, _PIECE):
        piece = slice(start, start + _PIECE)
        first, second = words[piece].unbind(1)
        pairs = blocks[piece, 1:].unflatten(1, (-1, 2))
        # Values 2 i and 2 i + 1 lie in byte i: those of the first eight bytes become lower halves.
        pairs[..., 0] = _bytes(first & _LOW | (second & _LOW) << 4)
        pairs[..., 1] = _bytes(first >> 4 & _LOW | second & ~_LOW)
    return blocks.view(*exponents.shape[:-1], -1)


def _bytes(words: Tensor) -> Tensor:
    return words[:, None].view(torch.uint8)


@register_quantization_config(_METHOD)
class StoredExpertsConfig(QuantizationConfigMixin):
    """Settings of `StoredExpertsQuantizer`, as `from_pretrained` takes them.

    Args:
        told: the checkpoint's own quantization_config.
        exact: as of `PackedExperts`.
    """

    def __init__(self, told: Mapping[str, Any], *, exact: bool, **_: Any) -> None:
        self.quant_method = _METHOD  # type: ignore[assignment]  # or any registered name
        self.told, self.exact = told, exact

    def to_dict(self) -> dict[str, Any]:
        """The checkpoint's own."""
        return dict(self.told)


@register_quantizer(_METHOD)
class StoredExpertsQuantizer(IntoBlocks):
    """Makes blocks of a checkpoint's packed experts."""

    quantization_config: StoredExpertsConfig

    def get_weight_conversions(self) -> list[WeightConverter]:
        """From a matrix's two tensors to its blocks."""
        return [
            WeightConverter([rf"\.{name}_blocks$", rf"\.{name}_scales$"], f".{name}", [_Join(self)])
            for name in (GATE_UP, DOWN)
        ]

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        config = self.quantization_config
        plain = [*(config.told.get("modules_to_not_convert") or ())]
        for path, module in list(model.named_modules()):
            if can_be_packed(module) and should_convert_module(path, plain):
                model.set_submodule(path, empty_experts(module, _KIND, exact=config.exact))


class _Join(ConversionOps):
    """Blocks of a matrix of all experts, from its two tensors."""

    def __init__(self, hf_quantizer: StoredExpertsQuantizer) -> None:
        self.hf_quantizer = hf_quantizer  # by which transformers knows not to cast what is read

    def __deepcopy__(self, memo: Any) -> _Join:
        return self

    def convert(self, input_dict: dict[str, Any], *_: Any, **kwargs: Any) -> dict[str, Any]:
        """By name the blocks.

        An error here would come out as a table of transformers', so a shape that does not fit is
        recorded.
        """
        target: str = kwargs["full_layer_name"]
        path, leaf = target.rpartition(".")[::2]
        module: nn.Module = kwargs["model"].get_submodule(path)
        assert isinstance(module, PackedExperts)
        tensors = [one[0] if isinstance(one, list) else one for one in input_dict.values()]
        if len(tensors) < 2:  # then the matrix is missing
            return {}
        values, exponents = sorted(tensors, key=lambda tensor: -tensor.dim())
        *rows, columns = module.shape_of(leaf)
        wanted = torch.Size((*rows, columns // _VALUES))
        for name, found, size in (
            ("blocks", values.shape, torch.Size((*wanted, _HALF))),
            ("scales", exponents.shape, wanted),
        ):
            if found != size:
                self.hf_quantizer.misfits.add((f"{target}_{name}", found, size))
                return {}
        blocks = mxfp4_blocks(values, exponents).flatten(0, 1)
        return {target: nn.Parameter(blocks, requires_grad=False)}
