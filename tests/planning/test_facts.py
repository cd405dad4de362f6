"""Sizes for planning, from configurations alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
)

from hybrid_kv.errors import ConfigError, ModelNotFoundError
from hybrid_kv.models.cache_state import passing, states_of
from hybrid_kv.models.load import load_config, load_model
from hybrid_kv.planning.plan import ModelFacts, model_facts, other_layers
from tests.contracts.edges.further_models import further_config


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


GIB = 2**30


@cache
def shape_facts(shape: str) -> ModelFacts:
    """Of a named shape, in its own dtype: a large one takes seconds."""
    return model_facts(f"random:{shape}")


@pytest.mark.parametrize(
    ("shape", "billions", "kv_kib", "tiered", "others"),
    [
        ("llama-3.1-8b", 8.03, 128, 32, 0),
        ("qwen3-32b", 32.8, 256, 64, 0),
        ("qwen3-30b-a3b", 30.5, 96, 48, 0),
        ("qwen3.5-27b", 27, 64, 16, 48),
        ("gemma-3-27b", 25.6 + 1.416, 80, 10, 52),
        ("gpt-oss-20b", 20.9, 24, 12, 12),
    ],
)
def test_shapes_have_the_parameters_that_were_published(
    shape: str, billions: float, kv_kib: int, tiered: int, others: int
) -> None:
    facts = shape_facts(shape)
    assert facts.weight_bytes / 2e9 == pytest.approx(billions, rel=0.005)
    assert facts.kv_bytes_per_token == kv_kib * 1024
    assert (len(facts.layers), facts.other_layers) == (tiered, others)
    assert facts.num_layers == tiered + others


def test_linear_attention_keeps_states_of_one_size() -> None:
    facts = shape_facts("qwen3.5-27b")
    conv, recurrent = 2 * 10240 * 4, 4 * 48 * 128 * 128  # bfloat16, float32
    assert facts.fixed_bytes == 48 * (conv + recurrent)
    assert facts.window_bytes == 0
    assert facts.other_kv_bytes(2**18) == 0


def test_windows_hold_their_length() -> None:
    facts = shape_facts("gemma-3-27b")
    assert facts.window_bytes == 52 * 1024 * 2 * 16 * 128 * 2
    assert facts.fixed_bytes == 0


@pytest.mark.parametrize("kind", ["bamba", "falcon_h1", "jamba", "lfm2", "olmo3", "qwen3_next"])
def test_a_plan_has_what_layers_that_are_not_tiered_hold(kind: str, tmp_path: Path) -> None:
    config = further_config(kind)
    config.save_pretrained(tmp_path)
    facts = model_facts(tmp_path, dtype="float32")
    cache = DynamicCache(config=config)
    tokens = 30  # longer than a window of 12
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model(torch.randint(1, 100, (1, tokens)), **passing(cache))
        model(torch.randint(1, 100, (1, 1)), **passing(cache))
    states = sum(state.nbytes for layer in cache.layers for state in states_of(layer).values())
    assert facts.fixed_bytes == states
    tiered = {shape.layer_idx for shape in facts.layers}
    kept = [
        tensor
        for idx, layer in enumerate(cache.layers)
        if idx not in tiered
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if tensor is not None
    ]
    # A window holds one token less between two calls.
    window = sum(x.nbytes // x.shape[-2] for x in kept) if facts.window_bytes else 0
    assert facts.other_kv_bytes(tokens + 1) == sum(x.nbytes for x in kept) + window
    assert facts.num_layers == config.num_hidden_layers


def test_of_128_experts_a_token_reads_eight() -> None:
    active = shape_facts("qwen3-30b-a3b").read_bytes / 2e9
    assert active == pytest.approx(3.3 - 0.31, rel=0.02), "3.3 billion with the embedding table"


def test_gpt_oss_takes_what_its_checkpoint_takes_and_reads_four_experts() -> None:
    facts = model_facts("random:gpt-oss-20b", weights="mxfp4")
    assert facts.weight_bytes / GIB == pytest.approx(12.8, rel=0.01)
    active = shape_facts("gpt-oss-20b").read_bytes / 2e9
    assert active == pytest.approx(3.6, rel=0.02)


@pytest.mark.parametrize("kind", ["int4", "int8", "nf4"])
def test_on_a_card_the_experts_stay_plain(kind: str) -> None:
    """Whose matrices the libraries of a GPU do not pack."""
    on_card = model_facts("random:qwen3-30b-a3b", weights=kind, device="cuda")
    experts = 48 * 128 * 3 * 2048 * 768
    assert on_card.weights["bfloat16"] > 2 * experts
    assert model_facts("random:qwen3-30b-a3b", weights=kind).weights["bfloat16"] < experts


def test_tied_embeddings_are_read_by_the_output() -> None:
    facts = model_facts("random:llama-3.2-1b")
    assert facts.read_bytes == facts.weight_bytes


def test_the_stored_dtype_counts_unless_another_is_asked_for() -> None:
    stored, wide = model_facts("needle"), model_facts("needle", dtype="float32")
    assert wide.weight_bytes == 4 * stored.weight_bytes // stored.dtype_bytes
    assert wide.dtype_bytes == 4


TABLE = 128256 * 4096
LINEAR = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
NORMS = 2 * 65 * 4096


def test_weight_only_quantisation_packs_linear_layers_only() -> None:
    packed = model_facts("random:llama-3-8b", weights="int4")
    assert packed.weights == {"int4": LINEAR // 128 * 68, "bfloat16": 2 * 2 * TABLE + NORMS}
    assert packed.read_bytes == packed.weight_bytes - 2 * TABLE
    rows = 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)
    assert model_facts("random:llama-3-8b", weights="int8").weights["int8"] == LINEAR + 2 * rows


@pytest.mark.parametrize(
    ("kind", "published_gb"),
    [
        ("bf16", 16.06),
        ("q8_0", 8.54),
        ("q6_k", 6.60),
        ("q5_k_m", 5.73),
        ("q4_k_m", 4.92),
        ("q4_k_s", 4.69),
        ("q4_0", 4.66),
    ],
)
def test_kinds_take_what_published_files_of_llama_3_1_8b_take(
    kind: str, published_gb: float
) -> None:
    facts = model_facts("random:llama-3-8b", dtype="float16", weights=kind)
    assert facts.weight_bytes / 1e9 == pytest.approx(published_gb, rel=0.005)
    assert sum(facts.weights.values()) == facts.weight_bytes


def test_a_tied_table_of_a_published_file_is_a_head() -> None:
    facts = model_facts("random:gemma-3-27b", weights="q4_0")
    assert facts.weight_bytes / 1e9 == pytest.approx(15.6, rel=0.005)


def test_a_tied_table_is_packed_as_a_head_and_read() -> None:
    facts = model_facts("random:llama-3.2-1b", weights="q4_k_m")
    assert facts.weights["Q6_K"] > 128256 * 2048 // 256 * 210
    assert facts.read_bytes == facts.weight_bytes


def test_rows_that_are_no_whole_blocks_are_packed_as_llama_cpp_does() -> None:
    facts = model_facts("random:tiny", weights="q4_k_m")  # rows of 96 and 128 numbers
    assert set(facts.weights) == {"Q5_0", "Q8_0", "bfloat16"}
    assert facts.weights["bfloat16"] == 2 * 5 * 96


def test_a_token_reads_the_experts_that_it_is_routed_to(tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    config = GptOssConfig(
        **sizes, **heads, vocab_size=64, num_local_experts=5, num_experts_per_tok=2
    )
    config.save_pretrained(tmp_path)
    plain, packed = model_facts(tmp_path), model_facts(tmp_path, weights="mxfp4")
    experts = 3 * 5 * 3 * 48 * 40
    biases = 3 * 5 * (2 * 40 + 48)
    unread = 2 * 64 * 48 + round(0.6 * 2 * (experts + biases))
    assert plain.weight_bytes - plain.read_bytes == unread
    assert packed.weights["mxfp4"] == 3 * 5 * 17 * (48 * 3 + 40 * 2), "rows of 80 and 48 numbers"
    assert packed.weights["bfloat16"] == plain.weight_bytes - 2 * experts


def test_kinds_of_gguf_files_are_for_the_cpu() -> None:
    assert "Q8_0" in model_facts("random:tiny", weights="q8_0", device="cpu").weights
    with pytest.raises(
        ConfigError, match=r"weights='q4_k_m' is of GGUF files, .* got device 'h200'"
    ):
        model_facts("random:tiny", weights="q4_k_m", device="h200")
    assert "int4" in model_facts("random:tiny", weights="int4", device="h200").weights


def packed_checkpoint(folder: Path, **told: Any) -> Path:
    """A configuration whose weights are said to be packed."""
    config = load_config("random:tiny")
    config.quantization_config = told
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("told", "layout"),
    [
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4"),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}},
            },
            "int8",
        ),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "bfloat16"),
    ],
)
def test_what_a_checkpoint_says_of_its_weights_counts(
    tmp_path: Path, told: dict[str, Any], layout: str
) -> None:
    facts = model_facts(packed_checkpoint(tmp_path, **told))
    assert set(facts.weights) == {layout, "bfloat16"}


@pytest.mark.parametrize(
    ("told", "layout"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "Q4_1"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, "Q4_0"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True}, "Q8_0"),
    ],
)
def test_what_goes_into_blocks_on_a_cpu_counts_as_those(
    tmp_path: Path, told: dict[str, Any], layout: str
) -> None:
    path = packed_checkpoint(tmp_path, **told)
    assert set(model_facts(path, device="cpu").weights) == {layout, "bfloat16"}
    assert set(model_facts(path, device="cpu", dequantize=True).weights) == {"bfloat16"}


def test_weights_in_an_unknown_kind_are_refused_with_a_way_out(tmp_path: Path) -> None:
    path = packed_checkpoint(tmp_path, quant_method="hqq")
    with pytest.raises(ConfigError, match="packed by 'hqq', whose bytes are not known here; name"):
        model_facts(path)
    assert "int4" in model_facts(path, weights="int4").weights


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
    with pytest.raises(ConfigError, match="unknown weights 'int3'; did you mean 'int"):
        model_facts("random:tiny", weights="int3")
    with pytest.raises(ConfigError, match="layers can be set for random:SHAPE models only"):
        model_facts("needle", layers=1)
    with pytest.raises(ModelNotFoundError, match=r"model folder '\./none' does not exist"):
        model_facts("./none")


@pytest.mark.parametrize(
    ("model_type", "changes", "computed"),
    [
        ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"] * 3}, {0, 1}),
        ("bamba", {"attn_layer_indices": [1, 3, 5]}, {0, 1}),
        ("ministral", {"layer_types": ["sliding_attention", "full_attention"] * 3}, {0, 1}),
        ("falcon_h1", {}, {0}),
        (
            "gemma4_text",
            {
                "layer_types": ["sliding_attention", "full_attention"] * 3,
                "num_kv_shared_layers": 2,
            },
            set(range(6)),
        ),
    ],
)
def test_of_layers_that_are_alike_one_is_computed(
    model_type: str, changes: dict[str, Any], computed: set[int]
) -> None:
    """Gemma 4's later layers use keys of earlier ones, so that all of its are."""
    with torch.device("meta"):
        config = further_config(model_type, num_hidden_layers=6, **changes)
        model = AutoModelForCausalLM.from_config(config)
    kv = DynamicCache(config=config)
    token = torch.zeros(1, 1, dtype=torch.long, device="meta")
    model(input_ids=token, use_cache=True, **passing(kv))
    calls: set[int] = set()
    for layer_idx, layer in enumerate(model.model.layers):
        for part in layer.children():
            part.register_forward_hook(lambda *_, i=layer_idx: calls.add(i))
    found = other_layers(model, 0)
    assert calls == computed
    assert found.fixed_bytes == sum(
        state.nbytes for layer in kv.layers for state in states_of(layer).values()
    )
    windows = [layer for layer in kv.layers if getattr(layer, "is_sliding", False)]
    assert found.window_bytes == sum(
        layer.sliding_window * (layer.keys.nbytes + layer.values.nbytes) for layer in windows
    )
    assert "forward" not in vars(model.model.layers[2])
