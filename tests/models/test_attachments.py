"""Who may attach a model, how long it stays attached, and who may run it meanwhile."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.errors import BusyError, ConfigError, HybridKVError
from hybrid_kv.models.cache_state import passing
from tests.contracts.edges.calls import anatomy
from tests.models.folder import model, tokenizer

TEXT = "sea sky sun ice oak elm bee fox owl sea oak sky sea owl fox ice sun"
NEW = 12
TIERED: dict[str, Any] = {
    "page_size": 4,
    "sink_tokens": 4,
    "window_tokens": 8,
    "cold": {"top_k": "all"},
}


@pytest.fixture
def plain() -> Iterator[PreTrainedModel]:
    built = model()
    before = anatomy(built)
    yield built
    assert anatomy(built) == before, "every test leaves the model as it was"


def prompt(seed: int, tokens: int = 37) -> Tensor:
    return torch.randint(3, 12, (1, tokens), generator=torch.Generator().manual_seed(seed))


def answer(built: PreTrainedModel, ids: Tensor, cache: Any) -> list[int]:
    out: Any = built.generate(ids, **passing(cache), max_new_tokens=NEW, do_sample=False)
    return out[0].tolist()  # type: ignore[no-any-return]


def eager(built: PreTrainedModel, ids: Tensor) -> list[int]:
    return answer(built, ids, DynamicCache(config=built.config))


# A cache alone


@pytest.mark.parametrize("config", [hkv.HybridConfig(**TIERED), TIERED, "full", None], ids=str)
def test_a_cache_alone_works_as_those_of_transformers_do(
    plain: PreTrainedModel, config: Any
) -> None:
    want = eager(plain, prompt(0))
    assert answer(plain, prompt(0), hkv.HybridCache(plain, config)) == want
    cache = hkv.HybridCache(plain, config)
    first = answer(plain, prompt(0)[:, :20], cache)
    longer = torch.tensor([[*first, 3, 4, 5]])
    assert answer(plain, longer, cache) == eager(plain, longer)


def test_caches_of_one_model_share_its_attachment(plain: PreTrainedModel) -> None:
    first = hkv.HybridCache(plain, TIERED)
    attached = anatomy(plain)
    second = hkv.HybridCache(plain, "full")
    assert anatomy(plain) == attached
    assert (first.kv.means.method is second.kv.means.method, second.kv.config.method) == (
        False,
        "full",
    )
    del first
    assert anatomy(plain) == attached
    assert answer(plain, prompt(1), second) == eager(plain, prompt(1))


def test_parts_of_a_model_keep_modes_of_their_own(plain: PreTrainedModel) -> None:
    """As of one whose dropout is on while it answers, to see how sure it is."""
    plain.model.layers[1].mlp.train()
    modes = [part.training for part in plain.modules()]
    with hkv.attach(plain, TIERED) as runtime:
        assert [part.training for part in plain.modules()] == modes
        assert answer(plain, prompt(4), runtime.cache()) == eager(plain, prompt(4))
    assert [part.training for part in plain.modules()] == modes
    plain.eval()


def test_a_cache_of_an_attached_model_is_one_of_its_attachment(plain: PreTrainedModel) -> None:
    with hkv.attach(plain, TIERED) as runtime:
        cache = hkv.HybridCache(plain)
        assert isinstance(runtime.cache(), hkv.HybridCache)
        assert cache.kv.config == runtime.config
        assert answer(plain, prompt(2), cache) == eager(plain, prompt(2))
    with pytest.raises(ConfigError, match="detached"):
        answer(plain, prompt(2), cache)


def test_a_model_is_detached_when_its_last_cache_is_gone(plain: PreTrainedModel) -> None:
    gc.disable()
    try:
        before = anatomy(plain)
        cache = hkv.attach(plain, TIERED).cache()  # which nobody else refers to
        assert answer(plain, prompt(3), cache) == eager(plain, prompt(3))
        del cache
        assert anatomy(plain) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["prefill_chunk_tokens", "capture_decode"])
@pytest.mark.parametrize("way", ["attachment", "cache"])
def test_settings_of_the_model_are_not_set_for_one_cache(
    plain: PreTrainedModel, name: str, way: str
) -> None:
    """Regression: they were ignored."""
    value = {"prefill_chunk_tokens": 7, "capture_decode": True}[name]
    with hkv.attach(plain, TIERED) as runtime:
        make: Callable[[Any], Any] = {
            "attachment": runtime.cache,
            "cache": lambda config: hkv.HybridCache(plain, config),
        }[way]
        with pytest.raises(ConfigError, match=f"^{name} is set when the model is attached, .*got"):
            make({**TIERED, name: value})
        make("full")


def test_a_setting_that_a_cache_leaves_out_is_that_of_its_model(plain: PreTrainedModel) -> None:
    with hkv.attach(plain, {**TIERED, "prefill_chunk_tokens": 7}) as runtime:
        cache = runtime.cache(TIERED)
        assert answer(plain, prompt(4), cache) == eager(plain, prompt(4))
        runtime.cache(runtime.config.replace(top_k=5))
        for other in (hkv.HybridConfig(**TIERED), hkv.HybridConfig(method="quest", page_size=4)):
            runtime.cache(other.opened())
            runtime.cache(other.replace(audit_every=2))
            runtime.cache(other.at_budget("50%", 400))


def test_a_back_end_that_cannot_serve_is_refused_for_one_cache_too(plain: PreTrainedModel) -> None:
    with hkv.attach(plain, TIERED) as runtime, pytest.raises(HybridKVError, match="triton"):
        runtime.cache({**TIERED, "backend": "triton"})


# Orphans


def test_an_attachment_whose_owner_is_gone_is_taken_over(plain: PreTrainedModel) -> None:
    """Regression: "attached already", and nobody there who could detach it."""
    hkv.attach(plain)
    hkv.attach(plain).close()
    llm: Any = hkv.load(plain, tokenizer=tokenizer())
    llm.myself = llm  # only the collector finds out that it is gone
    del llm
    hkv.attach(plain).close()


def test_a_second_owner_is_told_how_to_end_the_first(plain: PreTrainedModel) -> None:
    with hkv.attach(plain), pytest.raises(ConfigError, match=r"attached already.*detach\(model\)"):
        hkv.attach(plain)


def test_anybody_can_detach_a_model(plain: PreTrainedModel) -> None:
    before = anatomy(plain)
    hkv.detach(plain)  # harmless
    with hkv.load(plain, tokenizer=tokenizer()) as llm:
        hkv.detach(plain)
        assert anatomy(plain) == before
        with pytest.raises(ConfigError, match="closed"):
            llm.generate(TEXT, max_new_tokens=2)
        with hkv.attach(plain, TIERED) as runtime:
            llm.close()  # ends its own attachment only
            want = eager(plain, prompt(5))
            assert answer(plain, prompt(5), runtime.cache()) == want


@pytest.mark.parametrize("wrong", [None, "model", torch.nn.Linear(2, 2), DynamicCache], ids=str)
@pytest.mark.parametrize("way", [hkv.attach, hkv.detach, hkv.HybridCache])
def test_what_is_no_transformers_model_is_refused(way: Callable[[Any], Any], wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"^model must be a loaded transformers model .*, got "):
        way(wrong)


def test_a_wrapped_model_is_pointed_at(plain: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="the model inside it, its attribute 'module'"):
        hkv.attach(torch.nn.DataParallel(plain))  # type: ignore[arg-type]


def test_a_method_that_is_refused_leaves_the_model_as_it_was(plain: PreTrainedModel) -> None:
    """Regression: the model's forwards stayed wrapped, and refused the caches of what came next."""
    before = anatomy(plain)
    with pytest.raises(ConfigError, match="heads must be a file"):
        hkv.attach(plain, "locret")
    assert anatomy(plain) == before
    with hkv.attach(plain, TIERED) as runtime:
        assert answer(plain, prompt(5), runtime.cache()) == eager(plain, prompt(5))


