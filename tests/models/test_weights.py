"""`load(..., weights=KIND)`: what is packed while it is read, and what is refused."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    BitsAndBytesConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import hybrid_kv as hkv
from hybrid_kv.errors import (
    BackendUnavailable,
    CapacityError,
    ConfigError,
    DeviceMemoryError,
    ModelNotFoundError,
    WeightsWarning,
)
from hybrid_kv.models import block_quantiser, quantisers
from hybrid_kv.models.load import load_model
from hybrid_kv.models.packed_linear import (
    PACKERS,
    PackedEmbedding,
    PackedLinear,
    packed,
    unpacked,
)
from hybrid_kv.models.quantisers import quantiser
from tests.models.packed_stand_ins import packed_modules
from tests.ops.native.engines import needs_engine

TOKENS = torch.arange(1, 38)[None]
SIZES: dict[str, Any] = {
    **{"vocab_size": 77, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "initializer_range": 0.2},
}


def gpt_oss(**sizes: Any) -> GptOssForCausalLM:
    torch.manual_seed(0)
    config = GptOssConfig(**SIZES | sizes, num_local_experts=4, head_dim=16)
    return GptOssForCausalLM(config)


def saved(path: Path, model: PreTrainedModel, **config: Any) -> Path:
    """A folder of the model, with further entries in its config.json."""
    model.save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return path


def llama(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "attention_bias": True, **changes})).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("weights"), llama())


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits  # type: ignore[no-any-return]


# Blocks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_what_the_package_gguf_packs_and_unpacks(kind: str, dtype: torch.dtype) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    torch.manual_seed(0)
    weight = torch.randn(7, 96).to(dtype)
    weight[1] = 0
    weight[2] = 3.5
    number = gguf.GGMLQuantizationType[kind]
    blocks = packed(weight, kind)
    values = torch.from_numpy(gguf.dequantize(blocks.numpy(), number))
    theirs = torch.from_numpy(
        gguf.dequantize(gguf.quantize(weight.float().numpy(), number), number)
    )
    assert torch.equal(unpacked(blocks, kind), values)
    # Ties, and steps that are rounded to 16 bits before they divide.
    assert (values - weight).norm() < 1.01 * (theirs - weight).norm()
    assert values[1].eq(0).all()


def test_blocks_of_large_matrices_are_made_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(11, 64)
    whole = packed(weight, "Q4_1")
    monkeypatch.setattr("hybrid_kv.models.packed_linear._PIECE", 3 * 64)
    assert torch.equal(packed(weight, "Q4_1"), whole)


# Loading ----------------------------------------------------------------------------------------


@needs_engine
@pytest.mark.parametrize(
    ("weights", "kind", "bound"), [("int8", "Q8_0", 0.005), ("int4", "Q4_1", 0.3)]
)
def test_linear_layers_and_the_head_become_blocks(
    folder: Path, weights: str, kind: str, bound: float
) -> None:
    assert load_model(folder, device="cpu", weights=weights).get_output_embeddings().exact
    model = load_model(folder, device="cpu", weights=weights, exact_products=True)
    made = {type(module): 0 for module in packed_modules(model)}
    assert list(made) == [PackedLinear]
    up, head = model.get_submodule("model.layers.1.mlp.up_proj"), model.get_output_embeddings()
    assert (up.kind, head.kind) == (kind, "Q8_0")
    assert torch.equal(
        up.weight, packed(llama().get_parameter("model.layers.1.mlp.up_proj.weight"), kind)
    )
    right, got = logits(llama()).log_softmax(-1), logits(model).log_softmax(-1)
    assert 0 < (right.exp() * (right - got)).sum(-1).mean() < bound


@needs_engine
@pytest.mark.parametrize("scaled", [False, True])
def test_a_tied_table_is_packed_once(tmp_path: Path, scaled: bool) -> None:
    """Gemma multiplies the rows of its table by one number."""
    if scaled:
        config = Gemma3TextConfig(**SIZES, head_dim=16, tie_word_embeddings=True)
        plain: PreTrainedModel = Gemma3ForCausalLM(config).eval()
    else:
        plain = llama(tie_word_embeddings=True)
    model = load_model(saved(tmp_path, plain), device="cpu", weights="int8", exact_products=True)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(table, PackedEmbedding)
    assert table.weight is head.weight
    right, got = logits(plain).log_softmax(-1), logits(model).log_softmax(-1)
    assert (right.exp() * (right - got)).sum(-1).mean() < 0.01


def plain_matrices() -> int:
    """Matrices of the size of a layer's that are in memory as plain numbers, but frozen ones."""
    gc.collect()
    return sum(
        type(one) in (Tensor, torch.nn.Parameter)
        and (one.is_floating_point(), one.ndim, one.is_meta) == (True, 2, False)
        and one.numel() >= 96 * 32
        for one in gc.get_objects()
    )


