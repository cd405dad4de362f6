"""Whole decode steps as one captured graph; what it owns is undefined before each replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

import hybrid_kv as hkv
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.ops.pinned import device_in_use
from tests.contracts.architectures import scale_weights
from tests.contracts.edges.further_models import further_config
from tests.device import emulated
from tests.device.cuda import values
from tests.device.machine import Launch, Machine
from tests.device.models import llama, small, tokens

METHODS = ("full", "quest", "streaming_llm", "hybrid")
READY = 2
"""Steps until one is captured: one makes the plan, one runs where captures are made."""


def plain(method: str, page_size: int = 16) -> hkv.HybridConfig:
    config = small(method, page_size=page_size)
    return config.replace(select="device") if method == "hybrid" else config


def captured(method: str, page_size: int = 16) -> hkv.HybridConfig:
    return plain(method, page_size).replace(capture_decode=True)


def graph_of(cache: TieredCache) -> dict[str, Any]:
    found: dict[str, Any] = cache.kv.describe_steps()[0]["graph"]
    return found


PAGE, AFTER = 4, 10
"""Steps of a cache and of its fork, each: a page begins, and one leaves the window."""


@pytest.mark.parametrize(
    ("method", "prompt"), [("full", 239), ("quest", 239), ("streaming_llm", 130), ("hybrid", 130)]
)
def test_replayed_steps_are_those_of_eager_ones(method: str, prompt: int) -> None:
    """Pages begin and leave; a list of 60 pages outgrows its room for 64; a fork and a crop go on.
    A step's logits stay when others have followed.
    """
    count = 20

    def steps(config: hkv.HybridConfig, machine: Machine) -> list[Tensor]:
        model, parts = llama().to("cuda"), []  # type: ignore[arg-type]
        with torch.inference_mode(), hkv.attach(model, config) as runtime:
            cache = runtime.cache()

            def forward(one: TieredCache, seed: int, new: int = 1) -> None:
                ids = tokens(new, seed).cuda()
                parts.append(model(ids, **passing(one)).logits[:, -1])

            forward(cache, 1, prompt)
            for number in range(count):
                forward(cache, 2 + number)
            cache.crop(-5)
            other = cache.fork()
            for number in range(AFTER):
                forward(cache, 200 + number)
                forward(other, 300 + number)
            for one in (cache, other):
                one.check_integrity()
            work.append(cache.work)
            if config.capture_decode:
                told = [graph_of(one) for one in (cache, other)]
                # Once each; again where the list finds no room, or a fork begins an extent.
                captures = {"streaming_llm": 2, "hybrid": 4}.get(method, 3)
                assert sum(one["captures"] for one in told) == captures
                assert sum(one["replays"] for one in told) >= count + 2 * AFTER - 10
        return list(map(values, parts))

    work: list[Any] = []
    with emulated(kernels="defined") as machine:
        expected = steps(plain(method, PAGE), machine)
    with emulated(schedule="late", kernels="defined") as machine:
        found = steps(captured(method, PAGE), machine)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert work[0] == work[1]


Forward = Callable[..., Tensor]


@contextmanager
def ready(
    config: hkv.HybridConfig | None = None, **options: Any
) -> Iterator[tuple[Machine, torch.nn.Module, TieredCache, Forward]]:
    """A model with a cache whose next step is captured."""
    with emulated(kernels="defined", **options) as machine:
        model = llama().to("cuda")  # type: ignore[arg-type]

        def forward(cache: TieredCache, seed: int, **given: Any) -> Tensor:
            return values(model(tokens(1, seed).cuda(), **passing(cache), **given).logits)

        with torch.inference_mode(), hkv.attach(model, config or captured("full")) as runtime:
            cache = runtime.cache()
            model(tokens(131).cuda(), **passing(cache))
            for number in range(READY):
                forward(cache, number)
            yield machine, model, cache, forward


@pytest.mark.parametrize("method", METHODS)
def test_a_step_tells_the_same_whenever_it_is_captured(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers, shapes, and addresses of all that was there before; a step waits for nothing."""
    made: list[Any] = []
    with ready(captured(method), schedule="late") as (machine, model, cache, forward):
        graph = torch.cuda.CUDAGraph

        def make() -> Any:
            made.append(graph())
            return made[-1]

        monkeypatch.setattr(torch.cuda, "CUDAGraph", make)
        for number in range(2):
            ids, before = tokens(1, 10 + number).cuda(), machine.counts.copy()
            with machine.no_waits():
                model(ids, **passing(cache))
            told = machine.counts.since(before)
            assert (told.captures, told.replays, told.num_waits) == (1, 1, 0)
            forward(cache, 20, logits_to_keep=1)  # of another kind,
            forward(cache, 30)  # so that the first one is made ready again
    first, second = (described(one.launches) for one in made)
    assert len(first) > 60
    assert first == second