# Several threads


def test_forwards_of_several_threads_take_turns(plain: PreTrainedModel) -> None:
    """Regression: a thread turned the other's attention off, or stored in the other's cache."""
    want = [eager(plain, prompt(seed)) for seed in range(6)]
    with hkv.attach(plain, {**TIERED, "prefill_chunk_tokens": 7}) as runtime:

        def play(seed: int) -> list[int]:
            if seed % 3 == 2:
                return eager(plain, prompt(seed))
            return answer(plain, prompt(seed), runtime.cache())

        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(play, range(6))) == want


@pytest.mark.parametrize("call", ["generate", "send", "stream", "ask", "context"])
def test_a_second_call_meanwhile_is_told_that_the_model_is_busy(
    plain: PreTrainedModel, call: str
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hold(done: int, total: int) -> None:
        begun.set()
        go_on.wait(30)

    with hkv.load(plain, tokenizer=tokenizer(), config=TIERED) as llm:
        talk, context = llm.conversation(), llm.context(TEXT)
        calls: dict[str, Callable[[], Any]] = {
            "generate": lambda: llm.generate(TEXT),
            "send": lambda: talk.send(TEXT),
            "stream": lambda: list(llm.generate(TEXT, stream=True)),
            "ask": lambda: context.ask("fox"),
            "context": lambda: llm.context(TEXT),
        }
        with ThreadPoolExecutor(1) as other:
            first = other.submit(lambda: llm.generate(TEXT, max_new_tokens=NEW, on_prefill=hold))
            assert begun.wait(30)
            try:
                with pytest.raises(BusyError, match=r"^the model is generating in another "):
                    calls[call]()
            finally:
                go_on.set()
            token_ids = first.result().token_ids
        assert token_ids == llm.generate(TEXT, max_new_tokens=NEW).token_ids, "it was disturbed"


def test_a_call_from_inside_a_forward_is_told_so(plain: PreTrainedModel) -> None:
    with hkv.load(plain, tokenizer=tokenizer(), config=TIERED) as llm:
        with pytest.raises(BusyError, match="in this thread"):
            llm.generate(TEXT, on_prefill=lambda done, total: llm.generate("fox") and None)
        assert llm.generate(TEXT, max_new_tokens=3).token_ids


def test_leaving_the_block_waits_for_a_forward_and_ends_the_call(plain: PreTrainedModel) -> None:
    with hkv.load(plain, tokenizer=tokenizer(), config=TIERED) as llm:
        stream = llm.generate(TEXT, max_new_tokens=200, stream=True)
        next(stream)
    with pytest.raises(ConfigError, match="detached"):
        list(stream)
