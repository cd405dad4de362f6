"""Weights in fewer bits than their checkpoint has: who packs them, while they are read.

    weights   on a CPU                      on a GPU
    int8      blocks Q8_0, by the engine    torchao, a scale for each row
    int4      blocks Q4_1, by the engine    torchao, a scale and a zero for each 128 numbers
    nf4       bitsandbytes                  bitsandbytes

On a CPU torchao and bitsandbytes unpack a matrix for every product: one token takes 50 to 100 times
as long as from blocks.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, TorchAoConfig

from hybrid_kv.errors import BackendUnavailable, ConfigError, said, unknown_name
from hybrid_kv.models.gguf_model import empty_model
from hybrid_kv.models.weight_kinds import BLOCKS, WEIGHT_KINDS
from hybrid_kv.models.weight_tensors import dtype_name
from hybrid_kv.ops.native.library import engine_state

if TYPE_CHECKING:
    from hybrid_kv.models.block_quantizer import BlockConfig

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
    from hybrid_kv.models.block_quantizer import BlockConfig

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
