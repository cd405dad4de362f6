"""Files of the architectures that transformers reads: packed, they are what it makes of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

pytest.importorskip("gguf", reason="the package gguf is not installed")

import gguf

from hybrid_kv.errors import GgufWarning
from hybrid_kv.models.load import load_model
from hybrid_kv.models.packed_linear import PackedLinear
from tests.models.gguf_files import finish, packed
from tests.models.test_gguf import assert_alike

KINDS = ("Q8_0", "Q4_1", "Q5_0")
SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 77,
    "max_position_embeddings": 64,
    "head_dim": 16,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [],
}
OWN: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 6},
    "falcon": {"multi_query": True, "head_dim": None},
    "gpt2": {"n_layer": 2, "n_head": 6, "n_embd": 96, "max_position_embeddings": None},
    "qwen3": {"head_dim": 128},  # which a file does not tell transformers
    # Of heads that transformers' default scale is for, since it does not read another.
    "gemma2": {"sliding_window": 32, "head_dim": 256},
    "gemma3_text": {"sliding_window": 32, "head_dim": 256},
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
}
ARCHITECTURES: Mapping[str, str] = {
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "falcon": "falcon",
    "bloom": "bloom",
    "gpt2": "gpt2",
    "nemotron": "nemotron",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
"""transformers' type of model, and llama.cpp's."""


def model_of(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = SIZES | {"pad_token_id": 0} | OWN.get(kind, {})
    known = {name: value for name, value in sizes.items() if value is not None}
    config = AutoConfig.for_model(kind, **known)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def write(
    path: Path,
    kind: str,
    architecture: str,
    stored: Mapping[str, str] | None = None,
    wider: str = "",
) -> Path:
    """A file of random weights in the shapes of a small model.

    stored: by a part of their names, kinds of tensors; the others take turns. wider: a part of the
    names of tensors whose rows have a block more.
    """
    model = model_of(kind)
    writer = gguf.GGUFWriter(path, architecture)
    keys: Mapping[str, Any] = GGUF_CONFIG_MAPPING[kind.removesuffix("_text")]
    config: Any = model.config
    for key, name in keys.items():
        value = getattr(config, name, None) if name else None
        if key == "rope.freq_base" and name:
            value = 1e4
        if isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_pad_token_id(0)
    if "vocab_size" not in keys:
        writer.add_token_list([f"word {n}" for n in range(config.vocab_size)])
    number = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names, rng = gguf.get_tensor_name_map(number, 2), np.random.default_rng(0)
    done: set[str] = set()
    for at, (name, weight) in enumerate(model.state_dict().items()):
        for known, shape in _in_file(kind, name, tuple(weight.shape), names):
            if known in done or (known == "output.weight" and config.tie_word_embeddings):
                continue
            done.add(known)
            if len(shape) > 1 and "norm" not in known and "gate_inp" not in known:
                told = (value for part, value in (stored or {}).items() if part in known)
                blocks = next(told, KINDS[at % 3])
                raw = gguf.GGMLQuantizationType[blocks]
                width = shape[-1] + (32 if wider and wider in known else 0)
                values = packed(blocks, (*shape[:-1], width), rng)
                writer.add_tensor(known, values, raw_dtype=raw)
            else:
                writer.add_tensor(known, 1 + rng.standard_normal(shape, dtype=np.float32) / 10)
    finish(writer)
    return path


def _in_file(
    kind: str, name: str, shape: tuple[int, ...], names: Any
) -> list[tuple[str, tuple[int, ...]]]:
    """What llama.cpp makes of a tensor: names and shapes."""
    if ".experts." in name:
        layer = name.split(".")[2]
        experts, rows, width = shape
        if name.endswith("down_proj"):
            return [(f"blk.{layer}.ffn_down_exps.weight", shape)]
        half = experts, rows // 2, width
        return [(f"blk.{layer}.ffn_{which}_exps.weight", half) for which in ("gate", "up")]
    stem, _, leaf = name.rpartition(".")
    known = names.get_name(stem) or names.get_name(stem.removeprefix("transformer."))
    if known is None:
        assert stem == "lm_head"
        return []
    if kind == "gpt2" and ".h." in name and len(shape) == 2:
        shape = shape[::-1]
    if known.endswith("ffn_gate_inp_shexp"):
        shape = shape[1:]
    return [(f"{known}.{leaf}", shape)]


def assert_as_transformers(path: Path, *, unpacked: bool = False) -> PreTrainedModel:
    """unpacked: some matrices cannot stay packed, which is said."""
    expected = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    with pytest.warns(GgufWarning, match="cannot stay") if unpacked else silence():
        model = load_model(path, dtype="float32", device="cpu", exact_products=True)
    with pytest.warns(GgufWarning, match="are unpacked from GGUF"):
        plain = load_model(path, dtype="float32", device="cpu", dequantize=True)
    assert type(model) is type(expected) is type(plain)
    linear = [part for part in model.modules() if type(part) is nn.Linear]
    assert all(part.out_features == 1 for part in linear), "what a file has in blocks stays in them"
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        want = expected(tokens).logits
        assert_alike(model(tokens).logits, want, 2e-3)
        assert_alike(plain(tokens).logits, want, 1e-5)
    return model


@contextmanager
def silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GgufWarning)
        yield


UNPACKED = {"falcon", "gpt2"}
"""Layers of classes of their own, and transposed matrices."""


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "small.gguf", kind, ARCHITECTURES[kind])
    assert_as_transformers(path, unpacked=kind in UNPACKED)


QWEN35: dict[str, Any] = {
    "context_length": 64,
    "embedding_length": 96,
    "feed_forward_length": 160,
    "block_count": 2,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "full_attention_interval": 2,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
    "rope.freq_base": 1e4,
    "rope.dimension_count": 16,
    "rope.dimension_sections": [4, 2, 2, 0],
}


def test_layers_with_a_state_of_fixed_size_are_those_of_transformers(tmp_path: Path) -> None:
    """Rows in another order, and inputs."""
    path = tmp_path / "qwen.gguf"
    writer = gguf.GGUFWriter(path, "qwen35")
    for key, value in QWEN35.items():
        add = (
            writer.add_array
            if isinstance(value, list)
            else (writer.add_float32 if isinstance(value, float) else writer.add_uint32)
        )
        add(f"qwen35.{key}", value)
    writer.add_token_list([f"word {n}" for n in range(77)])
    rng = np.random.default_rng(0)

    def matrix(name: str, *shape: int, kind: str = "Q8_0") -> None:
        raw = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", packed(kind, shape, rng), raw_dtype=raw)

    def plain(name: str, *shape: int) -> None:
        writer.add_tensor(name, 1 + rng.standard_normal(shape, dtype=np.float32) / 10)

    matrix("token_embd", 77, 96)
    plain("output_norm.weight", 96)
    for layer in ("blk.0", "blk.1"):
        plain(f"{layer}.attn_norm.weight", 96)
        plain(f"{layer}.post_attention_norm.weight", 96)
        matrix(f"{layer}.ffn_gate", 160, 96, kind="Q4_1")
        matrix(f"{layer}.ffn_up", 160, 96)
        matrix(f"{layer}.ffn_down", 96, 160)
    matrix("blk.0.attn_qkv", 2 * 2 * 16 + 64, 96)
    matrix("blk.0.attn_gate", 64, 96, kind="Q4_1")
    matrix("blk.0.ssm_alpha", 4, 96)
    matrix("blk.0.ssm_beta", 4, 96)
    matrix("blk.0.ssm_out", 96, 64)
    plain("blk.0.ssm_conv1d.weight", 128, 4)
    plain("blk.0.ssm_norm.weight", 16)
    writer.add_tensor("blk.0.ssm_a", -np.exp(rng.standard_normal(4, dtype=np.float32)))
    plain("blk.0.ssm_dt.bias", 4)
    matrix("blk.1.attn_q", 2 * 6 * 32, 96)
    matrix("blk.1.attn_k", 2 * 32, 96)
    matrix("blk.1.attn_v", 2 * 32, 96)
    matrix("blk.1.attn_output", 96, 6 * 32)
    plain("blk.1.attn_q_norm.weight", 32)
    plain("blk.1.attn_k_norm.weight", 32)
    finish(writer)
    model = assert_as_transformers(path)
    out = model.get_submodule("model.layers.0.linear_attn.out_proj")
    assert isinstance(out, PackedLinear)
    assert out.columns_in is not None
