"""Models that their user compiles with torch.compile: attached, they answer as if nobody had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import guards
from transformers import DynamicCache

import hybrid_kv as hkv
from hybrid_kv.models.cache_state import passing
from tests.contracts.architectures import ARCHITECTURES
from tests.contracts.edges.calls import CLOSE, fresh, greedy, prompt

SMALL = {"page_size": 4, "sink_tokens": 4, "window_tokens": 8, "prefill_chunk_tokens": 10}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full", "page_size": 4, "prefill_chunk_tokens": 10},
    "hybrid": {"method": "hybrid", "top_k": 3, **SMALL},
}
FIRST, LENGTH = 33, 37


@pytest.fixture(autouse=True)
def _no_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # What the compiler measures of each graph's guards: a seventh of the time, with caches emptied.
    monkeypatch.setattr(guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def small(name: str) -> Any:
    """A model of two layers, each of which is compiled by itself."""
    config: Any = ARCHITECTURES[name]()
    config.num_hidden_layers = 2
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = kinds[:2]
    return fresh(config)


def called(model: Any, **options: Any) -> Any:
    return torch.compile(model, **options)


def forward_of_it(model: Any, **options: Any) -> Any:
    return torch.compile(model, **options).forward


def assigned(model: Any, **options: Any) -> Any:
    model.forward = torch.compile(model.forward, **options)
    return model


def in_place(model: Any, **options: Any) -> Any:
    model.compile(**options)
    return model


def layer_by_layer(model: Any, **options: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(**options)
    return model


def layers_forwards(model: Any, **options: Any) -> Any:
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, **options)
    return model


def attention_only(model: Any, **options: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.compile(**options)
        layer.mlp = torch.compile(layer.mlp, **options)
    return model


WAYS = [called, forward_of_it, assigned, in_place, layer_by_layer, layers_forwards, attention_only]


def steps(call: Callable[..., Any], cache: Any) -> Tensor:
    """Logits of a prompt and of single tokens behind it; the length is looked at before each."""
    ids, found = prompt(length=LENGTH), []
    for start, stop in [(0, FIRST), *((at, at + 1) for at in range(FIRST, LENGTH))]:
        assert cache.get_seq_length() == start
        found.append(call(ids[:, start:stop], **passing(cache))[0])
        assert cache.get_seq_length() == stop
    cache.check_integrity()
    return torch.cat(found, 1)


def answers(
    model: Any, call: Any, make: Callable[[Any], Any], method: str = "hybrid"
) -> list[Tensor]:
    """The logits of direct calls, and what generate writes."""
    settings = METHODS[method]
    return [steps(call, make(settings)), greedy(model, prompt(), make(settings))]


@pytest.fixture(scope="module")
def want() -> dict[str, list[Tensor]]:
    model = small("llama")
    with torch.no_grad(), hkv.attach(model, METHODS["hybrid"]) as runtime:
        return {method: answers(model, model, runtime.cache, method) for method in METHODS}


def assert_same(found: list[Tensor], want: list[Tensor]) -> None:
    for own, exact in zip(found, want, strict=True):
        torch.testing.assert_close(own, exact, **CLOSE)


@pytest.mark.parametrize(
    ("way", "order"),
    list(zip(WAYS, cycle(["before", "after"]), strict=False)),
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_compiled_model_answers_as_one_that_is_not(
    way: Callable[..., Any], order: str, want: dict[str, list[Tensor]]
) -> None:
    """Regression: nothing was stored, every step saw its own token alone, and nobody said so."""
    model: Any = small("llama")
    call = way(model, backend="eager") if order == "before" else None
    with hkv.attach(model, METHODS["hybrid"]) as runtime:
        call = way(model, backend="eager") if call is None else call
        for method in METHODS if way in (called, layer_by_layer) else ["hybrid"]:
            assert_same(answers(model, call, runtime.cache, method), want[method])


@pytest.mark.parametrize(("name", "order"), [("gemma2", "after"), ("gpt_oss", "before")])
def test_models_with_windows_are_no_exception(name: str, order: str) -> None:
    plain, model = (small(name) for _ in range(2))
    with hkv.attach(plain, METHODS["hybrid"]) as runtime:
        want = answers(plain, plain, runtime.cache)
    call = attention_only(model, backend="eager") if order == "before" else None
    with hkv.attach(model, METHODS["hybrid"]) as runtime:
        call = attention_only(model, backend="eager") if call is None else call
        assert_same(answers(model, call, runtime.cache), want)


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_decoder_without_its_head_is_no_exception(order: str) -> None:
    """Here the compiled forward is the one that calls the layers."""
    plain, model = (small("llama").model for _ in range(2))
    with hkv.attach(plain, METHODS["hybrid"]) as runtime:
        want = steps(plain, runtime.cache())
    call = assigned(model, backend="eager") if order == "before" else None
    with hkv.attach(model, METHODS["hybrid"]) as runtime:
        call = assigned(model, backend="eager") if call is None else call
        torch.testing.assert_close(steps(call, runtime.cache()), want, **CLOSE)


@pytest.mark.parametrize("way", [layers_forwards, attention_only])
def test_later_prompts_bring_no_graphs(way: Callable[..., Any]) -> None:
    """Beyond its limit of graphs the compiler gives up a function, with a warning alone."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model: Any = way(small("llama"), backend=backend, dynamic=True)
    counts = []
    with hkv.attach(model, "full") as runtime:
        for length in (90, 110, 70):
            model(prompt(length=length), **passing(runtime.cache()), logits_to_keep=1)
            counts.append(len(graphs))
    assert counts == counts[:1] * 3


