"""Named model shapes for random weights: what `random:SHAPE` means."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from hybrid_kv.errors import ConfigError, unknown_name

_LLAMA_3 = {"model_type": "llama", "vocab_size": 128256, "rope_theta": 500000.0}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        **_LLAMA_3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "llama-3.2-1b": {
        **_LLAMA_3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1000000.0,
    },
    "tiny": {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
"""Attention and MLP shapes of public models; the context limit is lifted to 2M tokens."""

_CONTEXT = 2**21


def random_config(shape: str, layers: int | None) -> PreTrainedConfig:
    """The transformers configuration of a named shape, cut down to `layers` if given."""
    if shape not in SHAPES:
        raise unknown_name("shape", shape, SHAPES)
    settings = dict(SHAPES[shape])
    if layers is not None:
        if not 1 <= layers <= settings["num_hidden_layers"]:
            raise ConfigError(
                f"layers must be 1..{settings['num_hidden_layers']} for {shape}, got {layers}"
            )
        settings["num_hidden_layers"] = layers
    return AutoConfig.for_model(
        settings.pop("model_type"),
        max_position_embeddings=_CONTEXT,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=None,
        **settings,
    )