RESULTS = {
    **dict.fromkeys(("attend_pages", "aten.topk.default", "find", "merge", "attend_candidates"), 2),
    "attend_unread": 3,
}
"""Tensors that a launch makes, where they are several."""


def described(launches: list[Launch]) -> list[tuple[object, ...]]:
    """Launches with what they take; what they make themselves is the same wherever it lies."""
    made: list[range] = []

    def named(operand: Any) -> object:
        if not isinstance(operand, tuple):
            return operand
        if not (len(operand) == 4 and isinstance(operand[3], torch.dtype)):
            return tuple(map(named, operand))
        own = any(operand[0] in memory for memory in made)
        return ("own" if own else operand[0], *operand[1:])

    found = []
    for one in launches:
        for operand in () if one.name == "append_at" else one.operands[-RESULTS.get(one.name, 1) :]:
            address, shape, stride, dtype = operand  # type: ignore[misc]
            places = sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1
            made.append(range(address, address + places * dtype.itemsize))
        found.append((one.name, *map(named, one.operands)))
    return found


def test_what_a_graph_cannot_say_is_refused_by_name_and_runs_eagerly() -> None:
    with ready() as (machine, model, cache, forward):

        def code(**given: Any) -> str:
            before = machine.counts.replays
            forward(cache, 3, **given)
            graph = graph_of(cache)
            assert (machine.counts.replays > before) is (graph["code"] == "")
            return str(graph["code"])

        layer = model.model.layers[0]  # type: ignore[union-attr, index]
        assert code() == ""
        hook = layer.register_forward_hook(lambda *_: None)  # type: ignore[union-attr, operator]
        assert code() == "hooks"
        hook.remove()
        assert [code(), code()] == ["first", ""]
        own = layer.mlp.down_proj  # type: ignore[union-attr]
        own.weight = torch.nn.Parameter(own.weight.detach() * 2)  # type: ignore[union-attr, operator]
        assert [code(), code()] == ["first", ""]
        own.weight.mul_(3.0)  # type: ignore[union-attr, operator]
        assert code() == ""  # a replay reads it where it lies
        model.train()
        assert code() == "training"
        model.eval()
        cache.kv.look_every(3)
        assert code() == "watched"
        cache.kv.look_every(0)
        assert code(output_hidden_states=True) == "inputs"
        assert [code(), code()] == ["first", ""]  # transformers' hooks for these states stay
        model(tokens(3).cuda(), **passing(cache))
        assert graph_of(cache)["code"] == "several_tokens"
        cache.check_integrity()


def test_weights_that_others_took_the_place_of_are_read() -> None:
    def steps(config: hkv.HybridConfig) -> list[Tensor]:
        with ready(config) as (_, model, cache, forward):
            found = [forward(cache, 9) for _ in range(3)]
            own = model.model.layers[1].mlp.down_proj  # type: ignore[union-attr, index]
            own.weight = torch.nn.Parameter(own.weight.detach() * 2)  # type: ignore[union-attr]
            return [*found, *(forward(cache, 9) for _ in range(3))]

    for one, other in zip(steps(captured("full")), steps(small("full")), strict=True):
        assert torch.equal(one, other)


def test_transformers_generates_by_replays() -> None:
    """It gives a mask and positions, which change in each step."""

    def generated(config: hkv.HybridConfig) -> list[int]:
        with emulated(kernels="defined") as machine:
            model = llama().to("cuda")  # type: ignore[arg-type]
            with hkv.attach(model, config) as runtime:
                cache = runtime.cache()
                found = model.generate(  # type: ignore[operator]
                    tokens(50).cuda(),
                    past_key_values=cache,
                    max_new_tokens=20,
                    do_sample=False,
                    eos_token_id=None,
                )
                if config.capture_decode:
                    assert graph_of(cache)["reason"] == ""
                    assert machine.counts.replays >= 14
                return values(found)[0].tolist()  # type: ignore[no-any-return]

    assert generated(captured("quest")) == generated(small("quest"))


def test_rows_are_not_captured() -> None:
    with emulated(kernels="defined") as machine:
        model = llama().to("cuda")  # type: ignore[arg-type]
        with torch.inference_mode(), hkv.attach(model, captured("full")) as runtime:
            cache = runtime.cache()
            model(tokens(40).repeat(2, 1).cuda(), **passing(cache))
            for number in range(4):
                model(tokens(1, number).repeat(2, 1).cuda(), **passing(cache))
            assert graph_of(cache)["code"] == "several_rows"
            assert machine.counts.captures == 0


