"""Compiled decode steps: the same tokens, from one graph that is made once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import hybrid_kv as hkv
from hybrid_kv.errors import IntegrityError, UnsupportedModelError
from hybrid_kv.models import compiled
from hybrid_kv.models.cache_state import passing

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TIERED = {"sink_tokens": 16, "window_tokens": 32, "cold": {"top_k": 24, "index": "flat"}}


class Graphs:
    """Counts the graphs that are made, and compiles without generating code."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
        torch._dynamo.reset()
        self._counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        made = compiled.CompiledSteps

        def make(model: PreTrainedModel, text: Any) -> Any:
            return made(model, text, self._counter)  # type: ignore[arg-type]

        monkeypatch.setattr(compiled, "CompiledSteps", make)

    @property
    def made(self) -> int:
        return self._counter.frame_count


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    yield Graphs(monkeypatch, "aot_eager")
    torch._dynamo.reset()


def llama(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes})).eval()


def prompt(rows: int = 1, tokens: int = 137) -> Tensor:
    return torch.randint(2, 128, (rows, tokens), generator=torch.Generator().manual_seed(rows))


def tokens_of(model: PreTrainedModel, ids: Tensor, new: int, **options: Any) -> list[list[int]]:
    config = hkv.HybridConfig(**TIERED, compile_decode=options.pop("compile_decode"))
    with hkv.attach(model, config) as runtime:
        written = model.generate(
            ids, **passing(runtime.cache()), max_new_tokens=new, do_sample=False, **options
        )
    return written.tolist()  # type: ignore[no-any-return]


def gpt_oss() -> PreTrainedModel:
    torch.manual_seed(0)
    full = {"layer_types": ["full_attention"] * 3, "num_local_experts": 2, "num_experts_per_tok": 1}
    return GptOssForCausalLM(GptOssConfig(**{**SHAPE, **full})).eval()


@pytest.mark.parametrize(
    "make", [llama, lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()], ids=["llama", "qwen3"]
)
def test_a_step_of_any_length_runs_the_same_graph(graphs: Graphs, make: Any) -> None:
    torch.manual_seed(0)
    model, ids = make(), prompt()
    plain = tokens_of(model, ids, 40, compile_decode=False)
    assert tokens_of(model, ids, 40, compile_decode=True) == plain
    assert graphs.made == 1


def test_another_conversation_needs_no_other_graph(graphs: Graphs) -> None:
    model = llama()
    with hkv.attach(model, hkv.HybridConfig(**TIERED, compile_decode=True)) as runtime:
        for tokens in (90, 201, 137):
            model.generate(
                prompt(1, tokens),
                **passing(runtime.cache()),
                max_new_tokens=5,
                do_sample=False,
            )
    assert graphs.made == 1


def test_padded_rows_are_as_without_a_graph(graphs: Graphs) -> None:
    model, ids = llama(), prompt(3)
    mask = torch.ones_like(ids)
    mask[0, :41] = mask[2, :7] = 0
    plain = tokens_of(model, ids, 20, compile_decode=False, attention_mask=mask)
    assert tokens_of(model, ids, 20, compile_decode=True, attention_mask=mask) == plain
    assert graphs.made == 1


def test_learned_sinks_are_applied(graphs: Graphs) -> None:
    model, ids = gpt_oss(), prompt()
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.sinks, std=2.0)
    plain = tokens_of(model, ids, 12, compile_decode=False)
    assert tokens_of(model, ids, 12, compile_decode=True) == plain


@pytest.mark.slow
def test_the_native_compiler_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(), prompt()
    plain = tokens_of(model, ids, 20, compile_decode=False)
    graphs = Graphs(monkeypatch, "inductor")
    assert tokens_of(model, ids, 20, compile_decode=True) == plain
    assert graphs.made == 1


def test_positions_need_not_be_given(graphs: Graphs) -> None:
    def logits(compile_decode: bool) -> Tensor:
        config = hkv.HybridConfig(**TIERED, compile_decode=compile_decode)
        with hkv.attach(model, config) as runtime, torch.inference_mode():
            cache = runtime.cache()
            model(prompt(), **passing(cache))
            steps = [model(prompt(1, 1), **passing(cache)).logits for _ in range(3)]
        return torch.cat(steps)

    model = llama()
    torch.testing.assert_close(logits(compile_decode=True), logits(compile_decode=False))
    assert graphs.made == 1


def test_a_later_turn_is_taken_without_the_graph(graphs: Graphs) -> None:
    def last(compile_decode: bool) -> list[int]:
        config = hkv.HybridConfig(**TIERED, compile_decode=compile_decode)
        with hkv.attach(model, config) as runtime:
            cache = runtime.cache()
            first = model.generate(prompt(), **passing(cache), max_new_tokens=8, do_sample=False)
            more = torch.cat([first, prompt(1, 50)], 1)
            text = model.generate(more, **passing(cache), max_new_tokens=8, do_sample=False)
        return text[0].tolist()  # type: ignore[no-any-return]

    model = llama()
    assert last(compile_decode=True) == last(compile_decode=False)
    assert graphs.made == 1


def test_closing_leaves_no_trace(graphs: Graphs) -> None:
    model = llama()
    before = {id(module): set(module.__dict__) for module in model.modules()}
    tokens_of(model, prompt(), 3, compile_decode=True)
    assert {id(module): set(module.__dict__) for module in model.modules()} == before


def test_a_forward_that_somebody_set_is_put_back(graphs: Graphs) -> None:
    model = llama()
    theirs = model.forward = model.forward  # an instance attribute, as accelerate's hooks make it
    tokens_of(model, prompt(), 3, compile_decode=True)
    assert model.__dict__["forward"] == theirs


def test_models_with_windows_are_refused() -> None:
    model = Gemma2ForCausalLM(Gemma2Config(**SHAPE, sliding_window=32))
    with pytest.raises(UnsupportedModelError, match=r"layer 0 of Gemma2ForCausalLM does not; set"):
        hkv.attach(model, hkv.HybridConfig(compile_decode=True))


def test_what_cannot_be_one_graph_is_refused(graphs: Graphs) -> None:
    model = llama()
    norm = model.model.norm
    plain = norm.forward

    def speaks(hidden: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return plain(hidden)  # type: ignore[no-any-return]

    norm.forward = speaks
    with pytest.raises(UnsupportedModelError, match=r"one graph: .*; set compile_decode=False"):
        tokens_of(model, prompt(), 3, compile_decode=True)


def test_a_graph_outside_of_a_step_is_an_error(graphs: Graphs) -> None:
    model = llama()
    with hkv.attach(model, hkv.HybridConfig(compile_decode=True)) as runtime:
        steps = runtime._serving._steps
        assert steps is not None
        q = torch.zeros(1, 6, 1, 8)
        with pytest.raises(IntegrityError, match="outside of a decode step"):
            steps.attend(0, q, q[:, :2], q[:, :2], 1.0, None)


def test_exact_decoding_drafts_by_compiled_steps(graphs: Graphs) -> None:
    model, ids = llama(num_hidden_layers=2), prompt()
    few = {**TIERED, "cold": {"top_k": 2, "index": "flat"}}
    with hkv.load(model, config="full") as llm:
        want = llm.generate(ids, max_new_tokens=12).token_ids
    with hkv.load(model, config=hkv.HybridConfig(**few, compile_decode=True)) as llm:
        found = llm.generate(ids, max_new_tokens=12, exact=True)
    assert found.token_ids == want
    assert found.exact is not None
    assert found.exact.passes > 0
    assert graphs.made > 0
