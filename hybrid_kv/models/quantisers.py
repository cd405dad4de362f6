"""Weights in fewer bits than their checkpoint has: who packs them, while they are read.

    weights   on a CPU                      on a GPU
    int8      blocks Q8_0, by the engine    torchao, a scale for each row
    int4      blocks Q4_1, by the engine    torchao, a scale and a zero for each 128 numbers
    nf4       bitsandbytes                  bitsandbytes

On a CPU torchao and bitsandbytes unpack a matrix for every product: one token takes 50 to 100 times
as long as from blocks.

A checkpoint says in its configuration what packed it. On a CPU those of GPTQ, AWQ and
compressed-tensors go into the engine's blocks, see `stored_checkpoint`; else transformers reads it
with the library that multiplies such weights. What it would do without a word, such as leaving them
out or unpacking them to 16 bits, is refused or told here.

`block_quantiser` packs linear layers into blocks for the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any
from warnings import warn

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel, TorchAoConfig

from hybrid_kv.errors import (
    BackendUnavailable,
    ConfigError,
    ModelNotFoundError,
    WeightsWarning,
    said,
    unknown_name,
)
from hybrid_kv.models.block_quantiser import BlockConfig
from hybrid_kv.models.checkpoint import read_config, read_model
from hybrid_kv.models.gguf_model import empty_model
from hybrid_kv.models.support import keep_as_stored
from hybrid_kv.models.weight_kinds import (
    BLOCKS,
    STORED,
    WEIGHT_KINDS,
    dtype_name,
    mib,
    stored_tensors,
)
from hybrid_kv.ops.native.library import engine_state

LOADED = (*BLOCKS, "nf4")
"""Kinds that `load` makes of other weights."""

_GROUPS = (128, 64, 32)
_LEAST_CAPABILITY = (8, 0)  # of torchao's int4 kernels


def check_weights(weights: str | None, spec: str, quantization_config: Any) -> None:
    """Raises ConfigError for a word that `load` does not know, or two answers to one question."""
    if weights is None:
        return
    if not isinstance(weights, str):
        raise ConfigError(f"weights must be one of {', '.join(LOADED)}, got {said(weights)}")
    if weights in WEIGHT_KINDS and weights not in LOADED:
        raise ConfigError(
            f"weights='{weights}' can be planned for and not loaded, one of {', '.join(LOADED)} "
            f"can; take a checkpoint or a GGUF file of model '{spec}' in that kind"
        )
    if weights not in LOADED:
        raise unknown_name("weights", weights, LOADED)
    if quantization_config is not None:
        raise ConfigError(
            f"weights='{weights}' and a quantization_config both say how weights are packed; leave "
            "out one of them"
        )


def quantiser(
    name: str,
    config: PreTrainedConfig,
    weights: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    exact: bool,
) -> Any:
    """The quantization_config by which transformers packs weights as they are read.

    Args:
        name: what the user called the model; for messages.
        config: of the model.
        weights: one of `LOADED`.
        dtype: what the model computes in.
        exact: as of `PackedLinear`.

    Raises:
        ConfigError: its matrices, the dtype or the device are not for this kind.
        BackendUnavailable: a package or the engine is missing.
    """
    if exact and (device.type != "cpu" or weights not in BLOCKS):
        raise ConfigError(
            f"exact_products is for {' and '.join(BLOCKS)} on the CPU, got weights='{weights}' on "
            f"'{device}'; leave it out"
        )
    if weights not in BLOCKS:
        need_packages(f"weights='{weights}'", ("bitsandbytes",))
        return BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    if device.type == "cpu":
        return block_config(weights, exact=exact)
    need_packages(f"weights='{weights}' on a GPU", ("torchao",))
    if weights == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))
    return _torchao_int4(name, config, device, dtype)


def block_config(weights: str, *, exact: bool) -> BlockConfig:
    """The configuration that makes the engine's blocks of one of `BLOCKS`.

    Raises:
        BackendUnavailable: there is no engine.
    """
    if (state := engine_state()).isa is None:
        raise BackendUnavailable(
            f"weights='{weights}' on a CPU needs the native engine ({state.detail}); leave it out, "
            "or pass weights='nf4', which is slow"
        )
    return BlockConfig(BLOCKS[weights], exact=exact)


def _torchao_int4(
    name: str, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> TorchAoConfig:
    from torchao.quantization import Int4WeightOnlyConfig

    if dtype != torch.bfloat16:
        raise ConfigError(
            f"weights='int4' on a GPU computes in bfloat16, got {dtype_name(dtype)}; pass "
            "dtype='bfloat16'"
        )
    if (have := torch.cuda.get_device_capability(device)) < _LEAST_CAPABILITY:
        raise ConfigError(
            f"weights='int4' needs a GPU of compute capability 8.0, '{device}' has "
            f"{have[0]}.{have[1]}; pass weights='nf4' or 'int8'"
        )
    model = empty_model(name, config, dtype)
    widths = [m.in_features for m in model.modules() if isinstance(m, nn.Linear)]
    group = next((size for size in _GROUPS if not any(width % size for width in widths)), None)
    if group is None:
        raise ConfigError(
            f"weights='int4' packs groups of {_GROUPS[-1]} numbers, '{name}' has matrices of "
            f"{next(w for w in widths if w % _GROUPS[-1])} inputs; pass weights='int8' or 'nf4'"
        )
    return TorchAoConfig(
        Int4WeightOnlyConfig(
            group_size=group,
            int4_packing_format="tile_packed_to_4d",
            set_inductor_config=False,
        )
    )


def need_packages(what: str, packages: tuple[str, ...]) -> None:
    """Raises BackendUnavailable unless packages are installed."""
    missing = [name for name in packages if find_spec(name.replace("-", "_")) is None]
    if missing:
        raise BackendUnavailable(
            f"{what} needs the package{'s' * (len(missing) > 1)} {' and '.join(missing)}; run pip "
            f"install {' '.join(missing)}"
        )


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
    dequantize: bool,
) -> PreTrainedModel:
    """A checkpoint's model, its weights as they are stored or packed as they are read.

    Args:
        weights: one of `LOADED`, or None.
        exact: as of `PackedLinear`.
        dequantize: weights that GPTQ, AWQ or compressed-tensors packed become plain ones.

    Other arguments and errors as `read_model`.

    Raises:
        ConfigError, BackendUnavailable: its weights cannot be packed or multiplied here.

    Warns:
        WeightsWarning: how much memory weights take that are not packed, against expectation.
    """
    config = read_config(name, path)
    method = packed_by(config)
    if method is not None:
        _check_method(name, method, weights)
    if method is not None and quantization_config is not None:
        need_packages(f"model '{name}', packed by {method},", _PACKAGES.get(method, ()))
    elif method is not None and _as_stored(
        name, config, method, device, dequantize=dequantize, exact=exact
    ):
        return read_model(name, path, device, dtype, config=config)
    if dequantize or (exact and weights is None):
        option = "dequantize" if dequantize else "exact_products"
        raise ConfigError(
            f"{option} is for weights that are stored packed (GGUF, {', '.join(STORED)}), got "
            f"MODEL '{name}'; leave it out"
        )
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


def packed_by(config: PreTrainedConfig) -> str | None:
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


def _as_stored(
    name: str,
    config: PreTrainedConfig,
    method: str,
    device: torch.device,
    *,
    dequantize: bool,
    exact: bool,
) -> bool:
    """Whether the checkpoint is read without a library, as its configuration then says.

    Raises:
        ConfigError: it cannot be unpacked here.
        BackendUnavailable: a library must read it, which is not installed.
    """
    why = ""
    in_blocks = device.type == "cpu" and engine_state().isa is not None
    if method == "mxfp4" and (dequantize or in_blocks):
        from hybrid_kv.models.stored_experts import mxfp4_settings

        config.quantization_config = mxfp4_settings(config, dequantize=dequantize, exact=exact)
        return True
    if method in STORED and (dequantize or in_blocks):
        from hybrid_kv.models.stored_checkpoint import stored_settings
        from hybrid_kv.models.stored_codes import UnfitError

        try:
            settings = stored_settings(name, config, dequantize=dequantize, exact=exact)
        except UnfitError as error:
            why = f" {error}"
        else:
            config.quantization_config = settings
            return True
    if why and dequantize:
        raise ConfigError(
            f"model '{name}' is packed by {method}{why}, which cannot be unpacked here; leave "
            "dequantize out, or take the model in 16 bits"
        )
    need_packages(f"model '{name}', packed by {method}{why},", _PACKAGES.get(method, ()))
    return False


def _check_method(name: str, method: str, weights: str | None) -> None:
    """Raises ConfigError or ModelNotFoundError unless a packed checkpoint can be read."""
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


def _tell_of_plain(name: str, model: PreTrainedModel, weights: str) -> None:
    """Warns of matrices that were asked for packed and are not, such as rows of no whole blocks."""
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
