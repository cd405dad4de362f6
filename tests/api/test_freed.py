"""What nobody refers to is freed at once, not when the collector of cycles comes by.

Regression: a layer knew its cache and the cache its layers, so that a sweep over contexts held one
cache after the other until the collector ran; an index that failed, and an error that was raised
from a variable, kept their frames in the same way.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.errors import CapacityError, HybridKVError
from hybrid_kv.index.flat import FlatIndex
from hybrid_kv.index.graph import GraphIndex
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.watch.audit import Look
from tests.kit import cache_of, kept_alive, wait_for_builds
from tests.models.folder import model, tokenizer

TEXT = "sea sky sun ice oak elm bee fox owl sea oak sky sea owl fox ice sun"
IDS = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 11, 3, 7, 4, 3, 11, 10, 6, 5] * 3])
TIERED: dict[str, Any] = {
    "page_size": 4,
    "sink_tokens": 4,
    "window_tokens": 8,
    "cold": {"top_k": 3, "index": "flat"},
}
UNJUDGED = {"min_recall": 0, "max_missed_mass": None, "max_output_error": None}
"""Which heads are looked at in time depends on the machine, and of a random model the later answers
are worse than an audit allows."""
METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "hybrid": TIERED,
    "audited": {**TIERED, "audit_every": 1, "audit": UNJUDGED, "index_build": "wait"},
    "graph": {**TIERED, "cold": {"top_k": 3, "index": {"kind": "graph", "min_keys": 1}}},
    "streaming": {"method": "streaming_llm", "page_size": 4, "sink_tokens": 4, "window_tokens": 8},
}


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return model()


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=METHODS)
def llm(plain: PreTrainedModel, request: pytest.FixtureRequest) -> Iterator[hkv.LLM]:
    config = hkv.HybridConfig(**METHODS[request.param])
    with hkv.load(plain, tokenizer=tokenizer(), config=config) as loaded:
        yield loaded


def parts(cache: TieredCache) -> dict[str, weakref.ref[Any]]:
    """What a cache holds, by name; at least one layer."""
    return {"cache": weakref.ref(cache), "kv": weakref.ref(cache.kv), **kept_alive(cache)}


def alive(refs: dict[str, weakref.ref[Any]]) -> list[str]:
    return [name for name, ref in refs.items() if ref() is not None]


def settle(kv: Any) -> None:
    """Waits for work beside the cache, which may keep what it works on until it is done."""
    if kv.auditor is not None:
        kv.auditor.settle()
    wait_for_builds(kv)


def greedy(plain: PreTrainedModel, cache: TieredCache, **options: Any) -> None:
    plain.generate(IDS, **passing(cache), max_new_tokens=5, do_sample=False, **options)
    settle(cache.kv)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_a_dropped_cache_is_gone(llm: hkv.LLM, options: dict[str, Any]) -> None:
    cache = llm.runtime.cache()
    greedy(llm.model, cache, **options)
    refs = parts(cache)
    assert len(refs) >= 6, "or nothing is tested"
    del cache
    assert alive(refs) == []


def test_a_dropped_conversation_is_gone(llm: hkv.LLM) -> None:
    talk = llm.conversation()
    talk.send(TEXT, max_new_tokens=5)
    talk.send("fox owl", max_new_tokens=5)
    settle(cache_of(talk).kv)
    refs = {"conversation": weakref.ref(talk), **parts(cache_of(talk))}
    del talk
    assert alive(refs) == []


def test_a_dropped_context_is_gone_with_the_branch_of_a_question(llm: hkv.LLM) -> None:
    contexts = [llm.context(TEXT)]
    branch: dict[str, weakref.ref[Any]] = {}

    def look(done: int, total: int) -> None:
        seen = parts(cache_of(contexts[0])).items()
        branch.update({f"branch {name}": ref for name, ref in seen})

    contexts[0].ask("fox owl", max_new_tokens=5, on_prefill=look)
    settle(cache_of(contexts[0]).kv)
    refs = parts(cache_of(contexts[0]))
    kept = {id(ref()) for ref in refs.values()}
    assert [n for n, ref in branch.items() if ref() is not None and id(ref()) not in kept] == []
    contexts.clear()
    assert alive({**refs, **branch}) == []


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("at", [0, 3], ids=["in the prompt", "in the answer"])
def test_a_cache_is_gone_after_an_error_in_mid_generation(
    llm: hkv.LLM, error: type[BaseException], at: int
) -> None:
    calls = iter(range(100))
    refs: dict[str, weakref.ref[Any]] = {}
    held = [llm.runtime.cache()]

    def fail(*_: object) -> None:
        if next(calls) == at:
            refs.update(parts(held[0]))
            raise error

    hook = llm.model.model.layers[1].register_forward_hook(fail)
    try:
        greedy(llm.model, held[0])
    except error:
        pass
    else:
        pytest.fail("no error came")
    finally:
        hook.remove()
    settle(held[0].kv)
    assert "layer 0" in refs
    held.clear()
    assert alive(refs) == []


def test_a_conversation_is_gone_after_a_turn_for_which_memory_ran_out(llm: hkv.LLM) -> None:
    talk = llm.conversation()
    talk.send(TEXT, max_new_tokens=5)
    hook = llm.model.model.layers[1].register_forward_hook(_out_of_memory)
    try:
        talk.send("fox", max_new_tokens=5)
    except CapacityError:
        pass
    else:
        pytest.fail("no error came")
    finally:
        hook.remove()
    settle(cache_of(talk).kv)
    refs = {"conversation": weakref.ref(talk), **parts(cache_of(talk))}
    del talk
    assert alive(refs) == []


def _out_of_memory(*_: object) -> None:
    raise MemoryError("11 bytes")


@pytest.mark.parametrize("pieces", [None, 0, 1], ids=["read to its end", "not read", "begun"])
def test_a_dropped_stream_ends_and_is_gone(llm: hkv.LLM, pieces: int | None) -> None:
    before = threading.active_count()
    talk = llm.conversation()
    stream = talk.send(TEXT, max_new_tokens=50, stream=True)
    for _ in range(pieces or 0):
        next(stream)
    if pieces is None:
        list(stream)
    refs = {
        "stream": weakref.ref(stream),
        "conversation": weakref.ref(talk),
        **parts(cache_of(talk)),
    }
    del talk, stream
    assert "stream" not in alive(refs)
    while any(thread.name == "hybrid-kv-generate" for thread in threading.enumerate()):
        pytest.fail("the thread of a dropped stream goes on")
    _until(lambda: not alive(refs))
    # Those that build, take moments and audit are of the model: they stay.
    assert threading.active_count() <= before + 3


def test_a_stream_that_failed_is_gone(llm: hkv.LLM) -> None:
    hook = llm.model.model.layers[1].register_forward_hook(_out_of_memory)
    stream = llm.generate(TEXT, max_new_tokens=5, stream=True)
    ref = weakref.ref(stream)
    try:
        list(stream)
    except HybridKVError:
        pass
    finally:
        hook.remove()
    del stream
    assert ref() is None


def test_closing_gives_the_memory_back_while_the_cache_is_referred_to(llm: hkv.LLM) -> None:
    cache = llm.runtime.cache()
    greedy(llm.model, cache)
    refs = parts(cache)
    cache.close()
    assert alive(refs) == ["cache", "kv"]
    with pytest.raises(HybridKVError, match="this cache is closed and holds nothing any more; "):
        llm.model.generate(IDS, **passing(cache), max_new_tokens=2)


def test_leaving_the_block_gives_the_memory_of_all_caches_back(plain: PreTrainedModel) -> None:
    with hkv.attach(plain, hkv.HybridConfig(**TIERED)) as runtime:
        cache = runtime.cache()
        greedy(plain, cache)
        refs = parts(cache)
    assert alive(refs) == ["cache", "kv"]


def test_a_build_in_progress_keeps_its_keys_until_it_notices(
    plain: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait behind it keep nothing."""
    begun, notices = threading.Event(), threading.Event()

    def build(self: GraphIndex, keys: Tensor, *rest: Tensor | None) -> None:
        begun.set()
        notices.wait(30)
        self._cancellation.check()

    monkeypatch.setattr(GraphIndex, "build", build)
    monkeypatch.setattr(GraphIndex, "stand_in", lambda *_: FlatIndex(FlatIndex.Params()))
    monkeypatch.setenv("HYBRID_KV_BUILD_THREADS", "1")
    config = hkv.HybridConfig(**METHODS["graph"])
    try:
        with hkv.attach(plain, config) as runtime:
            cache = runtime.cache()
            plain.generate(IDS, **passing(cache), max_new_tokens=5, do_sample=False)
            assert begun.wait(30)
            refs = parts(cache)
            del cache
            assert alive(refs) == ["keys 0.0"]
            notices.set()
            _until(lambda: not alive(refs))
    finally:
        notices.set()


