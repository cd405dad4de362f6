"""GGUF files of gpt-oss and Mixtral: what transformers computes of the same numbers, and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BitsAndBytesConfig, GptOssConfig, MixtralConfig

pytest.importorskip("gguf", reason="the package gguf is not installed")

import gguf

import hybrid_kv as hkv
from hybrid_kv.errors import ConfigError, GgufWarning, ModelNotFoundError
from hybrid_kv.models import gguf_load
from hybrid_kv.models.gguf_file import open_gguf
from hybrid_kv.models.load import load_config, load_model, load_tokenizer
from hybrid_kv.models.packed_experts import PackedExperts
from hybrid_kv.planning.plan import model_facts
from tests.models.gguf_files import finish
from tests.models.mixture_files import EXPERTS, MADE, VOCAB, WINDOW, Mixture, write_mixture
from tests.models.test_gguf import assert_alike
from tests.ops.native.engines import needs_engine

pytestmark = needs_engine

TOKENS = torch.arange(3, 3 + 4 * WINDOW)[None] % VOCAB
"""More than a window, and than the positions of training."""
STACKS = {"gate_exps": "Q4_0", "up_exps": "Q5_1", "down_exps": "MXFP4", "": "Q8_0"}
PACKED = {"gate_proj": "Q4_0", "up_proj": "Q5_1", "down_proj": "MXFP4"}


@pytest.fixture(scope="module", params=MADE)
def architecture(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def mixture(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return write_mixture(tmp_path_factory.mktemp("gguf") / "m.gguf", architecture, STACKS)


def assert_same_logits(found: torch.nn.Module, wanted: torch.nn.Module, bound: float) -> None:
    with torch.inference_mode():
        assert_alike(found(TOKENS).logits, wanted(TOKENS).logits, bound)


def test_logits_are_those_of_the_same_numbers_and_nothing_is_said(mixture: Mixture) -> None:
    model = load_model(mixture.path, dtype="float32", device="cpu", exact_products=True)
    assert type(model) is type(mixture.model)
    assert_same_logits(model, mixture.model, 2e-3)


def test_experts_stay_in_their_kinds_where_they_lie(mixture: Mixture) -> None:
    model = load_model(mixture.path, device="cpu")
    experts = [part for part in model.modules() if isinstance(part, PackedExperts)]
    assert [part.kinds for part in experts] == 3 * [PACKED]
    tensor = open_gguf(mixture.path).tensors["blk.1.ffn_up_exps.weight"]
    found = model.get_parameter("model.layers.1.mlp.experts.up_proj")
    assert found.data_ptr() == tensor.data.data_ptr(), "nothing is copied"


def test_unpacked_they_are_those_numbers(mixture: Mixture) -> None:
    with pytest.warns(GgufWarning, match="are unpacked from GGUF"):
        model = load_model(mixture.path, dtype="float32", device="cpu", dequantize=True)
    assert not any(isinstance(part, PackedExperts) for part in model.modules())
    assert_same_logits(model, mixture.model, 1e-5)


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
def test_plain_files_are_those_numbers(architecture: str, kind: str, tmp_path: Path) -> None:
    mixture = write_mixture(tmp_path / "plain.gguf", architecture, {"": kind})
    model = load_model(mixture.path, dtype="float32", device="cpu")
    assert_same_logits(model, mixture.model, 1e-5)


def test_experts_with_one_plain_matrix_are_unpacked_and_it_is_said(
    architecture: str, tmp_path: Path
) -> None:
    stored = {**STACKS, "up_exps": "F16"}
    mixture = write_mixture(tmp_path / "mixed.gguf", architecture, stored)
    with pytest.warns(GgufWarning, match=r"6 tensors of .* cannot stay packed"):
        model = load_model(mixture.path, dtype="float32", device="cpu", exact_products=True)
    assert_same_logits(model, mixture.model, 2e-3)


def test_answers_are_those_of_transformers_with_every_budget_open(mixture: Mixture) -> None:
    plain = mixture.model.generate(
        TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=9, do_sample=False
    )
    for config in ("full", {"method": "hybrid", "page_size": 4, "top_k": "all"}):
        with hkv.load(
            str(mixture.path), config=config, dtype="float32", exact_products=True
        ) as llm:
            answer = llm.generate(TOKENS, max_new_tokens=9)
        assert answer.token_ids == plain[0, TOKENS.shape[1] :].tolist()


def test_plans_count_the_experts_that_a_token_reads(mixture: Mixture) -> None:
    facts = model_facts(mixture.path, dtype="float32")
    values = 3 * EXPERTS * 160 * 96  # layers, experts, rows, columns
    stored = {"Q4_0": 18, "Q5_1": 24, "MXFP4": 17}
    for kind, size in stored.items():
        assert facts.weights[kind] == values // 32 * size
    of_experts = sum(values // 32 * size for size in stored.values())
    assert facts.weight_bytes - facts.read_bytes >= of_experts // 2, "two of four"


def test_the_configuration_has_the_files_words(tmp_path: Path) -> None:
    """Without the rule for long positions, with heads of llama.cpp's default and one matrix for
    embeddings and logits.
    """
    keys = {"rope.freq_base": 5e5, "attention.sliding_window": 8, "rope.scaling.type": "none"}
    oss = load_config(write_mixture(tmp_path / "o.gguf", "gpt-oss", keys=keys).path)
    assert isinstance(oss, GptOssConfig)
    assert oss.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert oss.sliding_window == 8
    assert oss.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    without = {"rope.freq_base", "rope.dimension_count", "attention.head_count_kv", "output.weight"}
    path = write_mixture(tmp_path / "m.gguf", "llama", without=without).path
    mixtral = load_config(path)
    assert isinstance(mixtral, MixtralConfig)
    assert mixtral.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}
    assert (mixtral.head_dim, mixtral.num_key_value_heads) == (16, 6)
    assert mixtral.tie_word_embeddings
    assert mixtral.sliding_window is None


@pytest.mark.parametrize(("size", "ends"), [(201_088, [200_002, 199_999, 200_012]), (77, 200_002)])
def test_calls_of_tools_end_an_answer_of_gpt_oss(size: int, ends: Any, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "ends.gguf", "gpt-oss")
    for key in ("embedding_length", "attention.head_count", "context_length", "expert_count"):
        writer.add_uint32(f"gpt-oss.{key}", 32)
    for key in ("expert_used_count", "block_count", "attention.sliding_window"):
        writer.add_uint32(f"gpt-oss.{key}", 1)
    writer.add_uint32("gpt-oss.expert_feed_forward_length", 32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_eos_token_id(200_002)
    rows, kind = np.zeros((size, 32), np.float32), gguf.GGMLQuantizationType.Q4_0
    writer.add_tensor("token_embd.weight", gguf.quantize(rows, kind), raw_dtype=kind)
    finish(writer)
    assert load_config(tmp_path / "ends.gguf").eos_token_id == ends


# Files that do not fit --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*cannot stay packed")
@pytest.mark.parametrize(
    ("without", "why"),
    [
        ("blk.1.ffn_up_exps.weight", r"'blk.1.ffn_gate_exps.weight' and no 'blk.1.ffn_up_exps.w"),
        ("blk.1.ffn_gate_exps.weight", r"'blk.1.ffn_up_exps.weight' and no 'blk.1.ffn_gate_ex"),
        ("blk.2.ffn_down_exps.weight", r"1 tensor is missing.*2\.mlp\.experts\.down_proj"),
        ("blk.0.attn_q.weight", r"1 tensor is missing.*layers\.0\.self_attn\.q_proj\.weight"),
        ("expert_used_count", r"file has no [a-z-]*\.expert_used_count"),
        ("token_embd.weight", r"file has no token_embd\.weight"),
    ],
)
def test_what_a_file_lacks_is_named(
    architecture: str, without: str, why: str, tmp_path: Path
) -> None:
    path = write_mixture(tmp_path / "less.gguf", architecture, STACKS, without={without}).path
    with pytest.raises(ModelNotFoundError, match=why):
        load_model(path, device="cpu")


def cut(name: str, axis: int) -> Callable[[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """Leaves a block of a tensor's values out."""

    def change(found: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return values if found != name else values.take(range(values.shape[axis] - 32), axis)

    return change


@pytest.mark.filterwarnings("ignore:.*cannot stay packed")
@pytest.mark.parametrize(
    ("name", "axis", "why"),
    [
        ("ffn_down_exps.weight", 2, r"experts\.down_proj is \[4, 96, 128\] instead of \[4, 96, 1"),
        ("ffn_down_exps.weight", 1, r"experts\.down_proj is .* instead of"),
        ("ffn_gate_exps.weight", 2, r"experts\.gate_up_proj is \[4, 160, 64\] instead of"),
        ("ffn_gate_inp.weight", 1, r"mlp\.(router|gate)\.weight is \[4, 64\] instead of \[4, 96\]"),
        ("attn_output.weight", 0, r"o_proj\.weight is \[64, \d+\] instead of \[96, "),
        ("attn_q.weight", 0, r"attn_q\..* is \[64, 96\], which does|q_proj\.weight is \[160, 96\]"),
    ],
)
def test_tensors_of_another_shape_are_named(
    architecture: str, name: str, axis: int, why: str, tmp_path: Path
) -> None:
    change = cut(f"blk.1.{name}", axis)
    path = write_mixture(tmp_path / "cut.gguf", architecture, STACKS, change=change).path
    with pytest.raises(ModelNotFoundError, match=why):
        load_model(path, device="cpu")


def test_biases_that_are_missing_or_of_another_shape_are_named(tmp_path: Path) -> None:
    def refused(why: str, **options: Any) -> None:
        path = write_mixture(tmp_path / "bias.gguf", "gpt-oss", STACKS, **options).path
        with pytest.raises(ModelNotFoundError, match=why):
            load_model(path, device="cpu")

    refused(
        r"'blk.0.ffn_up_exps.bias' and no 'blk.0.ffn_gate", without={"blk.0.ffn_gate_exps.bias"}
    )
    refused(r"1 tensor is missing.*1\.self_attn\.sinks", without={"blk.1.attn_sinks.weight"})
    refused(r"down_proj_bias is \[4, 64\] instead", change=cut("blk.1.ffn_down_exps.bias", 1))
    refused(
        r"ffn_up_exps.bias' is \[4, 160\], which does not fit",
        change=cut("blk.1.ffn_gate_exps.bias", 1),
    )


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"expert_used_count": EXPERTS + 1}, "a token has 5 of 4 experts"),
        ({"rope.dimension_count": 8}, r"8 of \d\d channels of a head are turned"),
        ({"attention.head_count": 0}, "cannot be loaded"),
        ({"block_count": "many"}, "its header counts 'many' layers"),
        ({"rope.scaling.factor": "much"}, "cannot be loaded"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "by 'longrope'"),
    ],
)
def test_forms_that_are_not_read_are_refused(
    architecture: str, keys: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = write_mixture(tmp_path / "other.gguf", architecture, keys=keys).path
    with pytest.raises(ModelNotFoundError, match=why):
        load_model(path, device="cpu")


def test_files_with_a_tensor_for_each_expert_are_refused(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.ffn_gate.0.weight", np.ones((160, 96), np.float32))

    path = write_mixture(tmp_path / "old.gguf", "llama", more=add).path
    with pytest.raises(ModelNotFoundError, match=r"\(blk\.0\.ffn_gate\.0\.weight\).*take a newer"):
        load_model(path, device="cpu")


def test_no_library_packs_them_since_transformers_would_read_them(mixture: Mixture) -> None:
    with pytest.raises(ConfigError, match="mixture that transformers does not read"):
        load_model(
            mixture.path,
            device="cpu",
            quantization_config=BitsAndBytesConfig(load_in_8bit=True),
        )


# The vocabulary ---------------------------------------------------------------------------------


def oss_with_words(path: Path, kind: str | None) -> Path:
    """A file whose merges cross where gpt-oss takes words and numbers apart."""
    letters = [chr(code) for code in range(33, 33 + VOCAB - 2)]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        if kind is not None:
            writer.add_tokenizer_pre(kind)
        writer.add_token_list([*letters, "34", "aB"])
        writer.add_token_merges(["3 4", "a B"])
        writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")

    return write_mixture(path, "gpt-oss", more=add).path


@pytest.mark.skipif(not gguf_load.GGUF_PRE_TOKENIZER_SPLITS, reason="transformers before 5.24")
def test_words_of_gpt_oss_are_taken_apart_as_its_own_tokenizer_does(tmp_path: Path) -> None:
    """As llama.cpp does, which gives the same tokens for 41 texts."""
    tokenizer = load_tokenizer(oss_with_words(tmp_path / "words.gguf", "gpt-4o"))
    assert tokenizer is not None
    assert tokenizer.tokenize("12345") == list("12345")
    assert tokenizer.tokenize("1345") == ["1", "34", "5"]
    assert tokenizer.tokenize("aaB") == list("aaB")
    assert tokenizer.chat_template is not None


@pytest.mark.parametrize("kind", [None, "gpt-4o"])
def test_words_that_transformers_would_take_apart_otherwise_are_refused(
    kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = oss_with_words(tmp_path / "words.gguf", kind)
    monkeypatch.setattr(gguf_load, "GGUF_PRE_TOKENIZER_SPLITS", {})
    with pytest.raises(ModelNotFoundError, match=r"of kind '.*pip install -U transformers"):
        load_tokenizer(path)
    with hkv.load(str(path)) as llm, pytest.raises(ConfigError, match="text needs a tokenizer"):
        llm.generate("ab", max_new_tokens=1)
