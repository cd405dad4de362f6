"""Features that look into a model, with weights packed by each library: they work, or refuse."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.api.planning import observe_heads, observing
from hybrid_kv.errors import ConfigError, OtherContextError
from hybrid_kv.models import few_tokens, prompt_layers
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.early_queries import EarlyQueries
from hybrid_kv.models.few_tokens import FewTokens
from hybrid_kv.models.load import load_model
from hybrid_kv.models.prompt_layers import WideningTrial, widened, widened_bytes
from hybrid_kv.models.support import devices_of, inspect_model
from hybrid_kv.models.weight_kinds import stored_tensors
from hybrid_kv.planning.plan import model_facts
from hybrid_kv.saved.identity import model_identity
from scripts.needle.tokenizer import build_tokenizer
from tests.models.engine_products import trials_end
from tests.models.packed_stand_ins import as_buffers, as_tensor_class
from tests.ops.native.engines import needs_engine

SETTINGS: dict[str, Any] = {
    "method": "hybrid",
    "page_size": 4,
    "window_tokens": 8,
    "sink_tokens": 4,
    "top_k": "all",
}
TOKENS = torch.arange(2, 39)[None]


def _loaded(weights: str) -> Callable[[Path], PreTrainedModel]:
    return lambda folder: load_model(folder, device="cpu", weights=weights)


def _torchao(folder: Path) -> PreTrainedModel:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    config = TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))
    return load_model(folder, device="cpu", quantization_config=config)


def _changed(change: Callable[[PreTrainedModel], Any]) -> Callable[[Path], PreTrainedModel]:
    return lambda folder: change(load_model(folder, device="cpu"))


def _needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"pip install {package}")


PACKED: dict[str, Callable[[Path], PreTrainedModel]] = {
    "blocks": _loaded("int4"),
    "bitsandbytes": _loaded("nf4"),
    "torchao": _torchao,
    "tensor class": _changed(as_tensor_class),
    "buffers": _changed(as_buffers),
}
_MARKS = {
    "blocks": needs_engine,
    "bitsandbytes": _needs("bitsandbytes"),
    "torchao": _needs("torchao"),
}
by_packing = pytest.mark.parametrize(
    "packed", [pytest.param(name, marks=_MARKS.get(name, ())) for name in PACKED], indirect=True
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in bfloat16 with a head of its own; rows of 96 values are three blocks."""
    path, words = tmp_path_factory.mktemp("packed"), build_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": len(words), "hidden_size": 96, "intermediate_size": 160},
        **{"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2},
        **{"max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": None},
        **{"initializer_range": 0.2, "tie_word_embeddings": False, "attention_bias": True},
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    words.save_pretrained(path)
    return path


_MADE: dict[tuple[Path, str], PreTrainedModel] = {}


@pytest.fixture
def packed(folder: Path, request: pytest.FixtureRequest) -> PreTrainedModel:
    key = folder, request.param
    if key not in _MADE:
        _MADE[key] = PACKED[request.param](folder)
    return _MADE[key]


def logits(model: nn.Module, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).logits


@by_packing
def test_with_every_budget_open_a_tiered_cache_answers_as_a_full_one(
    packed: PreTrainedModel,
) -> None:
    answers = []
    for config in ("full", SETTINGS):
        with hkv.load(packed, config=config) as llm:
            answers.append(llm.generate(TOKENS, max_new_tokens=5).token_ids)
    assert answers[0] == answers[1]


@by_packing
def test_a_forward_leaves_the_identity_of_the_model_as_it_was(
    folder: Path, request: pytest.FixtureRequest, packed: PreTrainedModel
) -> None:
    """On CPUs with AVX512-BF16 bitsandbytes would pack its weights anew."""
    fresh = PACKED[request.node.callspec.params["packed"]](folder)
    before = model_identity(fresh)
    logits(fresh)
    assert model_identity(fresh) == before == model_identity(packed)


@by_packing
def test_look_ahead_finds_every_query_but_the_first(packed: PreTrainedModel) -> None:
    with hkv.attach(packed, SETTINGS) as runtime:
        early = EarlyQueries(packed, runtime.info)
        early.close()
    assert early.unforeseen == {0: "no layer comes before it", 1: "", 2: ""}


@by_packing
def test_few_tokens_leave_packed_layers_to_their_library(
    packed: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_tokens, "_LEAST_BYTES", 0)
    monkeypatch.setattr(few_tokens, "_trials", {})
    monkeypatch.setattr(few_tokens, "measure", trials_end(5.0, 10.0))
    few, alone = FewTokens(packed), logits(packed, TOKENS[:, :1])
    few.try_all()
    with few.served(1), torch.no_grad():
        served = packed(TOKENS[:, :1]).logits
        assert "forward" not in packed.get_submodule("model.layers.1.mlp.up_proj").__dict__
    torch.testing.assert_close(served, alone, atol=0.1, rtol=0.1)  # the head may be plain


@by_packing
def test_widening_leaves_packed_layers_as_they_are(
    packed: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_layers, "trial", lambda *_: WideningTrial(1.0, 10.0))
    layer = packed.get_submodule("model.layers.1")
    assert widened_bytes(layer, 1000) == 0
    before = logits(packed)
    with widened(layer, 1000):
        assert torch.equal(logits(packed), before)


@by_packing
def test_value_weighting_takes_norms_of_values_and_refuses_projected_ones(
    packed: PreTrainedModel,
) -> None:
    settings = {
        "method": "snapkv",
        "page_size": 4,
        "window_tokens": 8,
        "sink_tokens": 4,
        "budget_tokens": 20,
    }
    for weighting, why in (
        ("values", ""),
        ("projected", "as a plain matrix, got none or a packed"),
    ):
        config = {**settings, "observed_tokens": 8, "value_weighting": weighting}
        with hkv.load(packed, config=config) as llm:
            if not why:
                assert len(llm.generate(TOKENS, max_new_tokens=2).token_ids) == 2
                continue
            with pytest.raises(ConfigError, match=why):
                llm.generate(TOKENS, max_new_tokens=2)


@by_packing
def test_heads_are_scored(packed: PreTrainedModel) -> None:
    words = build_tokenizer()
    with hkv.load(packed, tokenizer=words, config=observing()) as llm:
        text = words.decode(torch.arange(3, 33).repeat(22).tolist())
        scores = observe_heads(llm, text, 600)
    assert [len(layer) for layer in scores] == [2, 2, 2]
    assert all(0 <= score <= 1 for layer in scores for score in layer)


@by_packing
def test_shapes_and_places_are_those_of_the_plain_model(
    packed: PreTrainedModel, folder: Path
) -> None:
    plain = load_model(folder, device="cpu")
    assert inspect_model(packed).layers == inspect_model(plain).layers
    assert devices_of(packed) == [torch.device("cpu")]


@by_packing
def test_bytes_are_those_of_packed_tensors(packed: PreTrainedModel, folder: Path) -> None:
    plain = sum(weight.nbytes for weight in load_model(folder, device="cpu").parameters())
    stored = sum(tensor.nbytes for _, tensor in stored_tensors(packed))
    assert stored < 0.75 * plain
    assert all(
        type(tensor) in (torch.Tensor, nn.Parameter) or tensor.dtype == torch.uint8
        for _, tensor in stored_tensors(packed)
    )


@by_packing
def test_weights_have_an_identity(packed: PreTrainedModel, folder: Path) -> None:
    """Of packed numbers, wherever they lie: a changed one is seen, the plain model is another."""
    mine = model_identity(packed)
    assert mine == model_identity(packed)
    assert mine.weights != model_identity(load_model(folder, device="cpu")).weights
    name, tensor = max(
        ((n, t) for n, t in stored_tensors(packed) if "down_proj" in n),
        key=lambda one: one[1].nbytes,
    )
    before = tensor.detach().clone()
    with torch.no_grad():
        tensor.detach().copy_(torch.zeros_like(before))
        assert model_identity(packed).weights != mine.weights, name
        tensor.detach().copy_(before)
    assert model_identity(packed) == mine


@by_packing
def test_a_saved_context_is_opened_with_the_same_packed_weights_only(
    packed: PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    with hkv.load(packed, config=SETTINGS) as llm:
        with llm.context(TOKENS) as made:
            answer = made.ask(torch.tensor([[5, 6]]), max_new_tokens=3).token_ids
            made.save(tmp_path / "book")
        with llm.open(tmp_path / "book") as again:
            assert again.ask(torch.tensor([[5, 6]]), max_new_tokens=3).token_ids == answer
    with (
        hkv.load(folder, device="cpu", config=SETTINGS) as other,
        pytest.raises(OtherContextError, match="a model of other weights"),
    ):
        other.open(tmp_path / "book")


@needs_engine
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_plan_counts_the_blocks_that_load_makes(folder: Path, weights: str) -> None:
    planned = model_facts(folder, weights=weights, device="cpu").weight_bytes
    model = load_model(folder, device="cpu", weights=weights)
    assert planned == sum(tensor.nbytes for _, tensor in stored_tensors(model))


@by_packing
def test_a_batch_goes_through_the_cache_of_an_attached_model(packed: PreTrainedModel) -> None:
    """Rows of different lengths, which are not the calls of `generate` above."""
    rows = torch.stack([TOKENS[0], TOKENS[0].flip(0)])
    with hkv.attach(packed, SETTINGS) as runtime, torch.no_grad():
        got = packed(rows, **passing(runtime.cache())).logits[:, -1]
    torch.testing.assert_close(got, logits(packed, rows)[:, -1], atol=0.2, rtol=0.1)