def test_an_index_that_failed_keeps_nothing(
    plain: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(self: FlatIndex, keys: Tensor, *rest: Tensor | None) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(FlatIndex, "build", build)
    with hkv.attach(plain, hkv.HybridConfig(**TIERED)) as runtime:
        cache = runtime.cache()
        try:
            plain.generate(IDS, **passing(cache), max_new_tokens=5, do_sample=False)
        except ZeroDivisionError:
            pass
        else:
            pytest.fail("no error came")
        refs = parts(cache)
        del cache
        assert alive(refs) == []


def test_a_look_that_failed_keeps_nothing(
    plain: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finding(self: Look) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Look, "finding", finding)
    config = hkv.HybridConfig(**TIERED, audit_every=1)
    with hkv.attach(plain, config) as runtime:
        cache = runtime.cache()
        try:
            plain.generate(IDS, **passing(cache), max_new_tokens=5, do_sample=False)
            settle(cache.kv)
        except ZeroDivisionError:
            pass
        else:
            pytest.fail("no error came")
        refs = parts(cache)
        del cache
        _until(lambda: not alive(refs))


def test_a_dropped_model_is_gone_though_it_was_attached() -> None:
    owners: list[Callable[[PreTrainedModel], Any]] = [hkv.attach, hkv.HybridCache, hkv.load]
    for owner in owners:
        built = model()
        owned = owner(built)
        refs = {"model": weakref.ref(built), "owner": weakref.ref(owned)}
        del built, owned
        assert alive(refs) == []


def _until(done: Callable[[], bool]) -> None:
    """Gives threads beside this one a minute."""
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end, "it does not come to its end"
        time.sleep(0.001)
