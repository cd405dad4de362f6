"""Forwards that end in the middle: the cache is as it was before, or it says that it is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hybrid_kv as hkv
from hybrid_kv.errors import BrokenCacheError, IntegrityError
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.joined import JoinedCache
from hybrid_kv.plugins import METHODS
from tests.contracts.architectures import build
from tests.contracts.edges.calls import fresh, greedy, prompt
from tests.contracts.edges.further_models import further_config
from tests.kit import every
from tests.pairs import in_pairs

PAGE = 2
LENGTH = 25
LATER = 30
"""Tokens of a later turn, more than are taken as decode steps."""
STEPS = 2 * PAGE + 1
"""So many that a page leaves the window of every layer twice."""


class Interrupted(BaseException):
    """As Ctrl-C is, no Exception."""


@pytest.fixture(autouse=True)
def _no_gradients(untrained_heads: None) -> Iterator[None]:
    with torch.no_grad():
        yield


def small(method: str, **more: Any) -> dict[str, Any]:
    """A method at a budget far below the context."""
    sizes = {"page_size": PAGE, "sink_tokens": PAGE, "window_tokens": 2 * PAGE, "top_k": 3}
    sizes |= {"budget_tokens": 4 * PAGE, "page_budget": 3}
    names = set(hkv.HybridConfig(method=method).flat())
    if "spare_tokens" in names:  # of which there are none to choose pages of
        del sizes["page_budget"]
    own = {n: s for n, s in sizes.items() if n in names or f"cold.{n}" in names}
    needed = {"heads": "drawn"} if method == "locret" else {}  # see the fixture
    return {"method": method, **own, **needed, **more}


@contextmanager
def interrupted(module: nn.Module, where: str, after: int = 0) -> Iterator[None]:
    """A block that ends in the middle: of the attention of `module`, or of its MLP."""
    calls = [0]

    def end(*_: Any) -> None:
        calls[0] += 1
        if calls[0] > after:
            raise Interrupted

    part: Any = module.mlp if where == "mlp" else module.self_attn.o_proj
    hook = part.register_forward_pre_hook(end)
    try:
        with pytest.raises(Interrupted):
            yield
    finally:
        hook.remove()


def lengths(cache: Any) -> set[int]:
    return {row.length for row in every(cache)}


def logits(model: Any, cache: Any, ids: Tensor) -> Tensor:
    out: Tensor = model(ids, **passing(cache)).logits
    return out


SOME = ["full", "hybrid", "quest", "streaming_llm", "snapkv", "h2o", "kivi", "tidal_decode"]


@pytest.mark.parametrize(("method", "where", "rows"), in_pairs(SOME, ["attention", "mlp"], [1, 2]))
def test_an_interrupted_step_leaves_no_trace(method: str, where: str, rows: int) -> None:
    """Regression: the layers before had its token, those behind had not."""
    model: Any = build("llama")
    ids = prompt(rows, LENGTH + STEPS)
    parts = [ids[:, :LENGTH], *ids[:, LENGTH:].split(1, 1)]
    with hkv.attach(model, small(method)) as runtime:
        want = [logits(model, cache, part) for cache in [runtime.cache()] for part in parts]
        cache = runtime.cache()
        for number, part in enumerate(parts):
            seen = cache.get_seq_length()
            with interrupted(model.model.layers[number % 3], where):
                logits(model, cache, part)
            assert cache.get_seq_length() == seen
            cache.check_integrity()
            assert lengths(cache) == ({seen} if seen else set())
            assert torch.equal(logits(model, cache, part), want[number])


@pytest.mark.parametrize("method", list(METHODS))
def test_no_method_answers_otherwise_after_an_interrupt(method: str) -> None:
    model: Any = build("llama")
    ids = prompt(1, LENGTH + STEPS)
    parts = [ids[:, :LENGTH], *ids[:, LENGTH:].split(1, 1)]
    with hkv.attach(model, small(method)) as runtime:
        whole, cache = runtime.cache(), runtime.cache()
        for number, part in enumerate(parts):
            with interrupted(model.model.layers[(number + 1) % 3], "mlp"):
                logits(model, cache, part)
            cache.check_integrity()
            assert torch.equal(logits(model, cache, part), logits(model, whole, part))


@pytest.mark.parametrize("method", SOME)
def test_an_interrupted_piece_of_a_prompt_leaves_no_trace(method: str) -> None:
    """Also where somebody is interrupted between the chunks of a layer."""
    model: Any = build("llama")
    ids = prompt(1, 3 * LENGTH)
    with hkv.attach(model, {**small(method), "prefill_chunk_tokens": 10}) as runtime:
        found = []
        for fails in (False, True):
            cache = runtime.cache()
            cache.kv.more_prompt = True
            for at in range(0, 2 * LENGTH, LENGTH):
                if fails:
                    with interrupted(model.model.layers[1], "attention", after=2):
                        logits(model, cache, ids[:, at : at + LENGTH])
                    assert cache.get_seq_length() == at
                    cache.check_integrity()
                logits(model, cache, ids[:, at : at + LENGTH])
            cache.kv.more_prompt = False
            steps = ids[:, 2 * LENGTH : 2 * LENGTH + STEPS].split(1, 1)
            found.append(torch.cat([logits(model, cache, step) for step in steps]))
    assert torch.equal(*found)


@pytest.mark.parametrize("method", list(METHODS))
def test_an_interrupted_later_turn_is_taken_back_or_the_cache_is_broken(method: str) -> None:
    """What a method drops in the middle of one does not come back."""
    model: Any = build("llama")
    ids = prompt(1, LENGTH + 1 + LATER)
    with hkv.attach(model, {**small(method), "prefill_chunk_tokens": 16}) as runtime:
        cache = runtime.cache()
        logits(model, cache, ids[:, :LENGTH])
        logits(model, cache, ids[:, LENGTH : LENGTH + 1])
        with interrupted(model.model.layers[2], "mlp", after=1):
            logits(model, cache, ids[:, LENGTH + 1 :])
        drops = any(row.drops for row in every(cache))
        if cache.get_seq_length() == LENGTH + 1 and lengths(cache) == {LENGTH + 1}:
            cache.check_integrity()
            logits(model, cache, ids[:, LENGTH + 1 :])
        else:
            assert drops, "nothing was lost, so it could have been put back"
            refuses(model, cache)


def refuses(model: Any, cache: Any) -> None:
    """All but a reset says in one sentence why."""
    uses: list[Callable[[], Any]] = [
        lambda: logits(model, cache, prompt(1, 1)),
        lambda: greedy(model, prompt(), cache),
        cache.fork,
        lambda: cache.crop(-1),
        lambda: cache.reorder_cache(torch.tensor([0])),
    ]
    for use in uses:
        with pytest.raises(BrokenCacheError, match=r"^this cache was interrupted .*reset\(\)"):
            use()
    with pytest.raises(IntegrityError, match="ended in the middle"):
        cache.check_integrity()
    cache.reset()
    cache.check_integrity()
    whole = [cache, type(cache)(model, cache.kv.config)]
    ids = prompt(length=LENGTH)
    assert torch.equal(*(greedy(model, ids, one, max_new_tokens=3) for one in whole))


def test_offloaded_entries_of_an_interrupted_later_turn_are_all_found() -> None:
    model: Any = build("llama")
    ids, settings = prompt(1, LENGTH + 1 + LATER), {**small("hybrid"), "top_k": "all"}
    with hkv.attach(model, settings) as runtime:
        want, cache = runtime.cache(), runtime.cache()
        for own in (want, cache):
            logits(model, own, ids[:, :LENGTH])
        for at in (slice(LENGTH, LENGTH + 1), slice(LENGTH + 1, None)):
            for layer in model.model.layers:
                with interrupted(layer, "mlp"):
                    logits(model, cache, ids[:, at])
            exact = logits(model, want, ids[:, at])
            torch.testing.assert_close(logits(model, cache, ids[:, at]), exact, rtol=0, atol=5e-4)


@pytest.mark.parametrize("model_type", ["qwen3_next", "lfm2", "bamba"])
def test_recurrent_states_do_not_come_back(model_type: str) -> None:
    model: Any = fresh(further_config(model_type))
    last = model.model.layers[-1]
    part = next(p for n, p in last.named_children() if "mlp" in n or "feed_forward" in n)
    with hkv.attach(model, "full") as runtime:
        cache = runtime.cache()

        def fails() -> None:
            def end(*_: Any) -> None:
                raise Interrupted

            hook = part.register_forward_pre_hook(end)
            with pytest.raises(Interrupted):
                logits(model, cache, prompt(1, 5))
            hook.remove()

        fails()  # nothing was there before
        cache.check_integrity()
        assert cache.get_seq_length() == 0
        assert torch.equal(greedy(model, prompt(), cache), greedy(model, prompt(), runtime.cache()))
        fails()
        refuses(model, cache)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "mistral"])
def test_windows_of_the_model_come_back(name: str) -> None:
    model: Any = build(name)
    ids = prompt(1, LENGTH + 3)
    parts = [ids[:, :LENGTH], *ids[:, LENGTH:].split(1, 1)]
    with hkv.attach(model, small("hybrid")) as runtime:
        whole, cache = runtime.cache(), runtime.cache()
        for part in parts:
            with interrupted(model.model.layers[-1], "mlp"):
                logits(model, cache, part)
            cache.check_integrity()
            assert torch.equal(logits(model, cache, part), logits(model, whole, part))


@pytest.mark.parametrize("at", ["append", "attend", "merge"])
def test_an_interrupt_between_two_layers_of_ours_leaves_no_trace(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not between modules of the model, but in what stores and attends."""
    from hybrid_kv.runtime import layer as layers
    from hybrid_kv.runtime.engine_plan import EnginePlan
    from hybrid_kv.store.pool import PageTable

    model: Any = build("llama")
    ids = prompt(1, LENGTH + STEPS)
    parts = [ids[:, :LENGTH], *ids[:, LENGTH:].split(1, 1)]
    with hkv.attach(model, small("hybrid")) as runtime:
        whole, cache = runtime.cache(), runtime.cache()
        for part in parts:
            calls = [0]
            owner, name = {
                "append": (PageTable, "count" if part.shape[1] == 1 else "append"),
                "attend": (layers.LayerCache, "move_on"),
                "merge": (EnginePlan, "attend"),
            }[at]
            inner: Any = getattr(owner, name)

            def ends(*args: Any, own: Any = inner, count: Any = calls, **kwargs: Any) -> Any:
                found = own(*args, **kwargs)
                count[0] += 1
                if count[0] == 2:
                    raise Interrupted
                return found

            with monkeypatch.context() as patched, suppress(Interrupted):
                patched.setattr(owner, name, ends)
                logits(model, cache, part)
            if calls[0] < 2:  # it was not called so often: the part is in
                logits(model, whole, part)
                continue
            cache.check_integrity()
            assert torch.equal(logits(model, cache, part), logits(model, whole, part))


