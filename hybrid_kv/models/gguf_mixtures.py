"""GGUF files of gpt-oss and of Mixtral, which transformers' own reader takes for something else.

What that has for other architectures is here for these two, in its forms: a configuration out of a
file's keys, and a processor of tensors. llama.cpp has a layer's experts in three stacks of
matrices: gate, up and down. Mixtral's files are Llama's with experts. gpt-oss's experts have
biases, and transformers has their matrices transposed, each output of the gate before that which it
gates.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from transformers.modeling_gguf_pytorch_utils import (
    GGUFTensor,
    LlamaTensorProcessor,
    Qwen2MoeTensorProcessor,
    TensorProcessor,
)

from hybrid_kv.errors import ModelNotFoundError
from hybrid_kv.models.gguf_file import GgufFile

GPT_OSS, LLAMA = "gpt-oss", "llama"
_TYPES = {GPT_OSS: "gpt_oss", LLAMA: "mixtral"}
"""transformers' types of models by llama.cpp's architectures."""
_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
_OWN_KEYS = {
    GPT_OSS: {
        "intermediate_size": "expert_feed_forward_length",
        "sliding_window": "attention.sliding_window",
    },
    LLAMA: {"intermediate_size": "feed_forward_length"},
}
_THETA = 1e4
"""llama.cpp's where a file does not say."""
_HARMONY, _ENDS = 201_088, (200_002, 199_999, 200_012)
"""Tokens of gpt-oss's vocabulary, and those that end an answer, which a file has one of: the end of
an answer, of a text, of a call of a tool."""


def is_mixture(file: GgufFile) -> bool:
    """Whether a file is one of those that this module is for."""
    experts = file.values.get(f"{LLAMA}.expert_count", 0)
    return file.architecture == GPT_OSS or (file.architecture == LLAMA and experts != 0)


def mixture_config(name: str, file: GgufFile) -> dict[str, Any]:
    """The configuration of a mixture in transformers' words, without a rule for long positions.

    Raises:
        ModelNotFoundError: a key or tensor is missing, or the file has a form that nothing here
            reads.
    """
    architecture, values = file.architecture, file.values
    keys = {word: f"{architecture}.{key}" for word, key in _KEYS.items()}
    keys |= {word: f"{architecture}.{key}" for word, key in _OWN_KEYS[architecture].items()}
    missing = [key for key in keys.values() if key not in values]
    missing += [] if "token_embd.weight" in file.tensors else ["token_embd.weight"]
    if missing:
        raise ModelNotFoundError(
            f"model '{name}' cannot be loaded: its file has no {', '.join(missing)}; take a file "
            "that llama.cpp runs"
        )
    told: dict[str, Any] = {word: values[key] for word, key in keys.items()}
    width = told["hidden_size"] // told["num_attention_heads"]
    width = values.get(f"{architecture}.attention.key_length", width)
    _check_form(name, file, told, width)
    ids = {
        f"{short}_token_id": values.get(f"tokenizer.ggml.{long}_token_id")
        for short, long in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    size = file.tensors["token_embd.weight"].shape[0]
    if (size, ids["eos_token_id"]) == (_HARMONY, _ENDS[0]):
        ids["eos_token_id"] = list(_ENDS)
    heads = f"{architecture}.attention.head_count_kv"
    theta = values.get(f"{architecture}.rope.freq_base", _THETA)
    return {
        "model_type": _TYPES[architecture],
        **told,
        **ids,
        "head_dim": width,
        "num_key_value_heads": values.get(heads, told["num_attention_heads"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": size,
    }


_ALONE = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight")


def _check_form(name: str, file: GgufFile, told: dict[str, Any], width: Any) -> None:
    """Raises ModelNotFoundError for what a file may say and no model here does."""
    turned = file.values.get(f"{file.architecture}.rope.dimension_count", width)
    experts, used = told["num_local_experts"], told["num_experts_per_tok"]
    alone = next(filter(_ALONE.fullmatch, file.tensors), None)
    why = ""
    if alone is not None:
        why = f"each expert's matrices are tensors of their own ({alone}), as before April 2024"
    elif turned != width:
        why = f"{turned} of {width} channels of a head are turned"
    elif not 0 < used <= experts:
        why = f"a token has {used} of {experts} experts"
    if why:
        raise ModelNotFoundError(
            f"model '{name}' cannot be loaded: {why}, which is not read from GGUF files of "
            "mixtures; take a newer file, or the checkpoint"
        )


class MixtralProcessor(Qwen2MoeTensorProcessor):
    """Mixtral's tensors: queries and keys in Llama's order, experts in Qwen's stacks."""

    def process(self, weights: np.ndarray[Any, Any], name: str, **kwargs: Any) -> Any:
        """As of the two."""
        if ".attn_q." in name or ".attn_k." in name:
            return LlamaTensorProcessor(config=self.config).process(weights, name, **kwargs)
        return super().process(weights, name, **kwargs)


_EXPERTS = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.mlp\.experts\.(?P<stacks>gate_up|down)_proj(?P<bias>_bias)?"
)
_STACK = re.compile(r"blk\.\d+\.ffn_(?P<which>gate|up|down)_exps\.(?P<leaf>weight|bias)")
_SINKS = re.compile(r"blk\.\d+\.attn_sinks\.weight")


class GptOssProcessor(TensorProcessor):
    """gpt-oss's tensors: experts and their biases, and sinks, which are no modules."""

    def perform_fallback_tensor_mapping(
        self, gguf_to_hf_name_map: dict[str, str], suffix: str, qual_name: str, hf_name: str
    ) -> None:
        """Adds the experts' names, of which the package gguf has none."""
        if (found := _EXPERTS.fullmatch(hf_name)) is not None:
            end = ".bias" if found["bias"] else ""
            for stack in found["stacks"].split("_"):
                known = f"blk.{found['layer']}.ffn_{stack}_exps{end}"
                gguf_to_hf_name_map[known] = qual_name + hf_name

    def process(self, weights: np.ndarray[Any, Any], name: str, **kwargs: Any) -> Any:
        """Transposes matrices of experts, and puts the gate's columns between those it gates."""
        if _SINKS.fullmatch(name):
            return GGUFTensor(weights, name.removesuffix(".weight"), {})
        if (found := _STACK.fullmatch(name)) is None:
            return GGUFTensor(weights, name, {})
        name = name.removesuffix(".weight")
        made = weights.swapaxes(-2, -1) if found["leaf"] == "weight" else weights
        if found["which"] == "down":
            return GGUFTensor(made, name, {})
        columns, target = torch.from_numpy(made), kwargs["tensor_key_mapping"][name]
        tensors: dict[str, torch.Tensor] = kwargs["parsed_parameters"]["tensors"]
        if target not in tensors:
            shape = *columns.shape[:-1], 2 * columns.shape[-1]
            tensors[target] = torch.zeros(shape, dtype=columns.dtype)
        tensors[target][..., found["which"] == "up" :: 2] = columns
        return GGUFTensor(weights, None, {})  # type: ignore[arg-type]  # done


PROCESSORS = {GPT_OSS: GptOssProcessor, LLAMA: MixtralProcessor}