def test_compiled_again_it_is_still_served(want: dict[str, list[Tensor]]) -> None:
    """torch.compile looks on a function for the one that it was made of."""
    model: Any = assigned(small("llama"), backend="eager")
    with hkv.attach(model, METHODS["hybrid"]) as runtime:
        call = assigned(model, backend="eager")
        assert_same(answers(model, call, runtime.cache), want["hybrid"])


def test_the_passes_of_the_default_compiler_are_no_exception(want: dict[str, list[Tensor]]) -> None:
    """But for the code that it writes, which would be compiled for half a minute."""
    model: Any = small("llama")
    for part in (model.model.layers[0].self_attn, model.model.layers[0].mlp, model):
        part.compile(backend="aot_eager")
    with hkv.attach(model, METHODS["hybrid"]) as runtime:
        torch.testing.assert_close(steps(model, runtime.cache()), want["hybrid"][0], **CLOSE)


@pytest.mark.parametrize(
    ("way", "order"),
    list(zip(WAYS[:5], cycle(["before", "after"]), strict=False)),
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_graph_that_may_not_be_cut_is_refused(way: Callable[..., Any], order: str) -> None:
    model: Any = small("llama")
    call = way(model, backend="eager", fullgraph=True) if order == "before" else None
    with hkv.attach(model, "full") as runtime:
        call = way(model, backend="eager", fullgraph=True) if call is None else call
        cache = runtime.cache()
        with pytest.raises(Exception, match="without fullgraph=True"):
            call(prompt(), **passing(cache))
        assert cache.get_seq_length() == 0


def test_caches_of_transformers_stay_in_one_graph() -> None:
    model: Any = small("llama")
    call = torch.compile(model, backend="eager", fullgraph=True)
    want = model(prompt()).logits
    with hkv.attach(model, "full"):
        found = call(prompt(), **passing(DynamicCache(config=model.config))).logits
    torch.testing.assert_close(found, want, **CLOSE)


def test_what_the_user_compiled_is_there_after_the_attachment() -> None:
    model: Any = assigned(small("llama"), backend="eager")
    theirs, want = model.forward, model(prompt()).logits
    with hkv.attach(model, "full") as runtime:
        model(prompt(), **passing(runtime.cache()))
    assert model.forward is theirs
    torch.testing.assert_close(model(prompt()).logits, want, **CLOSE)


def test_exact_decoding_verifies_with_a_compiled_model(want: dict[str, list[Tensor]]) -> None:
    """Passes of several tokens after steps of one, which are cropped."""
    settings = {"method": "hybrid", "cold.top_k": 2, **SMALL}
    model = layer_by_layer(small("llama"), backend="eager", dynamic=True)
    with hkv.load(model, config=settings) as llm:
        found = llm.generate(prompt(), exact=3, max_new_tokens=8)
    assert found.token_ids == want["full"][1][0, -8:].tolist()
    assert found.exact is not None
    assert found.exact.drafted > found.exact.accepted > 0
