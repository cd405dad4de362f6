"""Small configurations of decoder-only models beside the ten of the matrix, by model type."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from tests.contracts.architectures import PAD, VOCAB

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_UNGROUPED = {"num_key_value_heads": 6}
_SLIDING = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 24,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}

_GATED_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}

FURTHER: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "bitnet": {},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {**_SLIDING, "logit_scale": 1.0},
    "dots1": {
        **_EXPERTS,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "ernie4_5": {},
    "ernie4_5_moe": {**_EXPERTS, "moe_num_experts": 4, "moe_k": 2},
    "exaone4": _SLIDING,
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 96},
    "flex_olmo": _EXPERTS,
    "gemma": {"head_dim": 8},
    "gemma4_text": {
        **_SLIDING,
        "head_dim": 16,
        "global_head_dim": 16,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
    },
    "glm": {"head_dim": 16},
    "glm4_moe": {**_EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "gpt_neox": _UNGROUPED,
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "granitemoe": _EXPERTS,
    "granitemoeshared": {**_EXPERTS, "shared_intermediate_size": 24},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {**_EXPERTS, "head_dim": 8, "moe_topk": 2},
    "jamba": {**_EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "minimax_m2": {**_EXPERTS, "head_dim": 8},
    "ministral": {**_SLIDING, "head_dim": 8},
    "mixtral": _EXPERTS,
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo3": _SLIDING,
    "olmoe": _EXPERTS,
    "opt": {**_UNGROUPED, "ffn_dim": 40, "word_embed_proj_dim": 48},
    "persimmon": {**_UNGROUPED, "num_hidden_layers": 3},
    "phi": {},
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": {**_EXPERTS, "head_dim": 8},
    "qwen3_5_moe_text": {**_EXPERTS, **_GATED_DELTA},
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_next": {**_EXPERTS, **_GATED_DELTA},
    "seed_oss": {"head_dim": 8},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {},
    "starcoder2": {},
    "vaultgemma": {"head_dim": 8, **_SLIDING},
    "zamba2": {
        "num_mem_blocks": 1,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "mamba_headdim": 24,
        "mamba_d_state": 8,
        "chunk_size": 8,
        "layers_block_type": ["mamba", "hybrid"],
        "num_key_value_heads": 6,
    },
}
"""What each type's configuration differs in from the common one."""


NOT_TIERED = {"falcon_h1", "zamba2"}
"""Their attention shares a cache layer with a recurrent state, which stays transformers' own."""


def further_config(model_type: str, **changes: Any) -> PretrainedConfig:
    settings = {**_COMMON, **FURTHER.get(model_type, {}), **changes}
    return AutoConfig.for_model(model_type, **settings)