def test_a_joined_step_that_is_interrupted_leaves_no_trace() -> None:
    model: Any = build("llama")

    def begun(runtime: Any) -> list[Any]:
        caches = [runtime.cache(small(method)) for method in ("hybrid", "h2o", "streaming_llm")]
        for number, cache in enumerate(caches):
            logits(model, cache, prompt(1, LENGTH + number))
        return caches

    def step(caches: list[Any], seed: int) -> Tensor:
        joined = JoinedCache(caches)
        ids = prompt(3, 1, seed=seed)
        where = torch.tensor(joined.positions)
        out = model(ids, position_ids=where, **passing(joined)).logits
        assert joined.errors == [None] * 3
        return out

    with hkv.attach(model, "full") as runtime:
        caches, whole = begun(runtime), begun(runtime)
        for seed in range(STEPS):
            with interrupted(model.model.layers[seed % 3], "mlp"):
                step(caches, seed)
            for cache in caches:
                cache.check_integrity()
            assert torch.equal(step(caches, seed), step(whole, seed))


def test_a_row_that_fails_in_a_joined_step_goes_back_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = build("llama")
    with hkv.attach(model, small("hybrid")) as runtime:
        caches = [runtime.cache() for _ in range(2)]
        for cache in caches:
            logits(model, cache, prompt(1, LENGTH))
        layer = caches[1].layers[1]
        monkeypatch.setattr(layer, "attend", lambda *_, **__: 1 / 0)
        joined = JoinedCache(caches)
        where = torch.tensor(joined.positions)
        model(prompt(2, 1), position_ids=where, **passing(joined))
        assert isinstance(joined.errors[1], ZeroDivisionError)
        assert [cache.get_seq_length() for cache in caches] == [LENGTH + 1, LENGTH]
        for cache in caches:
            cache.check_integrity()


def test_layers_that_are_out_of_step_are_seen() -> None:
    model: Any = build("llama")
    with hkv.attach(model, "full") as runtime:
        cache = runtime.cache()
        logits(model, cache, prompt(1, LENGTH))
        cache.layers[1].crop(-1)
        with pytest.raises(IntegrityError, match=f"layer 1 has seen {LENGTH - 1} tokens, layer 0"):
            cache.check_integrity()


def test_an_attention_that_fails_is_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: an error in a layer's attention left the tokens of the layers before."""
    model: Any = build("llama")
    with hkv.attach(model, small("hybrid")) as runtime:
        cache = runtime.cache()
        logits(model, cache, prompt(1, LENGTH))

        def full(*_: Any, **__: Any) -> None:
            raise MemoryError("no more")

        with monkeypatch.context() as patched:
            patched.setattr(cache.layers[2], "attend", full)
            with pytest.raises(MemoryError):
                logits(model, cache, prompt(1, 1))
        assert cache.get_seq_length() == LENGTH
        cache.check_integrity()
