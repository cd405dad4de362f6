"""Named model shapes for random weights: what `random:SHAPE` means."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from hybrid_kv.errors import ConfigError, unknown_name

_LLAMA_3 = {"model_type": "llama", "vocab_size": 128256, "rope_theta": 500000.0}

_LLAMA_3_8B = {
    **_LLAMA_3,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": _LLAMA_3_8B,
    "llama-3.1-8b": _LLAMA_3_8B,
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
    "qwen3-32b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1000000.0,
    },
    "qwen3-30b-a3b": {  # 8 of 128 experts
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "rope_theta": 1000000.0,
    },
    "qwen3.5-27b": {  # every fourth layer of full attention, the others linear
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "gemma-3-27b": {  # every sixth layer of full attention, the others with a window
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "query_pre_attn_scalar": 168,
    },
    "gpt-oss-20b": {  # windows and full attention in turn, 4 of 32 experts
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
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
"""Shapes of public models, by their configurations; the context limit is lifted to 2M tokens, and
rotation is not stretched. Towers for images are left out."""

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
