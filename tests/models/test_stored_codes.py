"""Checkpoints of GPTQ, AWQ and compressed-tensors in the engine's blocks, no library installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.errors import BackendUnavailable, ConfigError, HybridKVError, ModelNotFoundError
from hybrid_kv.models import quantisers
from hybrid_kv.models.load import load_model
from hybrid_kv.models.packed_linear import PackedLinear, unpacked
from hybrid_kv.models.stored_codes import StoredLayout, UnfitError, read_codes
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.linear import PackedWeight, packed_linear
from tests.models.packed_stand_ins import packed_modules
from tests.models.stored_checkpoints import (
    Pack,
    Rounded,
    awq,
    compressed,
    gptq,
    rounded,
    save_packed,
    words,
)
from tests.ops.native.engines import each_engine, needs_engine

TOKENS = torch.arange(1, 38)[None]
SIZES: dict[str, Any] = {
    **{"vocab_size": 77, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1},
}


def llama(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()


def scheme(bits: int, group: int | None, **told: Any) -> dict[str, Any]:
    """What llm-compressor writes."""
    strategy = {"strategy": "group" if group else "channel", "group_size": group}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, **strategy, **told}
    group_0 = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        **{"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]},
        "config_groups": {"group_0": group_0},
    }


# Numbers ----------------------------------------------------------------------------------------

MATRICES: dict[str, tuple[StoredLayout, Pack, dict[str, Any], str]] = {
    **{
        f"gptq, groups of {group}": (
            *(StoredLayout("gptq", 4, group, True, True), gptq),
            *({"group": group, "symmetric": True}, "Q4_0"),
        )
        for group in (32, 64, 128, 0)
    },
    "gptq with zeros": (
        *(StoredLayout("gptq", 4, 64, False, True), gptq),
        *({"group": 64}, "Q4_1"),
    ),
    "gptq 2": (
        *(StoredLayout("gptq", 4, 64, False), partial(gptq, version=2)),
        *({"group": 64}, "Q4_1"),
    ),
    "gptq in the order of activations": (
        *(StoredLayout("gptq", 4, 64, True, True), gptq),
        *({"group": 64, "symmetric": True, "shuffled": True}, "Q4_0"),
    ),
    "gptq in 8 bits": (
        *(StoredLayout("gptq", 8, 128, True, True), partial(gptq, bits=8)),
        *({"group": 128, "symmetric": True, "bits": 8}, "Q8_0"),
    ),
    "awq": (StoredLayout("awq", 4, 128, False), awq, {"group": 128}, "Q4_1"),
    "compressed-tensors": (
        *(StoredLayout("compressed-tensors", 4, 128, True), compressed),
        *({"group": 128, "symmetric": True, "dtype": torch.bfloat16}, "Q4_0"),
    ),
    "compressed-tensors by rows": (
        *(StoredLayout("compressed-tensors", 8, 0, True), partial(compressed, bits=8)),
        *({"group": 0, "symmetric": True, "bits": 8}, "Q8_0"),
    ),
    "compressed-tensors with zeros, in the order of activations": (
        *(
            StoredLayout("compressed-tensors", 4, 32, False),
            partial(compressed, zeros=True, groups=True),
        ),
        *({"group": 32, "shuffled": True}, "Q4_1"),
    ),
}


def matrix(what: str, shape: tuple[int, int] = (48, 384)) -> tuple[Rounded, StoredLayout, Pack]:
    torch.manual_seed(3)
    layout, pack, options, _ = MATRICES[what]
    return rounded(torch.randn(shape) * 0.02, **options), layout, pack


@pytest.mark.parametrize("what", MATRICES)
def test_blocks_hold_what_a_checkpoint_stores(what: str) -> None:
    """Where zeros are centred to the bit; others to the rounding of a least value to 16 bits."""
    it, layout, pack = matrix(what)
    codes = read_codes(layout, pack(it), 48, 384)
    kind, blocks, order = codes.blocks()
    assert kind == MATRICES[what][3]
    assert (order is not None) == ("order of" in what)
    wanted = it.weight if order is None else it.weight[:, order]
    error = (unpacked(blocks, kind) - wanted).abs()
    steps = it.scales[it.groups if order is None else it.groups[order]].float().t()
    assert error.max() == 0 if kind != "Q4_1" else (error <= 0.0074 * steps).all()
    if kind == "Q4_1":
        assert 0 < error.norm() / wanted.norm() < 6e-4
    assert torch.equal(codes.values(torch.empty(codes.shape)), it.weight)


@needs_engine
@pytest.mark.parametrize("what", MATRICES)
@pytest.mark.parametrize("tokens", [1, 12])
def test_products_are_those_of_the_weights(what: str, tokens: int) -> None:
    it, layout, pack = matrix(what)
    kind, blocks, order = read_codes(layout, pack(it), 48, 384).blocks()
    x = torch.randn(tokens, 384)
    given = x if order is None else x[:, order]
    made = packed_linear(given, PackedWeight(kind, blocks, 384), exact=True)
    wanted = (x.double() @ it.weight.double().t()).float()
    assert (made - wanted).norm() / wanted.norm() < (1e-3 if kind == "Q4_1" else 1e-4)


@pytest.mark.parametrize("what", ["gptq with zeros", "awq", "compressed-tensors"])
def test_large_matrices_are_read_piece_by_piece(what: str) -> None:
    it, layout, pack = matrix(what, (2992, 384))
    codes = read_codes(layout, pack(it), 2992, 384)
    kind, blocks, _ = codes.blocks()
    assert (unpacked(blocks, kind) - it.weight).norm() / it.weight.norm() < 6e-4
    assert torch.equal(codes.values(torch.empty(codes.shape)), it.weight)


@each_engine
def test_the_lowest_number_of_8_bits_is_multiplied_right(isa: str) -> None:
    """-128, which a file of llama.cpp never has."""
    numbers = torch.zeros(64, 8).int()
    it = Rounded(numbers, torch.ones(1, 8).half(), torch.full((1, 8), 128), torch.zeros(64).long())
    layout = StoredLayout("gptq", 8, 0, True, True)
    kind, blocks, _ = read_codes(layout, gptq(it, 8), 8, 64).blocks()
    assert (unpacked(blocks, kind) == -128).all()
    for tokens in (1, 12):
        weight, engine = PackedWeight(kind, blocks, 64), library.load(isa)
        made = packed_linear(torch.ones(tokens, 64), weight, exact=True, engine=engine)
        assert torch.allclose(made, torch.tensor(-128.0 * 64), rtol=1e-5)


def changed(what: str, **change: Any) -> Callable[[], object]:
    it, layout, pack = matrix(what)
    tensors = pack(replace(it, **change))
    return lambda: read_codes(layout, tensors, 48, 384).blocks()


UNFIT = {
    "zeros of 8 bits": (
        lambda: changed("gptq in 8 bits", zeros=torch.full((3, 48), 127)),
        "has zeros of 8 bits, and blocks of 8 bits have none",
    ),
    "groups in blocks": (
        lambda: changed("gptq with zeros", groups=torch.arange(384) % 6 * (torch.arange(384) > 9)),
        "has groups that are no multiples of 32 inputs",
    ),
    "groups beyond": (
        lambda: changed("gptq with zeros", groups=torch.arange(384) // 32),
        "has inputs of groups beyond its 6",
    ),
    "scales": (
        lambda: changed("compressed-tensors", scales=torch.full((3, 48), 1e6).bfloat16()),
        "has scales that 16 bits cannot hold",
    ),
}


@pytest.mark.parametrize("what", UNFIT)
def test_numbers_without_blocks_are_refused(what: str) -> None:
    call, why = UNFIT[what]
    with pytest.raises(UnfitError, match=f"^{why}$"):
        call()()


# Models -----------------------------------------------------------------------------------------

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
AWQ = {
    **{"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    "modules_to_not_convert": None,
}
CHECKPOINTS: dict[str, tuple[Pack, dict[str, Any], dict[str, Any]]] = {
    "gptq": (gptq, GPTQ, {"group": 64, "symmetric": True}),
    "gptq-order": (
        *(gptq, {**GPTQ, "sym": False, "desc_act": True, "checkpoint_format": "gptq"}),
        {"group": 64, "shuffled": True},
    ),
    "gptq-8": (
        *(partial(gptq, bits=8), {**GPTQ, "bits": 8}),
        {"group": 64, "symmetric": True, "bits": 8},
    ),
    "awq": (awq, AWQ, {"group": 64}),
    "compressed": (
        *(compressed, scheme(4, 64)),
        {"group": 64, "symmetric": True, "dtype": torch.bfloat16},
    ),
    "compressed-zeros": (
        *(partial(compressed, zeros=True), scheme(4, 64, symmetric=False)),
        {"group": 64},
    ),
}


def saved(path: Path, what: str, **changes: Any) -> tuple[Path, dict[str, Tensor]]:
    pack, told, options = CHECKPOINTS[what]
    return path, save_packed(path, llama(**changes), pack, told, **options)


def tokens_of(model: PreTrainedModel) -> list[list[int]]:
    options: Any = {"page_size": 4, "window_tokens": 8, "sink_tokens": 4, "top_k": "all"}
    answers = []
    for config in ("full", options):
        with hkv.load(model, config=config) as llm:
            answers.append(list(llm.generate(TOKENS, max_new_tokens=8).token_ids))
    return answers


@needs_engine
@pytest.mark.parametrize("what", CHECKPOINTS)
def test_a_packed_checkpoint_answers_as_its_plain_twin(what: str, tmp_path: Path) -> None:
    path, plain = saved(tmp_path, what, attention_bias=True)
    twin = llama(attention_bias=True)
    twin.load_state_dict(plain)
    model = load_model(path, device="cpu", exact_products=True)
    packed = list(packed_modules(model))
    assert len(packed) == 14
    assert all(isinstance(one, PackedLinear) for one in packed)
    assert type(model.get_output_embeddings()) is torch.nn.Linear
    with torch.no_grad():
        wanted, made = twin(TOKENS).logits, model(TOKENS).logits
    assert (made - wanted).norm() / wanted.norm() < 3e-3
    assert tokens_of(model) == tokens_of(twin)


@pytest.mark.parametrize("what", CHECKPOINTS)
def test_unpacked_a_checkpoint_is_its_plain_twin(what: str, tmp_path: Path) -> None:
    path, plain = saved(tmp_path, what)
    model = load_model(path, device="cpu", dequantize=True)
    state = model.state_dict()
    assert state.keys() == plain.keys()
    assert all(torch.equal(state[name], plain[name]) for name in plain)
    assert getattr(model, "hf_quantizer", None) is None
    model.save_pretrained(tmp_path / "plain")
    again = load_model(tmp_path / "plain", device="cpu")
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


@needs_engine
def test_a_plan_counts_the_blocks_of_a_packed_checkpoint(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, "gptq")
    model = load_model(path, device="cpu", dtype="float32")
    size = sum(weight.nbytes for weight in model.parameters())
    from hybrid_kv.planning.plan import model_facts

    facts = model_facts(path, device="cpu", dtype="float32")
    assert facts.weight_bytes == size
    assert facts.weights["Q4_0"] == sum(one.weight.nbytes for one in packed_modules(model))


@needs_engine
def test_biases_of_a_model_without_any_are_read(tmp_path: Path) -> None:
    """AutoGPTQ writes zeros for all of a model's linear layers."""
    path, _ = saved(tmp_path, "gptq")
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(".scales")]:
        tensors[name.replace("scales", "bias")] = torch.full((tensors[name].shape[1],), 0.5)
    save_file(tensors, file, metadata={"format": "pt"})
    for options in ({}, {"dequantize": True}):
        module = load_model(path, device="cpu", **options).get_submodule(
            "model.layers.0.mlp.up_proj"
        )
        assert (module.bias == 0.5).all()


