"""A small model, requests to it and their answers, for tests of the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.errors import BusyError
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.saved.registry import ContextRegistry
from hybrid_kv.serve import (
    Engine,
    Finished,
    Limits,
    Prefilled,
    Request,
    RequestHandle,
    Sampling,
    Token,
)
from hybrid_kv.serve.scheduler import Scheduler
from tests.contracts.architectures import scale_weights

VOCAB = 12
GREEDY = Sampling(temperature=0)
NEW = 9
UNJUDGED = {"audit.max_missed_mass": None, "audit.max_output_error": None}


def small_model(seed: int = 11) -> PreTrainedModel:
    """Groups of three query heads of 72 channels."""
    config = LlamaConfig(
        **{"vocab_size": VOCAB, "hidden_size": 72, "intermediate_size": 64},
        **{"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1},
        **{"head_dim": 72, "max_position_embeddings": 1024, "tie_word_embeddings": False},
        **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        scale_weights(model)
        with torch.no_grad():
            model.lm_head.weight[:3] = 0
    return model.eval()


def tiered(page_size: int, **changes: Any) -> hkv.HybridConfig:
    place = {"sink_tokens": page_size, "window_tokens": page_size, "index_build": "wait"}
    return hkv.HybridConfig(page_size=page_size, **{**place, **changes})


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    draw = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(3, VOCAB, (length,), generator=draw).tolist())


def asked(length: int, seed: int = 0, **changes: Any) -> Request:
    given: dict[str, Any] = {"max_new_tokens": NEW, "sampling": GREEDY, **changes}
    return Request(prompt(length, seed), **given)


def read(ticket: RequestHandle) -> tuple[list[int], Finished]:
    """The tokens of an answer and its end, after the order of its events."""
    events = list(ticket.events())
    kinds = [type(event) for event in events]
    assert kinds == sorted(kinds, key=[Prefilled, Token, Finished].index)
    end = events[-1]
    assert isinstance(end, Finished)
    tokens = [event.id for event in events if isinstance(event, Token)]
    assert end.usage.completion_tokens == len(tokens)
    return tokens, end


def alone(llm: hkv.LLM, request: Request) -> list[int]:
    """What transformers' generate gives with a cache of the request's configuration."""
    cache = llm.runtime.cache(request.config)
    model: Any = llm.model
    ids = torch.tensor([request.ids])
    new = request.max_new_tokens
    out = model.generate(ids, **passing(cache), max_new_tokens=new, do_sample=False)
    return list(out[0, ids.shape[1] :].tolist())


@contextmanager
def slow(llm: hkv.LLM, seconds: float = 0.02) -> Iterator[None]:
    """A model whose every forward takes so long at least."""
    hook = llm.model.register_forward_pre_hook(lambda *_: sleep(seconds))
    try:
        yield
    finally:
        hook.remove()


def is_idle(engine: Engine) -> bool:
    """By figures that are of a moment ago: nobody waits, is prefilled or gets tokens."""
    stats = engine.stats()
    return not (stats.queued or stats.prefilling or stats.running)


def until(what: Callable[[], object], seconds: float = 30.0) -> None:
    end = monotonic() + seconds
    while not what():
        assert monotonic() < end, "it did not happen"
        sleep(0.005)


@contextmanager
def scheduling(
    llm: hkv.LLM,
    limits: Limits | None = None,
    contexts: ContextRegistry | None = None,
    on_end: Callable[[RequestHandle], None] = lambda ticket: None,
) -> Iterator[Scheduler]:
    """A scheduler whose rounds are made one by one."""
    rounds = Scheduler(llm, limits or Limits(), contexts, on_end)
    with torch.inference_mode():
        yield rounds
        rounds.end_all([], BusyError("as a test"))
        rounds.close()


def admitted(rounds: Scheduler, *requests: Request) -> list[RequestHandle]:
    tickets = [RequestHandle(request) for request in requests]
    rounds.admit(deque(tickets))
    return tickets


def ended(rounds: Scheduler, *tickets: RequestHandle) -> list[Finished]:
    """Makes rounds until these have ended."""
    end = monotonic() + 60
    while not all(ticket.is_finished for ticket in tickets):
        rounds.round()
        assert monotonic() < end, "it did not happen"
    return [read(ticket)[1] for ticket in tickets]


def caches_made(llm: hkv.LLM, monkeypatch: pytest.MonkeyPatch) -> list[TieredCache]:
    """A list of all caches that are made from now on, by models or as forks of others."""
    made, fork, new = list[TieredCache](), TieredCache.fork, type(llm.runtime).cache

    def keep(cache: TieredCache) -> TieredCache:
        made.append(cache)
        return cache

    monkeypatch.setattr(TieredCache, "fork", lambda self: keep(fork(self)))
    monkeypatch.setattr(type(llm.runtime), "cache", lambda *args: keep(new(*args)))
    return made
