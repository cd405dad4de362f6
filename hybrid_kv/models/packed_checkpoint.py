"""Checkpoints whose weights are packed by a library, or are to be while they are read.

A checkpoint says in its configuration what packed it. transformers reads it with the library that
multiplies such weights; what it would do without a word, such as leaving them out or unpacking them
to 16 bits, is refused or told here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from warnings import warn

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hybrid_kv.errors import ConfigError, ModelNotFoundError, WeightsWarning
from hybrid_kv.models.checkpoint import read_config, read_model
from hybrid_kv.models.quantisers import need_packages, quantiser
from hybrid_kv.models.weight_tensors import dtype_name, keep_as_stored, mib, stored_tensors

_COMPRESSED = "compressed-tensors"
_PACKAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "awq": ("gptqmodel",),
        "bitsandbytes": ("bitsandbytes",),
        _COMPRESSED: (_COMPRESSED,),
        "gptq": ("optimum", "gptqmodel"),
        "torchao": ("torchao",),
    }
)
"""Packages that read weights packed by a method; transformers names those of others."""
_TOLD_SHARE = 0.05
"""Of a model's bytes: matrices that stay plain are told of from here on."""


def read_checkpoint(
    name: str,
    path: str,
    device: torch.device,
    dtype: torch.dtype | None,
    weights: str | None,
    quantization_config: Any,
    *,
    exact: bool,
) -> PreTrainedModel:
    """A checkpoint's model, its weights as they are stored or packed as they are read.

    Args:
        weights: one of `LOADED`, or None.
        exact: as of `PackedLinear`.

    Other arguments and errors as `read_model`.

    Raises:
        ConfigError, BackendUnavailable: its weights cannot be packed or multiplied here.

    Warns:
        WeightsWarning: how much memory weights take that are not packed, against expectation.
    """
    config = read_config(name, path)
    method = _packed_by(config)
    if method is not None:
        _check(name, method, weights)
    if weights is not None:
        computed = dtype or getattr(config, "dtype", None) or torch.bfloat16
        quantization_config = quantiser(name, config, weights, device, computed, exact=exact)
    if method == _COMPRESSED and quantization_config is None:
        # Else the first forward unpacks them without a word, all at once.
        config.quantization_config = {**config.quantization_config, "dequantize": True}
    model = read_model(name, path, device, dtype, quantization_config, config=config)
    keep_as_stored(model)
    if method is not None and getattr(model, "hf_quantizer", None) is None:
        _warn(
            f"the weights of '{name}' are packed by {method}, which nothing here multiplies on "
            f"'{device}': unpacked to {dtype_name(model.dtype)} they take {mib(_num_bytes(model))}"
        )
    if weights is not None:
        _tell_of_plain(name, model, weights)
    return model


def _packed_by(config: PreTrainedConfig) -> str | None:
    """The method by which a checkpoint was packed, by transformers' name; None for plain ones."""
    found: Any = getattr(config, "quantization_config", None)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        found = found.to_dict()
    method = found.get("quant_method")
    if method is None and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        return "bitsandbytes"
    return str(getattr(method, "value", method))


def _check(name: str, method: str, weights: str | None) -> None:
    """Raises ConfigError, ModelNotFoundError or BackendUnavailable unless a packed checkpoint can
    be read.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    if weights is not None:
        raise ConfigError(
            f"the weights of '{name}' are packed already, by {method}, got weights='{weights}'; "
            "leave it out, or take the model in 16 bits"
        )
    if method not in {*AUTO_QUANTIZATION_CONFIG_MAPPING, *_PACKAGES}:
        raise ModelNotFoundError(
            f"the weights of '{name}' are packed by '{method}', which transformers does not read; "
            f"take the model in 16 bits, or packed by {', '.join(_PACKAGES)}"
        )
    need_packages(f"model '{name}', packed by {method},", _PACKAGES.get(method, ()))


def _tell_of_plain(name: str, model: PreTrainedModel, weights: str) -> None:
    """Warns of matrices that were asked for packed and are not, such as stacked experts."""
    plain = {
        target: weight.nbytes
        for target, weight in model.named_parameters()
        if type(weight) is nn.Parameter
        and weight.ndim > 1
        and weight.is_floating_point()
        and not _is_table(model, weight)
    }
    if sum(plain.values()) > _TOLD_SHARE * _num_bytes(model):
        first = max(plain, key=lambda target: plain[target])
        _warn(
            f"weights='{weights}' packs linear layers of whole blocks: {len(plain)} matrices of "
            f"'{name}' ({first}, for one) stay in {dtype_name(model.dtype)} and take "
            f"{mib(sum(plain.values()))}"
        )


def _is_table(model: PreTrainedModel, weight: nn.Parameter) -> bool:
    """Whether it is the embedding table or the output projection."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    return any(getattr(module, "weight", None) is weight for module in ends)


def _num_bytes(model: PreTrainedModel) -> int:
    return sum(tensor.nbytes for _, tensor in stored_tensors(model))


def _warn(text: str) -> None:
    warn(text, WeightsWarning, stacklevel=5)  # whoever called hybrid_kv.load