# Refusals ---------------------------------------------------------------------------------------


def refused(error: type[HybridKVError], path: Path, **options: Any) -> str:
    with pytest.raises(error) as caught:
        load_model(path, device="cpu", **options)
    text = str(caught.value)
    assert "\n" not in text
    assert ". " not in text
    return text


def tampered(path: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    saved(path, "gptq")
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


FIRST = "model.layers.0.self_attn.q_proj"
TAMPERED: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "scales missing": (
        lambda tensors: tensors.pop(f"{FIRST}.scales"),
        f"tensor {FIRST}.scales is missing",
    ),
    "numbers missing": (
        lambda tensors: tensors.pop(f"{FIRST}.qweight"),
        f"tensor {FIRST}.qweight is missing",
    ),
    "zeros missing": (
        lambda tensors: tensors.pop(f"{FIRST}.qzeros"),
        f"tensor {FIRST}.qzeros is missing",
    ),
    "other shape": (
        lambda tensors: tensors.update({f"{FIRST}.scales": torch.ones(3, 128).half()}),
        f"tensor {FIRST}.scales is [3, 128] instead of [2, 128]",
    ),
    "no packed": (
        lambda tensors: [tensors.pop(name) for name in list(tensors) if "_proj" in name],
        "no tensor is a qweight",
    ),
    "packed and plain": (
        lambda tensors: tensors.update({f"{FIRST}.weight": torch.ones(128, 128)}),
        f"matrix {FIRST} is stored both packed and plain",
    ),
    "other layer": (
        lambda tensors: tensors.update({"model.layers.9.x.scales": torch.ones(2, 128).half()}),
        "the model has no linear layer model.layers.9.x",
    ),
    "no linear layer": (
        lambda tensors: tensors.update({"model.norm.scales": torch.ones(2, 128).half()}),
        "the model's model.norm is a LlamaRMSNorm, no linear layer",
    ),
    "an embedding": (
        lambda tensors: tensors.update({"model.embed_tokens.scales": torch.ones(2, 77).half()}),
        "the model's model.embed_tokens is a Embedding, no linear layer",
    ),
    "groups beyond": (
        lambda tensors: tensors.update({f"{FIRST}.g_idx": torch.arange(128).int() // 32}),
        f"matrix {FIRST} has inputs of groups beyond its 2",
    ),
}


@needs_engine
@pytest.mark.parametrize("what", TAMPERED)
def test_a_damaged_checkpoint_is_refused_in_one_sentence(what: str, tmp_path: Path) -> None:
    change, why = TAMPERED[what]
    text = refused(ModelNotFoundError, tampered(tmp_path, change))
    assert text == (
        f"model '{tmp_path}', packed by gptq, cannot be read: {why}; check that the download is "
        "complete, or take the model in 16 bits or as a GGUF file"
    )


TOLD: dict[str, tuple[dict[str, Any], str]] = {
    "3 bits": ({**GPTQ, "bits": 3}, "gptq in 3 bits"),
    "8 bits of awq": ({**AWQ, "bits": 8}, "awq in 8 bits"),
    "a kernel's form": ({**AWQ, "version": "gemv"}, "awq in its form 'gemv'"),
    "a later version": ({**GPTQ, "checkpoint_format": "gptq_v3"}, "gptq in its form 'gptq_v3'"),
    "words of 16 bits": ({**GPTQ, "pack_dtype": "int16"}, "gptq in words of int16"),
    "groups of 48": (
        {**GPTQ, "group_size": 48},
        "gptq in groups of 48 inputs, no multiple of 32",
    ),
    "8-bit floats": (
        {**scheme(8, 0), "format": "float-quantized"},
        "compressed-tensors in its form 'float-quantized'",
    ),
    "floats": (scheme(4, 32, type="float"), "compressed-tensors in numbers of type 'float'"),
    "tensors": (
        scheme(4, None, strategy="tensor"),
        "compressed-tensors by the strategy 'tensor'",
    ),
}


@needs_engine
@pytest.mark.parametrize("what", TOLD)
def test_what_has_no_blocks_is_left_to_its_library(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, why = TOLD[what]
    llama().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": told}))
    monkeypatch.setattr(quantisers, "find_spec", lambda _: None)
    text = refused(BackendUnavailable, tmp_path)
    assert text.startswith(f"model '{tmp_path}', packed by {why}, needs the package")
    assert "; run pip install " in text
    text = refused(ConfigError, tmp_path, dequantize=True)
    assert text.startswith(f"model '{tmp_path}' is packed by {why}, which cannot be unpacked here")


@needs_engine
def test_packed_checkpoints_are_packed_already(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, "awq")
    text = refused(ConfigError, path, weights="int4")
    assert text.startswith(
        f"the weights of '{path}' are packed already, by awq, got weights='int4'"
    )


def test_words_are_in_the_published_order() -> None:
    assert words(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]), 4).item() == 0x87654321 - 2**32
    assert words(torch.tensor([[1, 2, 3, 4]]), 8).item() == 0x04030201
