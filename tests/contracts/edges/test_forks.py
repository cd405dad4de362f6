"""Every method: two caches that go on from the same tokens, each as if it were alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.errors import ConfigError
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import bytes_per_token
from tests.contracts.architectures import PAD, VOCAB, build, build_on_host, strict_torch
from tests.contracts.test_generate_matrix import (
    FIRST,
    PROMPT,
    Output,
    assert_equal,
    variants_of,
)
from tests.device.placement import placed
from tests.kit import every, held

NEW = 2  # beside 3 of the user: in each turn a page leaves the window
SLIDING = ["full-tiered", "hybrid-tiered", "quest-tiered", "snapkv-kept", "streaming_llm-tiered"]


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with strict_torch():
        yield
    torch.set_num_threads(threads)


def drawn(seed: int, count: int) -> Tensor:
    return torch.randint(PAD + 1, VOCAB, (1, count), generator=torch.Generator().manual_seed(seed))


def go_on(model: PreTrainedModel, cache: Cache, ids: Tensor, new: int = NEW) -> Output:
    """Greedy tokens behind ids [1, N] of the host, of which the cache holds the first ones."""
    ids = ids.to(model.device)
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **passing(cache),
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return Output(found.sequences.tolist(), tuple(one.cpu() for one in found.logits))


@cache
def alone(architecture: str, *turns: int) -> Output:
    """The last of some turns, each of 3 tokens drawn by its number, without any fork."""
    model = build_on_host(architecture)
    kept, ids = DynamicCache(config=model.config), drawn(0, PROMPT)
    for turn in turns:
        ids = torch.cat([ids, drawn(turn, 3)], 1)
        found = go_on(model, kept, ids)
        ids = torch.tensor(found.tokens)
    return found


class Branch:
    """A cache with the tokens that it was shown."""

    def __init__(self, model: PreTrainedModel, cache: TieredCache, ids: Tensor) -> None:
        self.model, self.cache, self.ids = model, cache, ids
        self.turns: tuple[int, ...] = ()

    def turn(self, number: int, architecture: str) -> None:
        self.turns += (number,)
        ids = torch.cat([self.ids, drawn(number, 3)], 1)
        found = go_on(self.model, self.cache, ids)
        self.ids = torch.tensor(found.tokens)
        self.cache.check_integrity()
        assert_equal(found, alone(architecture, *self.turns))

    def fork(self) -> Branch:
        new = Branch(self.model, self.cache.fork(), self.ids)
        new.turns = self.turns
        return new


def filled(model: PreTrainedModel, runtime: hkv.Attachment, config: Any = None) -> Branch:
    cache, ids = runtime.cache(config=config), drawn(0, PROMPT)
    with torch.no_grad():
        model(ids.to(model.device), **passing(cache))
    return Branch(model, cache, ids)


# Where all is resident, methods differ little.
CELLS = [
    pytest.param(method, settings, architecture, id=f"{name}-{architecture}")
    for method in METHODS
    for variant, settings in variants_of(method).items()
    if variant != "resident" or method in FIRST
    for name in (f"{method}-{variant}",)
    for architecture in ("llama", *(["gemma3"] if name in SLIDING else []))
]


@pytest.mark.parametrize(("method", "settings", "architecture"), CELLS)
def test_forks_go_on_as_if_each_were_alone(
    method: str, settings: dict[str, Any], architecture: str
) -> None:
    model = build(architecture)
    config = hkv.HybridConfig.from_settings(settings).opened()
    with hkv.attach(model, config) as runtime:
        first = filled(model, runtime)
        second = first.fork()
        first.turn(1, architecture)
        second.turn(2, architecture)
        third = second.fork()  # of a fork, when both have gone on
        second.cache.close()
        del second
        third.turn(3, architecture)
        first.turn(4, architecture)
        first.cache.close()
        third.turn(5, architecture)


@pytest.mark.parametrize("method", ["hybrid", "streaming_llm", "retrieval_attention"])
def test_a_fork_takes_what_is_resident_and_shares_what_is_cold(method: str) -> None:
    model = build("llama")
    settings = {"method": method, "page_size": 4, "sink_tokens": 4, "window_tokens": 8}
    with hkv.attach(model, hkv.HybridConfig.from_settings(settings)) as runtime:
        cache = runtime.cache()
        with torch.no_grad():
            model(placed(drawn(0, 400)), **passing(cache))
        fork = cache.fork()
        for own, source in zip(every(fork), every(cache), strict=True):
            token = bytes_per_token(fork.kv.info.layers[0], torch.float32)
            assert own.extents == source.extents
            # Sinks, the window and up to two pages more, whatever the length.
            assert own.reserved_bytes <= 1.2 * 5 * 4 * token
        go_on(model, fork, drawn(0, 403), 6)
        for one in every(fork):
            new = one.extents[method != "streaming_llm" :]
            assert all(extent.stored <= 20 for extent in new)


def test_pages_of_a_method_that_keeps_everything_are_shared_until_they_are_written() -> None:
    model = build("llama")
    with hkv.attach(model, hkv.HybridConfig(method="full", page_size=4)) as runtime:
        cache = runtime.cache()
        with torch.no_grad():
            model(placed(drawn(0, 401)), **passing(cache))
        forks = [cache.fork() for _ in range(3)]
        assert {held(fork).pages_in_use for fork in forks} == {101}
        go_on(model, forks[0], drawn(0, 404), 6)  # its last page, copied, and two more
        assert held(cache).pages_in_use == 101 + 3
        for fork in forks:
            fork.close()
        del fork, forks
        assert held(cache).pages_in_use == 101, "pages of a fork that is gone are free"
        cache.check_integrity()
        found = go_on(model, cache, drawn(0, 404), 6)
        want = go_on(model, DynamicCache(config=model.config), drawn(0, 404), 6)
        assert_equal(found, want)


def test_a_fork_of_a_closed_cache_is_refused() -> None:
    model = build("llama")
    with hkv.attach(model, hkv.HybridConfig(method="full")) as runtime:
        branch = filled(model, runtime)
        branch.cache.close()
        with pytest.raises(ConfigError, match="cache is closed"):
            branch.cache.fork()
        fork = filled(model, runtime).cache.fork()
    with pytest.raises(ConfigError, match="detached"):
        fork.fork()


def test_a_fork_of_several_rows() -> None:
    model, ids = build("llama"), placed(torch.cat([drawn(1, 30), drawn(2, 30)]))
    settings = {"page_size": 4, "sink_tokens": 4, "window_tokens": 8, "cold.top_k": "all"}
    for method in ("full", "hybrid"):
        own = settings if method == "hybrid" else {"page_size": 4}
        config = hkv.HybridConfig.from_settings({"method": method, **own})
        with hkv.attach(model, config) as runtime, torch.no_grad():
            cache = runtime.cache()
            model(ids, **passing(cache))
            fork, more = cache.fork(), [placed(drawn(n, 8)).expand(2, -1) for n in (3, 4)]
            for one, new in zip((cache, fork), more, strict=True):
                found = model(new, **passing(one)).logits
                exact = model(torch.cat([ids, new], 1)).logits[:, -8:]
                torch.testing.assert_close(found, exact, rtol=0, atol=5e-4)
                one.check_integrity()
