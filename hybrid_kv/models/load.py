"""From a MODEL argument to a transformers model and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hybrid_kv.errors import ConfigError, ModelNotFoundError, unknown_name
from hybrid_kv.models.shapes import random_config
from hybrid_kv.runtime import memory_errors

NEEDLE_PATH = Path(__file__).resolve().parent.parent / "assets" / "needle"
"""The small trained model that ships with the package."""

_RANDOM = "random:"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, or the first CUDA device, or the CPU.

    Raises:
        ConfigError: no such device here.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device must be like 'cpu' or 'cuda:0', got '{device}'") from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted.type == "cuda" and (wanted.index or 0) >= count:
        raise ConfigError(
            f"device '{device}' is not there, this machine has {count} CUDA devices; use 'cpu' or "
            "install a torch build that sees the GPU"
        )
    if wanted.type not in ("cuda", "cpu"):
        raise ConfigError(f"device must be a 'cpu' or 'cuda' device, got '{device}'")
    return wanted


def resolve_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype by name; None stands for the one the weights are stored in."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise unknown_name("dtype", dtype, _DTYPES)
    return _DTYPES[dtype]


def load_model(
    spec: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    layers: int | None = None,
    quantization_config: Any = None,
    seed: int = 0,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Loads a causal language model.

    Args:
        spec: a folder, a hub id, 'needle', or 'random:SHAPE' (random weights, no tokenizer).
        dtype: of the weights; None keeps the stored one (bfloat16 for random weights).
        layers: number of layers of a random shape.
        quantization_config: handed to `from_pretrained` as it is.
        seed: of random weights.

    Raises:
        ModelNotFoundError: the folder or id cannot be read; the message says what is missing.
        ConfigError: unknown shape, dtype or device.
        DeviceMemoryError, CapacityError: the weights do not fit into the memory of GPU or host.
    """
    target, wanted = resolve_device(device), resolve_dtype(dtype)
    name = str(spec)
    with memory_errors(lambda: "load"):
        if name.startswith(_RANDOM):
            return _random(name.removeprefix(_RANDOM), target, wanted, layers, seed), None
        path = _path_of(name, layers)
        return _pretrained(name, path, target, wanted, quantization_config)


def load_config(spec: str | Path, layers: int | None = None) -> PreTrainedConfig:
    """The configuration of what `load_model` would load; raises as it does."""
    name = str(spec)
    if name.startswith(_RANDOM):
        return random_config(name.removeprefix(_RANDOM), layers)
    path = _path_of(name, layers)
    _check_folder(name, path)
    try:
        return AutoConfig.from_pretrained(path)  # type: ignore[no-any-return]
    except (OSError, ValueError, KeyError) as error:
        raise _cannot_load(name, error) from error


def _path_of(name: str, layers: int | None) -> str:
    if layers is not None:
        raise ConfigError(f"layers can be set for random:SHAPE models only, got MODEL '{name}'")
    return str(NEEDLE_PATH) if name == "needle" else name


def _cannot_load(name: str, error: Exception) -> ModelNotFoundError:
    reason = str(error).strip().split("\n")[0]
    return ModelNotFoundError(
        f"model '{name}' cannot be loaded: {reason}; check the folder or the hub id"
    )


def _random(
    shape: str, device: torch.device, dtype: torch.dtype | None, layers: int | None, seed: int
) -> PreTrainedModel:
    config = random_config(shape, layers)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.bfloat16)
    return model.eval()  # type: ignore[no-any-return]


def _pretrained(
    name: str,
    path: str,
    device: torch.device,
    dtype: torch.dtype | None,
    quantization_config: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    _check_folder(name, path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype or "auto",
            quantization_config=quantization_config,
            device_map={"": device} if quantization_config is not None else None,
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _cannot_load(name, error) from error
    if quantization_config is None:
        model = model.to(device)
    return model.eval(), tokenizer


def _check_folder(name: str, path: str) -> None:
    """Says what a local folder lacks; a name that is no path is left to the hub."""
    folder = Path(path)
    if not folder.exists():
        if name == "needle" or path.startswith((".", "/", "~")):
            raise ModelNotFoundError(f"model folder '{path}' does not exist; check the path")
        return
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"model folder '{path}' has no config.json; point to a folder saved by save_pretrained"
        )
