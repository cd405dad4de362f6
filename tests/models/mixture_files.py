"""Small GGUF files of gpt-oss and Mixtral, and the models of transformers that they are of."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from tests.models.gguf_files import finish, packed

VOCAB, WINDOW, EXPERTS = 77, 24, 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}
YARN = {"factor": 8.0, "original_context_length": 64}
KINDS = {"exps": "MXFP4", "": "Q8_0"}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_OUTSIDE = {"embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*?)(?:[._](weight|bias))?")


class Mixture(NamedTuple):
    """A file, and the model that has its numbers."""

    path: Path
    model: PreTrainedModel


def gpt_oss() -> PreTrainedModel:
    """With heads wider than their share, biases, a window in every other layer, yarn."""
    rule = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": YARN["factor"],
        "original_max_position_embeddings": YARN["original_context_length"],
        "truncate": False,
    }
    more = {"head_dim": 32, "sliding_window": WINDOW}
    return GptOssForCausalLM(GptOssConfig(**SIZES, **more, rope_parameters=rule))


def mixtral() -> PreTrainedModel:
    """Without a window, as llama.cpp has it."""
    rule = {"rope_type": "default", "rope_theta": 1e6}
    return MixtralForCausalLM(MixtralConfig(**SIZES, head_dim=16, rope_parameters=rule))


MADE: Mapping[str, Callable[[], PreTrainedModel]] = {"gpt-oss": gpt_oss, "llama": mixtral}
KEYS: Mapping[str, Mapping[str, Any]] = {
    "gpt-oss": {
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.sliding_window": WINDOW,
        "expert_feed_forward_length": 160,
        "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn",
        **{f"rope.scaling.{key}": value for key, value in YARN.items()},
    },
    "llama": {"rope.freq_base": 1e6, "rope.dimension_count": 16},
}


def write_mixture(
    path: Path,
    architecture: str,
    stored: Mapping[str, str] = KINDS,
    *,
    without: Collection[str] = (),
    change: Callable[[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]] = lambda _, values: values,
    keys: Mapping[str, Any] | None = None,
    more: Callable[[gguf.GGUFWriter], Any] = lambda _: None,
) -> Mixture:
    """A file of random numbers.

    stored: by a part of their names, kinds of matrices. without: keys and tensors that are left
    out. change: makes other numbers of a tensor's. keys: further ones. more: writes more.
    """
    torch.manual_seed(0)
    model = MADE[architecture]().eval().requires_grad_(False)
    writer = gguf.GGUFWriter(path, architecture)
    told: dict[str, Any] = {
        "context_length": 512,
        "embedding_length": 96,
        "block_count": 3,
        "feed_forward_length": 160,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "vocab_size": VOCAB,
        **KEYS[architecture],
        **(keys or {}),
    }
    for key, value in told.items():
        if key not in without:
            add: Any = {float: writer.add_float32, str: writer.add_string}.get(
                type(value), writer.add_uint32
            )
            add(f"{architecture}.{key}", value)
    more(writer)
    rng = np.random.default_rng(0)

    def add_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """The values that a tensor has in the file."""
        values = rng.standard_normal(shape, dtype=np.float32)
        is_matrix = name.endswith(".weight") and len(shape) > 1 and "gate_inp" not in name
        if not is_matrix:
            values = values / 4 + ("norm" in name)
        if not is_matrix or name in without:
            written, kind = change(name, values), "F32"
        else:
            kind = next(kind for part, kind in stored.items() if part in name)
            values = change(name, values)
            written = packed(kind, values.shape, rng)
            values = gguf.dequantize(written, gguf.GGMLQuantizationType[kind])
        if name not in without:
            writer.add_tensor(name, written, raw_dtype=gguf.GGMLQuantizationType[kind])
        return values.reshape(shape) if values.size == np.prod(shape) else np.zeros(shape)

    for name, weight in model.named_parameters():
        _fill(name, weight, architecture, add_tensor)
    finish(writer)
    return Mixture(path, model)


def _fill(
    name: str,
    weight: torch.nn.Parameter,
    architecture: str,
    add_tensor: Callable[[str, tuple[int, ...]], np.ndarray[Any, Any]],
) -> None:
    """Writes the tensors of one parameter, and gives it their values."""

    def values(known: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(add_tensor(known, shape))

    shape, is_oss = tuple(weight.shape), architecture == "gpt-oss"
    if (found := _LAYER.fullmatch(name)) is None:
        known = next(to for part, to in _OUTSIDE.items() if part in name)
        weight.data = values(f"{known}.weight", shape)
        return
    layer, part, leaf = f"blk.{found[1]}", found[2], found[3] or "weight"
    if part == "self_attn.sinks":
        weight.data = values(f"{layer}.attn_sinks.weight", shape)
    elif part == "post_attention_layernorm":
        norm = "post_attention_norm" if is_oss else "ffn_norm"
        weight.data = values(f"{layer}.{norm}.weight", shape)
    elif part == "mlp.experts.gate_up_proj":
        whole = shape if leaf == "bias" or not is_oss else (shape[0], shape[2], shape[1])
        half = whole[0], whole[1] // 2, *whole[2:]
        gate, up = (values(f"{layer}.ffn_{one}_exps.{leaf}", half) for one in ("gate", "up"))
        made = torch.stack([gate, up], 2).flatten(1, 2) if is_oss else torch.cat([gate, up], 1)
        weight.data = made if whole == shape else made.mT
    elif part == "mlp.experts.down_proj" and is_oss and leaf == "weight":
        weight.data = values(f"{layer}.ffn_down_exps.weight", (shape[0], *shape[:0:-1])).mT
    else:
        made = values(f"{layer}.{_IN_LAYER[part]}.{leaf}", shape)
        if part in ("self_attn.q_proj", "self_attn.k_proj") and not is_oss:
            heads = shape[0] // 16  # llama.cpp has halves of a head in turn
            made = made.view(heads, 8, 2, -1).transpose(1, 2).reshape(shape)
        weight.data = made
