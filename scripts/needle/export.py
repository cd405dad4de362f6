"""From training weights to a transformers Llama and its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from hybrid_kv.eval.needle import facts as vocab
from needle.model import Weights
from needle.recipe import ModelSize
from needle.tokenizer import save_tokenizer

_LAYER_NAMES = {
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


def llama_config(size: ModelSize) -> LlamaConfig:
    """The configuration of the shipped model."""
    return LlamaConfig(
        vocab_size=vocab.VOCAB_SIZE,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_q_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=size.max_position,
        rms_norm_eps=size.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": size.rope_theta},
        tie_word_embeddings=True,
        pad_token_id=vocab.PAD,
        bos_token_id=vocab.BOS,
        eos_token_id=vocab.EOS,
        dtype="bfloat16",
    )


@torch.no_grad()
def to_transformers(weights: Weights, size: ModelSize) -> LlamaForCausalLM:
    """A bfloat16 model on the CPU, ready to run."""
    model = LlamaForCausalLM(llama_config(size))
    state = {"model.embed_tokens.weight": weights["embed"]}
    state["model.norm.weight"] = weights["final_norm"]
    for short, name in _LAYER_NAMES.items():
        for index in range(size.num_layers):
            state[f"model.layers.{index}.{name}.weight"] = weights[short][index]
    state["lm_head.weight"] = weights["embed"]
    model.load_state_dict({name: t.detach().cpu() for name, t in state.items()})
    model.bfloat16().eval()
    return model


def save_model(model: LlamaForCausalLM, folder: Path, report: dict[str, Any]) -> None:
    """Writes weights, configurations, tokenizer and training.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    # An answer is closed by a full stop, so that is where generation ends by default.
    model.generation_config = GenerationConfig(
        bos_token_id=vocab.BOS,
        eos_token_id=[vocab.EOS, vocab.STOP],
        pad_token_id=vocab.PAD,
        do_sample=False,
        max_new_tokens=40,
    )
    model.save_pretrained(folder)
    save_tokenizer(folder)
    (folder / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
