"""A transformers model, its tokenizer or its configuration from a MODEL argument.

A model has one of three sources: a named shape with random weights, a GGUF file, or a checkpoint
that transformers reads from a folder or the hub.
"""

from __future__ import annotations

import logging
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import get_session, validate_repo_id  # type: ignore[attr-defined]
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hybrid_kv.errors import ConfigError, ModelNotFoundError, said, unknown_name
from hybrid_kv.models.checkpoint import read_config, read_tokenizer
from hybrid_kv.models.gguf_model import SMOLLM2, GgufOptions, is_gguf, smollm2_file
from hybrid_kv.models.quantisers import block_config, check_weights, packed_by, read_checkpoint
from hybrid_kv.models.shapes import random_config
from hybrid_kv.models.weight_kinds import BLOCKS, STORED, StoredWeight
from hybrid_kv.runtime import memory_errors

NEEDLE_PATH = Path(__file__).resolve().parent.parent / "assets" / "needle"
"""The small trained model that ships with the package."""

_RANDOM = "random:"

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_log = logging.getLogger(__name__)


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, or the first CUDA device, or the CPU.

    Raises:
        ConfigError: no such device here.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
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
    if not isinstance(dtype, str):
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got {said(dtype)}")
    if dtype not in _DTYPES:
        raise unknown_name("dtype", dtype, _DTYPES)
    return _DTYPES[dtype]


def load_model(
    spec: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    layers: int | None = None,
    weights: str | None = None,
    quantization_config: Any = None,
    dequantize: bool = False,
    exact_products: bool = False,
    seed: int = 0,
) -> PreTrainedModel:
    """Loads a causal language model.

    Args:
        spec: a folder, a GGUF file, a hub id, 'needle', 'smollm2' (extra smollm2), or
            'random:SHAPE' (random weights, no tokenizer).
        dtype: of the weights; None keeps the stored one (bfloat16 for random weights). Of a GGUF
            file, what the model computes in: bfloat16 for None.
        layers: number of layers of a random shape.
        weights: 'int8', 'int4' or 'nf4': linear layers are packed while they are read; see
            `quantisers`. None for what the checkpoint says.
        quantization_config: handed to `from_pretrained` as it is.
        dequantize: unpack the weights of a GGUF file, or of a checkpoint that GPTQ, AWQ or
            compressed-tensors packed, to `dtype`; else they stay packed, on the CPU.
        exact_products: multiply packed weights by activations in 8 bits and the 8-bit remainder,
            with errors below those of bfloat16 in place of about 1%, and some 8% dearer.
        seed: of random weights.

    Raises:
        ModelNotFoundError: the folder or id cannot be read, or its weights are not those of its
            configuration; the message says what is missing.
        ConfigError: unknown shape, dtype, device or kind of weights, packed weights of a GGUF file
            for a GPU, weights that are packed already, or an option for another model.
        BackendUnavailable: packed weights, and no engine or package here to multiply them.
        DeviceMemoryError, CapacityError: the weights do not fit into the memory of GPU or host.

    Warns:
        WeightsWarning: how much memory weights take that are unpacked, or are not packed.
    """
    check_weights(weights, str(spec), quantization_config)
    options = GgufOptions(dequantize, exact_products)
    target, wanted, begin = resolve_device(device), resolve_dtype(dtype), perf_counter()
    with memory_errors(lambda: "load"):
        if (shape := _shape_of(spec)) is not None:
            _check_is_gguf(spec, options, weights)
            model = _random(shape, target, wanted, layers, seed)
            if weights is not None:
                _pack_random(model, weights, target, exact=exact_products)
        elif is_gguf(path := _path_of(spec, layers)):
            from hybrid_kv.models.gguf_load import read_gguf

            if weights is not None:
                raise ConfigError(
                    f"the weights of '{spec}' have the kinds of their file, got "
                    f"weights='{weights}'; leave it out"
                )
            model = read_gguf(str(spec), path, target, wanted, quantization_config, options)
        else:
            asked = weights, quantization_config
            model = read_checkpoint(
                *(str(spec), path, target, wanted, *asked),
                exact=exact_products,
                dequantize=dequantize,
            )
    kind, taken = type(model).__name__, perf_counter() - begin
    _log.info("loaded %s (%s, %s) to %s in %.1f s", spec, kind, model.dtype, target, taken)
    return model


