"""Reads checkpoints of GPTQ, AWQ and compressed-tensors without their libraries, into blocks of the
engine's on a CPU, or unpacked.

What a checkpoint's configuration says is looked at first, then names and shapes of its tensors, and
its numbers when they are read. transformers reads them; a `HfQuantizer` brings each matrix into
blocks as soon as its tensors are there. What the checkpoint left plain stays plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from hybrid_kv.errors import ModelNotFoundError
from hybrid_kv.models.block_quantiser import IntoBlocks, empty_linear
from hybrid_kv.models.packed_linear import PackedLinear
from hybrid_kv.models.stored_codes import UnfitError, read_codes, stored_layout

_BLOCK = 32


# Reading ----------------------------------------------------------------------------------------

_METHOD = "hybrid_kv_stored"


@register_quantization_config(_METHOD)
class StoredConfig(QuantizationConfigMixin):
    """Settings of `StoredQuantizer`, as `from_pretrained` takes them.

    Args:
        name: what the user called the model; for messages.
        told: the checkpoint's own quantization_config.
        dequantize: make plain layers of it.
        exact: as of `PackedLinear`.
    """

    def __init__(
        self, name: str, told: Mapping[str, Any], *, dequantize: bool, exact: bool, **_: Any
    ) -> None:
        self.quant_method = _METHOD  # type: ignore[assignment]  # or any registered name
        self.name, self.told, self.exact = name, told, exact
        self.dequantize = dequantize
        self.layout = stored_layout(told)

    def to_dict(self) -> dict[str, Any]:
        """The checkpoint's own."""
        return dict(self.told)


@register_quantizer(_METHOD)
class StoredQuantizer(IntoBlocks):
    """Makes of a checkpoint's packed matrices blocks of the engine's, or plain ones.

    orders: of inputs, for modules whose blocks are not in their order; transformers empties buffers
    that it did not read, so that modules get them last. unfit: what has no blocks.
    """

    quantization_config: StoredConfig
    orders: dict[PackedLinear, Tensor]
    unfit: list[str]

    def __init__(self, quantization_config: StoredConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.orders, self.unfit = {}, []

    def get_weight_conversions(self) -> list[WeightConverter]:
        """From a matrix's tensors to its weight."""
        form = self.quantization_config.layout.form
        names = [rf"\.{name}$" for name in form.names]
        if form.numbers == "weight_packed":
            names.append(r"\.weight_shape$")
        return [WeightConverter(names, ".weight", [_Convert(self)])]

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        config = self.quantization_config
        files = kwargs.get("checkpoint_files") or ()
        for path, shapes in _matrices(model, config, files, self).items():
            module = _linear(model, path, config)
            _check_shapes(path, module, shapes, config)
            if "bias" in shapes and module.bias is None:  # zeros, as AutoGPTQ writes them
                module.bias = nn.Parameter(torch.empty(module.out_features, device="meta"))
            if not config.dequantize:
                kind = config.layout.kind  # till its numbers say of which it is
                model.set_submodule(path, empty_linear(module, kind, exact=config.exact))

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **kwargs: Any
    ) -> PreTrainedModel:
        if self.unfit:
            raise _refused(self.quantization_config, self.unfit[0])
        for module, order in self.orders.items():
            module.columns_in = order
        self.orders.clear()
        return model


