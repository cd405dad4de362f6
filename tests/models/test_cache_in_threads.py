"""One cache in the hands of several threads: the second is told that it is busy."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.errors import BusyError, ConfigError
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.joined import JoinedCache
from hybrid_kv.models.rollback import rolled_back
from tests.contracts.architectures import ARCHITECTURES
from tests.contracts.edges.calls import fresh, greedy, prompt

LENGTH = 41
SMALL = {"page_size": 4, "sink_tokens": 4, "window_tokens": 8, "top_k": 3}


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return fresh(ARCHITECTURES[request.param]())


@contextmanager
def running(model: Any, call: Callable[[], Any]) -> Iterator[Any]:
    """A block while another thread stands in the middle of a forward."""
    begun, go_on = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        begun.set()
        go_on.wait(30)

    def without_gradients() -> Any:
        with torch.no_grad():
            return call()

    hook = model.model.layers[1].mlp.register_forward_pre_hook(hold)
    with ThreadPoolExecutor(1) as other:
        future = other.submit(without_gradients)
        try:
            assert begun.wait(30)
            hook.remove()
            yield future
        finally:
            go_on.set()


def logits(model: Any, cache: Any, ids: Tensor) -> Tensor:
    out: Tensor = model(ids, **passing(cache)).logits
    return out


def rolls_back(cache: Any) -> None:
    with rolled_back(cache):
        pass


def joined(model: Any, cache: Any) -> None:
    where = torch.tensor([[LENGTH]])
    model(prompt(1, 1), position_ids=where, **passing(JoinedCache([cache])))


def update(model: Any, cache: Any) -> None:
    """Of all layers, those with windows too."""
    new = torch.zeros(1, model.config.num_key_value_heads, 1, model.config.head_dim)
    for number in range(len(cache.layers) - 1, -1, -1):
        cache.update(new, new, number)


USES: dict[str, Callable[[Any, Any], Any]] = {
    "forward": lambda model, cache: logits(model, cache, prompt(1, 1)),
    "generate": lambda model, cache: greedy(model, prompt(1, LENGTH + 1), cache),
    "joined": joined,
    "update": update,
    "update_of_a_window": lambda model, cache: cache.layers[1].update(*torch.zeros(2, 1, 2, 1, 24)),
    "crop": lambda _, cache: cache.crop(-1),
    "fork": lambda _, cache: cache.fork(),
    "deepcopy": lambda _, cache: deepcopy(cache),
    "reset": lambda _, cache: cache.reset(),
    "reorder": lambda _, cache: cache.reorder_cache(torch.tensor([0])),
    "repeat": lambda _, cache: cache.batch_repeat_interleave(2),
    "select": lambda _, cache: cache.batch_select_indices(torch.tensor([0])),
    "audit": lambda _, cache: cache.check_integrity(),
    "roll_back": lambda _, cache: rolls_back(cache),
}


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("use", list(USES))
def test_a_cache_in_use_is_busy_for_other_threads(model: Any, use: str, tokens: int) -> None:
    """Regression: both went on, and both answered wrongly."""
    if use == "joined" and model.config.model_type == "gemma2":
        pytest.skip("such caches are not joined")
    with hkv.attach(model, SMALL) as runtime:
        want, cache = runtime.cache(), runtime.cache()
        for own in (want, cache):
            logits(model, own, prompt(1, LENGTH))
        new = prompt(1, tokens, seed=1)
        busy = pytest.raises(BusyError, match=r"^this cache is in use in another thread")
        with running(model, lambda: logits(model, cache, new)) as first, busy:
            USES[use](model, cache)
        assert torch.equal(first.result(), logits(model, want, new)), "it was disturbed"
        cache.check_integrity()
        assert torch.equal(logits(model, cache, new), logits(model, want, new))


def test_two_threads_that_generate_with_one_cache(model: Any) -> None:
    with hkv.attach(model, SMALL) as runtime:
        cache = runtime.cache()
        want = greedy(model, prompt(), runtime.cache())
        busy = pytest.raises(BusyError, match="in use in another thread")
        with running(model, lambda: greedy(model, prompt(), cache)) as first, busy:
            greedy(model, prompt(), cache)
        assert torch.equal(first.result(), want)


@pytest.mark.parametrize("use", list(USES))
def test_a_hook_cannot_use_the_cache_of_its_own_forward(model: Any, use: str) -> None:
    if "update" in use or (use == "joined" and model.config.model_type == "gemma2"):
        pytest.skip("layers are updated in a forward, and such caches are not joined")
    with hkv.attach(model, SMALL) as runtime:
        cache = runtime.cache()
        logits(model, cache, prompt(1, LENGTH))
        part = model.model.layers[1].mlp
        hook = part.register_forward_pre_hook(lambda *_: USES[use](model, cache))
        with pytest.raises(BusyError, match="in this thread"):
            logits(model, cache, prompt(1, 1))
        hook.remove()
        cache.check_integrity()
        again = runtime.cache()
        logits(model, again, prompt(1, LENGTH))
        new = prompt(1, 1)
        assert torch.equal(logits(model, cache, new), logits(model, again, new))


def test_one_thread_after_the_other_is_fine(model: Any) -> None:
    with hkv.attach(model, SMALL) as runtime:
        want, cache, ids = runtime.cache(), runtime.cache(), prompt(1, LENGTH + 6)
        parts = [ids[:, :LENGTH], *ids[:, LENGTH:].split(1, 1)]
        for part in parts:
            with ThreadPoolExecutor(1) as thread, torch.no_grad():
                found = thread.submit(torch.no_grad()(logits), model, cache, part).result()
            assert torch.equal(found, logits(model, want, part))


# Copies


@pytest.mark.parametrize("method", ["full", "hybrid", "snapkv"])
def test_a_deep_copy_is_a_fork(model: Any, method: str) -> None:
    """Regression: "cannot pickle '_thread.lock' object"."""
    with hkv.attach(model, {"method": method}) as runtime:
        cache = runtime.cache()
        logits(model, cache, prompt(1, LENGTH))
        copied = deepcopy({"cache": cache, "again": cache})
        assert copied["cache"] is copied["again"] is not cache
        assert type(copied["cache"]) is type(cache)
        new = prompt(1, 1)
        assert torch.equal(logits(model, copied["cache"], new), logits(model, cache, new))
        logits(model, cache, new)
        assert copied["cache"].get_seq_length() == cache.get_seq_length() - 1


def test_pickling_says_how_to_save(model: Any) -> None:
    told = pytest.raises(ConfigError, match=r"cannot be pickled.*Context\.save")
    with hkv.attach(model, "full") as runtime, told:
        pickle.dumps(runtime.cache())