def load_tokenizer(spec: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of what `load_model` would load; None for random weights.

    Raises:
        ModelNotFoundError: there is none that can be read; the message says why.
    """
    if _shape_of(spec) is not None:
        return None
    path = _path_of(spec)
    if is_gguf(path):
        from hybrid_kv.models.gguf_load import read_gguf_tokenizer

        return read_gguf_tokenizer(str(spec), path)
    return read_tokenizer(str(spec), path)


def load_config(spec: str | Path, layers: int | None = None) -> PreTrainedConfig:
    """The configuration of what `load_model` would load; raises as it does."""
    if (shape := _shape_of(spec)) is not None:
        return random_config(shape, layers)
    path = _path_of(spec, layers)
    if is_gguf(path):
        from hybrid_kv.models.gguf_load import read_gguf_config

        return read_gguf_config(str(spec), path)
    return read_config(str(spec), path)


def packed_weights(
    spec: str | Path,
    dtype: torch.dtype,
    *,
    kind: str | None = None,
    dequantize: bool = False,
    device: str | None = None,
) -> list[StoredWeight] | None:
    """Sizes of weights that stay packed in a GGUF file; None for other models, and
    where they do not.

    Args:
        kind: a name of `WEIGHT_KINDS` that is asked for, which packed weights cannot become.
        device: where they would be; None where that does not matter.

    Raises as `load_model`.
    """
    if _shape_of(spec) is not None or not is_gguf(path := _path_of(spec)):
        if not dequantize or _shape_of(spec) is not None or not _is_stored(str(spec), path):
            _check_is_gguf(spec, GgufOptions(dequantize))
        return None
    if dequantize:
        return None
    if kind is not None:
        raise ConfigError(
            f"the weights of '{spec}' have the kinds of their file, got weights='{kind}'; leave it "
            "out, or add dequantize=True"
        )
    from hybrid_kv.models.gguf_load import packed_weights_of

    return packed_weights_of(str(spec), path, dtype, device)


def _check_is_gguf(spec: str | Path, options: GgufOptions, weights: str | None = None) -> None:
    """Raises ConfigError where options of packed weights are set for plain ones.

    Args:
        weights: what plain ones are packed into.
    """
    for name in ("dequantize", "exact_products"):
        if getattr(options, name) and (name == "dequantize" or weights is None):
            raise ConfigError(
                f"{name} is for weights that are stored packed (GGUF, {', '.join(STORED)}), got "
                f"MODEL '{spec}'; leave it out"
            )


def _is_stored(name: str, path: str) -> bool:
    """Whether `dequantize` unpacks a checkpoint."""
    return packed_by(read_config(name, path)) in STORED


def _shape_of(spec: str | Path) -> str | None:
    """The name of the shape where random weights are asked for."""
    name = str(spec)
    return name.removeprefix(_RANDOM) if name.startswith(_RANDOM) else None


def _path_of(spec: str | Path, layers: int | None = None) -> str:
    """The folder, GGUF file or hub id of a model; a folder has a configuration at least.

    Raises:
        ConfigError: a number of layers was given.
        ModelNotFoundError: a local folder is not there or not a model's, or a name that is no path
            is not to be had of the hub.
    """
    name = str(spec)
    if layers is not None:
        raise ConfigError(f"layers can be set for random:SHAPE models only, got MODEL '{name}'")
    if name == SMOLLM2:
        return str(smollm2_file())
    path = str(NEEDLE_PATH) if name == "needle" else name
    if is_gguf(path):  # looked at where it is read
        return path
    if not Path(path).exists():
        if name == "needle" or path.startswith((".", "/", "~")):
            raise ModelNotFoundError(f"model folder '{path}' does not exist; check the path")
        return hub_path(name)
    elif not (Path(path) / "config.json").is_file():
        raise ModelNotFoundError(
            f"model folder '{path}' has no config.json; point to a folder saved by save_pretrained"
        )
    return path


def _pack_random(
    model: PreTrainedModel, weights: str, device: torch.device, *, exact: bool
) -> None:
    """Packs weights that come from nowhere, one after the other."""
    if device.type != "cpu" or weights not in BLOCKS:
        raise ConfigError(
            f"random weights are packed into {' or '.join(BLOCKS)} on the CPU only, got "
            f"weights='{weights}' on '{device}'; leave it out"
        )
    from hybrid_kv.models.block_quantiser import pack_matrices, pack_tied_table

    config = block_config(weights, exact=exact)
    pack_matrices(model, config)
    pack_tied_table(model)


def _random(
    shape: str, device: torch.device, dtype: torch.dtype | None, layers: int | None, seed: int
) -> PreTrainedModel:
    config = random_config(shape, layers)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.bfloat16)
    return model.eval()  # type: ignore[no-any-return]


_WAIT_S = 5.0


def hub_path(name: str) -> str:
    """The hub id where the hub answers, else the folder in which its cache has the model.

    transformers itself tries a hub that is out of reach six times for each file.

    Raises:
        ModelNotFoundError: it can be no hub id, or it is not cached and the hub does not answer.
    """
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ModelNotFoundError(
            f"model '{name}' cannot be loaded: there is no such folder, and a hub id is like "
            "OWNER/NAME; check the path"
        ) from None
    if (why := _out_of_reach()) is None:
        return name
    found = try_to_load_from_cache(name, "config.json")
    if isinstance(found, str):
        return str(Path(found).parent)
    raise ModelNotFoundError(
        f"model '{name}' cannot be loaded: there is no such folder, the hub's cache has no model "
        f"of that name, and {why}; check the path, or download the model and give its folder"
    )


def _out_of_reach() -> str | None:
    """Reason why the hub cannot be asked; None where it answers, whatever it says."""
    try:
        get_session().head(constants.ENDPOINT, timeout=_WAIT_S)
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE forbids to ask the hub"
    except Exception as error:  # of the client that the hub's package has chosen
        return f"the hub cannot be reached ({type(error).__name__})"
    return None