@needs_engine
def test_a_checkpoint_is_packed_matrix_by_matrix(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a model whose plain weights do not fit is loaded where its packed ones do."""
    held = []

    def watched(weight: Tensor, kind: str) -> Tensor:
        held.append(plain_matrices())
        return packed(weight, kind)

    monkeypatch.setattr(block_quantiser, "packed", watched)
    gc.collect()
    gc.freeze()  # what other tests left is not looked at: it took 2 s a matrix
    load_model(folder, device="cpu", weights="int4")
    assert len(held) == 2 * 7 + 1
    assert max(held) <= 3, "the matrix, as a view of what was read, and the embedding table"


@needs_engine
@pytest.mark.parametrize("made", [llama, gpt_oss])
def test_what_is_still_to_be_read_has_the_dtype_that_it_is_read_in(
    made: Callable[[], PreTrainedModel],
) -> None:
    """Before 5.24 transformers casts what it reads to it: of bytes nothing but zeros were left."""
    with torch.device("meta"):
        model = made().to(torch.bfloat16)
    block_quantiser.pack_matrices(model, block_quantiser.BlockConfig("Q8_0"))
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


@needs_engine
def test_random_weights_are_packed_too() -> None:
    model = load_model("random:tiny", device="cpu", weights="int4")
    plain = load_model("random:tiny", device="cpu")
    up = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(model.get_parameter(up), packed(plain.get_parameter(up), "Q4_1"))
    with pytest.raises(ConfigError, match="random weights are packed into int8 or int4 on the CPU"):
        load_model("random:tiny", device="cpu", weights="nf4")


@needs_engine
def test_matrices_that_stay_plain_are_told_of(tmp_path: Path) -> None:
    """Experts whose rows are no whole blocks."""
    model = gpt_oss(intermediate_size=168)
    with pytest.warns(
        WeightsWarning, match=r"experts\..*, for one\) stay in float32 and take . MiB"
    ):
        load_model(saved(tmp_path, model), device="cpu", weights="int8")


@needs_engine
def test_a_matrix_of_another_shape_is_refused_by_its_name(folder: Path, tmp_path: Path) -> None:
    saved(tmp_path, llama())
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(128, 96)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(
        ModelNotFoundError, match=r"up_proj\.weight is \[128, 96\] instead of \[160"
    ):
        load_model(tmp_path, device="cpu", weights="int8")


@needs_engine
@pytest.mark.parametrize(
    ("error", "named", "said"),
    [
        (
            ValueError("Details:\nno kernel for this CPU."),
            BackendUnavailable,
            "cannot be packed or unpacked here: no kernel for this CPU; take another kind of w",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
            DeviceMemoryError,
            "GPU memory ran out at load: 2.00 GiB were asked for; load weights in fewer bits",
        ),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            ),
            CapacityError,
            "host memory ran out at load: 9 bytes were asked for",
        ),
    ],
)
def test_what_fails_while_weights_are_packed_is_one_sentence(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    named: type[Exception],
    said: str,
) -> None:
    """It stood in a table that transformers logs, and its own error named no cause."""

    def fail(*_: Any) -> Tensor:
        raise error

    monkeypatch.setattr(block_quantiser, "packed", fail)
    assert said in refused(named, lambda: load_model(folder, device="cpu", weights="int4"))


# What is refused --------------------------------------------------------------------------------


def refused(error: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_word_that_nothing_loads_is_refused(folder: Path) -> None:
    def said(weights: Any) -> str:
        return refused(ConfigError, lambda: hkv.load(folder, device="cpu", weights=weights))

    assert said("int5") == "unknown weights 'int5'; did you mean 'int8'? known: int4, int8, nf4"
    assert said("q4_k_m") == (
        "weights='q4_k_m' can be planned for and not loaded, one of int8, int4, nf4 can; take a "
        f"checkpoint or a GGUF file of model '{folder}' in that kind"
    )
    assert said(["int4"]) == "weights must be one of int8, int4, nf4, got a list"


def test_two_answers_to_one_question_are_refused(folder: Path, tmp_path: Path) -> None:
    nf4 = BitsAndBytesConfig(load_in_4bit=True)
    both = refused(ConfigError, lambda: load_model(folder, weights="int4", quantization_config=nf4))
    assert both.startswith("weights='int4' and a quantization_config both say how")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    text = refused(ConfigError, lambda: load_model(file, device="cpu", weights="int4"))
    assert text == (
        f"the weights of '{file}' have the kinds of their file, got weights='int4'; leave it out"
    )
    exact = refused(
        ConfigError,
        lambda: load_model(folder, device="cpu", weights="nf4", exact_products=True),
    )
    assert exact.startswith("exact_products is for int8 and int4 on the CPU, got weights='nf4'")


def packed_by(path: Path, **said: Any) -> Path:
    return saved(path, llama(), quantization_config=said)


@pytest.mark.parametrize(
    ("method", "packages"),
    [
        ("gptq", "packages optimum and gptqmodel; run pip install optimum gptqmodel"),
        ("awq", "package gptqmodel; run pip install gptqmodel"),
        ("compressed-tensors", "package compressed-tensors; run pip install compressed-tensors"),
        ("torchao", "package torchao; run pip install torchao"),
        ("bitsandbytes", "package bitsandbytes; run pip install bitsandbytes"),
    ],
)
def test_a_package_that_a_checkpoint_needs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, packages: str
) -> None:
    path = packed_by(tmp_path, quant_method=method, bits=3, format="marlin-24")
    monkeypatch.setattr(quantisers, "find_spec", lambda _: None)
    text = refused(BackendUnavailable, lambda: load_model(path, device="cpu"))
    assert re.sub(" in (3 bits|its form 'marlin-24')", "", text) == (
        f"model '{path}', packed by {method}, needs the {packages}"
    )
    text = refused(ConfigError, lambda: load_model(path, device="cpu", weights="int8"))
    assert text.startswith(f"the weights of '{path}' are packed already, by {method}, got weights=")


def test_a_method_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    """Of a method that it does not know, transformers would read packed numbers as plain ones."""
    path = packed_by(tmp_path, quant_method="squeeze", bits=3)
    text = refused(ModelNotFoundError, lambda: load_model(path, device="cpu"))
    assert "packed by 'squeeze', which transformers does not read; take the model in 16 b" in text


def test_weights_that_are_unpacked_while_they_are_read_are_told_of(tmp_path: Path) -> None:
    """8-bit floats have no kernels on a CPU, and transformers unpacks them."""
    path = saved(tmp_path, llama())
    file = path / "model.safetensors"
    weights = load_file(file)
    for name in [name for name in weights if name.endswith("proj.weight")]:
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        blocks = [-(-size // 128) for size in weights[name].shape]
        weights[f"{name}_scale_inv"] = torch.ones(blocks)
    save_file(weights, file, metadata={"format": "pt"})
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    saved_config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**saved_config, "quantization_config": config}))
    with pytest.warns(WeightsWarning, match="are packed by fp8, which nothing here multiplies on"):
        model = load_model(path, device="cpu")
    assert logits(model).isfinite().all()


def test_without_the_engine_blocks_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = SimpleNamespace(isa=None, detail="not built")
    monkeypatch.setattr(quantisers, "engine_state", lambda: state)
    text = refused(BackendUnavailable, lambda: load_model(folder, device="cpu", weights="int4"))
    assert text == (
        "weights='int4' on a CPU needs the native engine (not built); leave it out, or pass "
        "weights='nf4', which is slow"
    )


# On a GPU ---------------------------------------------------------------------------------------


def on_gpu(weights: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    config = LlamaConfig(**{**SIZES, **changes})
    return quantiser("m", config, weights, torch.device("cuda"), dtype, exact=False)


def test_a_gpu_without_torchao_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantisers, "find_spec", lambda _: None)
    text = refused(BackendUnavailable, lambda: on_gpu("int4"))
    assert text == ("weights='int4' on a GPU needs the package torchao; run pip install torchao")


def test_a_gpu_is_given_what_torchao_has_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="pip install torchao")
    capability = (8, 9)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    made = on_gpu("int4", hidden_size=384, intermediate_size=256).quant_type
    assert isinstance(made, quantization.Int4WeightOnlyConfig)
    assert (made.group_size, made.int4_packing_format) == (128, "tile_packed_to_4d")
    assert on_gpu("int4").quant_type.group_size == 32
    assert isinstance(on_gpu("int8").quant_type, quantization.Int8WeightOnlyConfig)
    text = refused(ConfigError, lambda: on_gpu("int4", torch.float16))
    assert "computes in bfloat16, got float16; pass dtype='bfloat16'" in text
    text = refused(ConfigError, lambda: on_gpu("int4", intermediate_size=100))
    assert "packs groups of 32 numbers, 'm' has matrices of 100 inputs; pass weights=" in text
    capability = (7, 5)
    text = refused(ConfigError, lambda: on_gpu("int4"))
    assert "needs a GPU of compute capability 8.0, 'cuda' has 7.5; pass weights='nf4'" in text


def test_bitsandbytes_is_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    made = on_gpu("nf4", torch.float16)
    assert (made.load_in_4bit, made.bnb_4bit_compute_dtype) == (True, torch.float16)


# Adapters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["int4", "nf4"])
def test_adapters_work_on_packed_layers_or_are_refused(folder: Path, weights: str) -> None:
    peft = pytest.importorskip("peft", reason="pip install peft")
    model = load_model(folder, device="cpu", weights=weights)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    if weights == "int4":
        with pytest.raises(ValueError, match=r"Target module PackedLinear.* is not supported"):
            peft.inject_adapter_in_model(lora, model)
        return
    before = logits(model)
    peft.inject_adapter_in_model(lora, model)
    assert not torch.allclose(logits(model), before, atol=1e-2)
    answers = []
    for config in ("full", {"page_size": 4, "window_tokens": 8, "sink_tokens": 4, "top_k": "all"}):
        with hkv.load(model, config=config) as llm:
            answers.append(llm.generate(TOKENS, max_new_tokens=4).token_ids)
    assert answers[0] == answers[1]