class _Convert(ConversionOps):
    """The weight of one matrix from its tensors."""

    def __init__(self, hf_quantizer: StoredQuantizer) -> None:
        self.hf_quantizer = hf_quantizer  # by which transformers knows not to cast what is read

    def __deepcopy__(self, memo: Any) -> _Convert:
        return self

    def convert(self, input_dict: dict[str, Any], *_: Any, **kwargs: Any) -> dict[str, Any]:
        """By name the blocks, or the values, of a matrix [N, K].

        An error here would come out as a table of transformers', so it is kept for later.
        """
        target, model = kwargs["full_layer_name"], kwargs["model"]
        config, path = self.hf_quantizer.quantization_config, target.rpartition(".")[0]
        module, tensors = model.get_submodule(path), {}
        for pattern, value in input_dict.items():
            tensor: Tensor = value[0] if isinstance(value, list) else value
            tensors[pattern.strip("\\.$")] = tensor.cpu()
        device = tensor.device
        codes = read_codes(config.layout, tensors, module.out_features, module.in_features)
        try:
            if config.dequantize:
                return {target: codes.values(module.weight.dtype).to(device)}
            kind, blocks, order = codes.blocks()
        except UnfitError as error:
            self.hf_quantizer.unfit.append(f"matrix {path} {error}")
            return {}
        assert isinstance(module, PackedLinear)
        module.kind = kind
        if order is not None:
            self.hf_quantizer.orders[module] = order
        return {target: nn.Parameter(blocks, requires_grad=False)}


def _matrices(
    model: PreTrainedModel, config: StoredConfig, files: Any, quantizer: StoredQuantizer
) -> dict[str, dict[str, tuple[int, ...]]]:
    """By the model's path of a packed matrix the shapes of its tensors by name."""
    form = config.layout.form
    mapping = get_model_conversion_mapping(model, None, quantizer)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    known = dict(model.named_parameters())
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise _refused(config, f"file {file} is no safetensors file")
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118  # no mapping
                path, _, name = key.rpartition(".")
                if name in form.names or name == "bias":
                    shape = tuple(opened.get_slice(key).get_shape())
                    shapes.setdefault(path, {})[name] = shape
    found = {}
    for path, own in shapes.items():
        if not own.keys() & {form.numbers, form.scales}:
            continue
        key = f"{path}.{form.numbers}"
        renamed, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        found[renamed.rpartition(".")[0]] = own
    if not found:
        raise _refused(config, f"no tensor is a {form.numbers}")
    return found


def _linear(model: PreTrainedModel, path: str, config: StoredConfig) -> nn.Linear:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise _refused(config, f"the model has no linear layer {path}") from None
    if type(module) is not nn.Linear:
        raise _refused(config, f"the model's {path} is a {type(module).__name__}, no linear layer")
    return module


def _check_shapes(
    path: str, module: nn.Linear, shapes: Mapping[str, tuple[int, ...]], config: StoredConfig
) -> None:
    form, rows, columns = config.layout.form, module.out_features, module.in_features
    wanted = config.layout.shapes(rows, columns)
    if columns % _BLOCK or rows % 8:
        raise _refused(
            config,
            f"matrix {path} has {columns} inputs and {rows} outputs, which must be multiples of "
            f"{_BLOCK} and 8",
        )
    for name, shape in wanted.items():
        if name not in shapes:
            if name == form.groups or (name == form.zeros and not form.needs_zeros):
                continue
            raise _refused(config, f"tensor {path}.{name} is missing")
        if shapes[name] != shape:
            raise _refused(
                config, f"tensor {path}.{name} is {list(shapes[name])} instead of {list(shape)}"
            )


def _refused(config: StoredConfig, why: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"model '{config.name}', packed by {config.layout.method}, cannot be read: {why}; check "
        "that the download is complete, or take the model in 16 bits or as a GGUF file"
    )


def stored_settings(
    name: str, config: PreTrainedConfig, *, dequantize: bool, exact: bool
) -> dict[str, Any]:
    """The quantization_config by which transformers reads a checkpoint of one of `FORMS` here.

    Arguments are those of `StoredConfig`.

    Raises:
        UnfitError: its layout has no blocks.
    """
    told = told_by(config)
    stored_layout(told)
    options = {"dequantize": dequantize, "exact": exact}
    return {"quant_method": _METHOD, "name": name, "told": told, **options}


def told_by(config: PreTrainedConfig) -> Mapping[str, Any]:
    """The quantization_config of a checkpoint's configuration."""
    told: Any = config.quantization_config
    return told if isinstance(told, Mapping) else told.to_dict()