def test_sliding_layers_are_refused_by_name() -> None:
    """Transformers puts their keys into new memory in each step, and a graph reads the old."""
    config = Gemma3TextConfig(
        **{"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
    )
    with emulated(kernels="defined") as machine:
        model = Gemma3ForCausalLM(config).eval().to("cuda")
        with torch.inference_mode(), hkv.attach(model, captured("full")) as runtime:
            cache = runtime.cache()
            for number, count in enumerate((40, 1, 1, 1, 1)):
                model(tokens(count, number).cuda(), **passing(cache))
            graph = graph_of(cache)
            assert graph["code"] == "layers"
            assert "layer 0" in graph["reason"]
            assert "SlidingLayer" in graph["reason"]
            assert machine.counts.captures == 0


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2"])
def test_states_of_a_fixed_size_are_written_by_replays(kind: str) -> None:
    """States by where they lie: a fork has its own, and others may take their place."""

    def steps(config: hkv.HybridConfig) -> list[Tensor]:
        torch.manual_seed(2)
        model = AutoModelForCausalLM.from_config(further_config(kind)).eval()
        scale_weights(model)
        model.to("cuda")
        parts: list[Tensor] = []
        with torch.inference_mode(), hkv.attach(model, config) as runtime:
            cache = runtime.cache()
            parts.append(model(tokens(130).cuda(), **passing(cache)).logits[:, -1])
            caches = [cache]
            for number in range(12):
                if number == 6:
                    caches.append(cache.fork())
                if number == 9:
                    moved: Any = cache.layers[0]
                    moved.conv_states = {0: moved.conv_states[0].clone()}
                for one in caches:
                    ids = tokens(1, 20 * len(parts)).cuda()
                    parts.append(model(ids, **passing(one)).logits[:, -1])
            if config.capture_decode:
                told = [graph_of(one) for one in caches]
                assert [one["captures"] for one in told] == [2, 1]
                assert sum(one["replays"] for one in told) >= 18 - 3 * READY
        return list(map(values, parts))

    with emulated(kernels="defined"):
        expected = steps(plain("hybrid"))
    with emulated(schedule="late", kernels="defined"):
        found = steps(captured("hybrid"))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_capture_that_fails_is_followed_by_eager_steps_and_tried_again() -> None:
    def steps(config: hkv.HybridConfig) -> list[Tensor]:
        with ready(config) as (machine, model, cache, forward):
            last, is_over = model.model.layers[1].mlp, []  # type: ignore[union-attr, index]
            plain = last.forward  # type: ignore[union-attr]

            def waits(x: Tensor) -> Tensor:
                if machine.capture is not None and not is_over:
                    torch.cuda.synchronize()
                return plain(x)  # type: ignore[operator, no-any-return]

            last.forward = waits  # type: ignore[union-attr, assignment]
            found = [forward(cache, 60), forward(cache, 61)]
            if config.capture_decode:
                graph = graph_of(cache)
                assert graph["code"] == "capture"
                assert "not permitted" in graph["reason"]
            is_over.append(True)
            found += [forward(cache, 70 + number) for number in range(20)]
            if config.capture_decode:
                assert graph_of(cache)["code"] == ""
                assert graph_of(cache)["captures"] == 1
            cache.check_integrity()
            return found

    for one, other in zip(steps(captured("full")), steps(small("full")), strict=True):
        assert torch.equal(one, other)


def test_no_capture_begins_beside_work_of_others() -> None:
    with ready() as (_, _, cache, forward):
        with device_in_use():
            forward(cache, 1)
        assert graph_of(cache)["code"] == "busy"
        forward(cache, 2)
        assert graph_of(cache)["code"] == ""


def test_drafts_of_an_exact_answer_are_replayed() -> None:
    """A verification and its rollback lie between them; tokens are those of full attention."""
    with hkv.load(llama(), config=small("full")) as llm:
        expected = llm.generate(tokens(130), max_new_tokens=20).token_ids
    with emulated(schedule=3, kernels="defined"):
        model = llama().to("cuda")  # type: ignore[arg-type]
        with hkv.load(model, config=captured("hybrid")) as llm:
            found = llm.generate(tokens(130).cuda(), max_new_tokens=20, exact=5)
    assert found.token_ids == expected
    assert found.exact is not None
    assert found.exact.passes > 2
    assert found.exact.accepted < found.exact.drafted, "some were rolled back"
    replays = [step["graph"]["replays"] for step in found.steps]
    assert min(replays) > found.exact.drafted // 2
