"""Sizes for planning, from configurations alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from hybrid_kv.errors import ConfigError, ModelNotFoundError
from hybrid_kv.models.load import load_model
from hybrid_kv.planning.facts import model_facts


def test_weights_are_counted_as_loading_would_hold_them() -> None:
    model = load_model("random:tiny", device="cpu")
    held = sum(parameter.nbytes for parameter in model.parameters())
    facts = model_facts("random:tiny")
    assert facts.weight_bytes == held
    assert facts.read_bytes == held - model.get_input_embeddings().weight.nbytes
    assert facts.intermediate_size == 128


def test_an_8b_model_is_planned_without_its_weights() -> None:
    facts = model_facts("random:llama-3-8b")
    assert facts.weight_bytes == 2 * 8_030_261_248
    assert facts.kv_bytes_per_token == 2**17


def test_tied_embeddings_are_read_by_the_output() -> None:
    facts = model_facts("random:llama-3.2-1b")
    assert facts.read_bytes == facts.weight_bytes


def test_the_stored_dtype_counts_unless_another_is_asked_for() -> None:
    stored, wide = model_facts("needle"), model_facts("needle", dtype="float32")
    assert wide.weight_bytes == 4 * stored.weight_bytes // stored.dtype_bytes
    assert wide.dtype_bytes == 4


def test_quantisation_packs_linear_layers_only() -> None:
    full, packed = model_facts("random:llama-3-8b"), model_facts("random:llama-3-8b", weight_bits=4)
    tables = 2 * 2 * 128256 * 4096
    linear = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    norms = 2 * 65 * 4096
    assert full.weight_bytes == tables + 2 * linear + norms
    assert packed.weight_bytes == tables + int(linear * 4.5 / 8) + norms


def test_sliding_windows_are_bounded(tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=32,
    )
    Gemma2ForCausalLM(config).to(torch.float32).save_pretrained(tmp_path)
    facts = model_facts(tmp_path)
    assert len(facts.layers) == 2
    assert facts.window_bytes == 2 * 2 * 32 * 2 * 8 * 4


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="weight_bits must be 16, 8 or 4, got 3"):
        model_facts("random:tiny", weight_bits=3)
    with pytest.raises(ConfigError, match="layers can be set for random:SHAPE models only"):
        model_facts("needle", layers=1)
    with pytest.raises(ModelNotFoundError, match=r"model folder '\./none' does not exist"):
        model_facts("./none")
