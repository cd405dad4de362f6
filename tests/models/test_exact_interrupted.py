"""Exact decoding that ends in the middle, or is refused: no token is half accepted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hybrid_kv as hkv
from hybrid_kv.errors import BusyError, ConfigError
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.exact_decoding import ExactDecoding
from tests.contracts.architectures import build
from tests.contracts.edges.calls import fresh
from tests.contracts.edges.further_models import further_config
from tests.models.exact_calls import NEW, PROMPT, answer, full_tokens, ids, small, want


@contextmanager
def failing(module: nn.Module, error: BaseException, at: Callable[[int, int], bool]) -> Any:
    """A block that ends in a forward of a layer: `at` knows its number and how many tokens it has.

    The first of them is one of the prompt.
    """
    calls = [0]

    def end(_: Any, args: Any) -> None:
        calls[0] += 1
        if at(calls[0], args[0].shape[1]):
            raise error

    hook = module.register_forward_pre_hook(end)
    try:
        with pytest.raises(type(error)):
            yield
    finally:
        hook.remove()


WHERE: dict[str, Callable[[int, int], bool]] = {
    "first draft": lambda call, tokens: call > 1 and tokens == 1,
    "later draft": lambda call, tokens: call > 4 and tokens == 1,
    "first verification": lambda call, tokens: call > 1 and tokens > 1,
    "later verification": lambda call, tokens: call > 12 and tokens > 1,
}


@pytest.mark.parametrize(
    ("architecture", "error"),
    [("llama", MemoryError("no more")), ("gemma2", KeyboardInterrupt())],
    ids=["llama", "gemma2"],
)
@pytest.mark.parametrize("where", WHERE)
def test_a_forward_that_fails_leaves_verified_tokens_alone(
    architecture: str, where: str, error: BaseException
) -> None:
    model: Any = build(architecture)
    whole = want(architecture, new=16)
    with hkv.load(model, config=small()) as llm:
        cache = llm.runtime.cache()
        with failing(model.model.layers[-1], error, WHERE[where]):
            answer(llm, ids(), cache, exact=6, max_new_tokens=16)
        assert_verified(llm, cache, whole)


def assert_verified(llm: hkv.LLM, cache: Any, whole: list[int]) -> None:
    """The cache holds prompt and first tokens of full attention, and goes on from them alike."""
    cache.check_integrity()
    held = cache.get_seq_length()
    assert PROMPT <= held < PROMPT + len(whole)
    assert cache.exact_tokens == held
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    begun = torch.cat([ids(), torch.tensor([whole[: held - PROMPT + 1]])], 1)
    left = len(whole) - (begun.shape[1] - PROMPT)
    if left:
        rest = answer(llm, begun, cache, exact=True, max_new_tokens=left)
        assert rest.token_ids == whole[-left:]


class _Stops(StoppingCriteria):
    """Does something when so many tokens are there."""

    def __init__(self, tokens: int, act: Callable[[], object]) -> None:
        self._tokens, self._act = tokens, act

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        if input_ids.shape[1] == self._tokens:
            self._act()
        return torch.full((1,), False)


class _Breaks(LogitsProcessor):
    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == self._tokens:
            raise OSError("a processor")
        return scores


@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize("what", ["criterion", "processor"])
def test_what_fails_between_forwards_leaves_verified_tokens_alone(what: str, at: int) -> None:
    """Also where some tokens of a verification were taken already."""

    def fails() -> None:
        raise OSError("a criterion")

    model = build("llama")
    whole = want(new=16)
    options: dict[str, Any] = {
        "criterion": {"stopping_criteria": StoppingCriteriaList([_Stops(PROMPT + at, fails)])},
        "processor": {"logits_processor": LogitsProcessorList([_Breaks(PROMPT + at)])},
    }[what]
    with hkv.load(model, config=small()) as llm:
        cache = llm.runtime.cache()
        with pytest.raises(OSError, match=r"^a (criterion|processor)$"):
            answer(llm, ids(), cache, exact=6, max_new_tokens=16, **options)
        assert_verified(llm, cache, whole)


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_cancelled_answer_is_the_beginning_of_the_whole_one(at: int) -> None:
    model, cancel = build("llama"), threading.Event()
    whole = want(new=16)
    criteria = StoppingCriteriaList([_Stops(PROMPT + at, cancel.set)])
    with hkv.load(model, config=small()) as llm:
        cache = llm.runtime.cache()
        options = {"stopping_criteria": criteria, "cancel": cancel, "max_new_tokens": 16}
        found = answer(llm, ids(), cache, exact=6, **options)
        assert found.token_ids == whole[:at]
        assert_verified(llm, cache, whole)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_prompt_is_computed_again_from_the_first_inexact_token_on(architecture: str) -> None:
    """Which an approximate answer left; where windows slide, all of it is."""
    model: Any = build(architecture)
    with hkv.load(model, config=small()) as llm:
        cache = llm.runtime.cache()
        first = answer(llm, ids(), cache).token_ids
        assert cache.exact_tokens == PROMPT < cache.get_seq_length()
        again = torch.cat([ids(), torch.tensor([first]), ids(1, 3)], 1)
        rows: list[int] = []
        hook = model.model.layers[0].register_forward_pre_hook(
            lambda _, args: rows.append(args[0].shape[1])
        )
        found = answer(llm, again, cache, exact=True)
        hook.remove()
    assert rows[0] == again.shape[1] - (PROMPT if architecture == "llama" else 0)
    assert found.token_ids == full_tokens(model, again)
    assert found.work.steps > 0


@pytest.mark.filterwarnings("ignore::hybrid_kv.errors.RecallWarning")
def test_what_was_computed_again_counts_and_can_be_watched() -> None:
    """Regression: a cache that begins anew lost the call's counters, and progress ended early."""
    model, seen = build("gemma2"), list[tuple[int, int]]()
    with hkv.load(model, config=small(audit_every=1)) as llm:
        cache = llm.runtime.cache()
        first = answer(llm, ids(), cache)
        again = torch.cat([ids(), torch.tensor([first.token_ids]), ids(1, 3)], 1)
        found = answer(llm, again, cache, exact=True, on_prefill=lambda *at: seen.append(at))
        assert seen[-1] == (3 * again.shape[1],) * 2
        assert found.work.visible > found.work.attended > 0
        assert cache.work.steps == first.work.steps + found.work.steps
        assert found.audit is not None
        assert sum(found.audit.looks().values()) > 0


def test_exact_tokens_follow_the_cache() -> None:
    """Cropped, forked, grown exactly, reset."""
    model: Any = build("llama")
    with hkv.load(model, config=small()) as llm, torch.no_grad():
        cache = llm.runtime.cache()
        assert cache.exact_tokens == 0
        model(ids(), **passing(cache))
        assert cache.exact_tokens == PROMPT
        for step in ids(1, 4).split(1, 1):
            model(step, **passing(cache))
        assert (cache.exact_tokens, cache.get_seq_length()) == (PROMPT, PROMPT + 4)
        fork = cache.fork()
        cache.crop(-2)
        assert (cache.exact_tokens, fork.exact_tokens) == (PROMPT, PROMPT)
        cache.kv.more_prompt = True
        model(ids(2, 5), **passing(cache))  # exactly, but behind tokens that are not
        assert cache.exact_tokens == PROMPT
        cache.crop(-7)
        assert cache.exact_tokens == cache.get_seq_length() == PROMPT
        model(ids(2, 5), **passing(cache))
        assert cache.exact_tokens == cache.get_seq_length() == PROMPT + 5
        fork.crop(-10)
        assert fork.exact_tokens == fork.get_seq_length() == PROMPT - 6
        fork.reset()
        model(ids(3), **passing(fork))
        assert fork.exact_tokens == PROMPT


def test_a_forward_that_fails_leaves_exact_tokens_as_they_were() -> None:
    model: Any = build("llama")
    with hkv.load(model, config=small()) as llm, torch.no_grad():
        cache = llm.runtime.cache()
        model(ids(), **passing(cache))
        with failing(model.model.layers[2], KeyboardInterrupt(), lambda *_: True):
            model(ids(1, 1), **passing(cache))
        assert cache.exact_tokens == cache.get_seq_length() == PROMPT


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "options", "why"),
    [
        ({"method": "hybrid", "prefill": 0.1}, {}, "must have prefill='exact', got"),
        ({}, {"num_beams": 2}, "greedy decoding and plain sampling, got num_beams; leave"),
        ({}, {"prompt_lookup_num_tokens": 3}, "got assisted_generation"),
        ({}, {"guidance_scale": 2.0}, "got guidance_scale"),
        ({}, {"prefill_chunk_size": 8}, "got prefill_chunk_size"),
        ({}, {"exact": 0}, "^exact must be True, False or how many tokens .* got 0; write True"),
        ({}, {"exact": -1}, "got -1; write True"),
        ({}, {"exact": "yes"}, "got 'yes'; write True"),
        ({}, {"exact": 2.5}, "got 2.5; write True"),
    ],
    ids=str,
)
def test_what_exact_decoding_does_not_do_is_refused_in_a_sentence(
    settings: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    model: Any = build("llama")
    with hkv.load(model, config=settings or small()) as llm:
        hook = model.register_forward_pre_hook(lambda *_: pytest.fail("the prompt is computed"))
        try:
            with pytest.raises(ConfigError, match=why):
                llm.generate(ids(), **{"exact": True, **options})
        finally:
            hook.remove()


def test_an_assistant_is_refused() -> None:
    model = build("llama")
    with (
        hkv.load(model, config=small()) as llm,
        pytest.raises(ConfigError, match="assistant_model"),
    ):
        llm.generate(ids(), exact=True, assistant_model=model)


@pytest.mark.parametrize("model_type", ["qwen3_next", "lfm2"])
def test_linear_attention_is_refused(model_type: str) -> None:
    with (
        hkv.load(fresh(further_config(model_type)), config="full") as llm,
        pytest.raises(ConfigError, match=r"taken back, got linear attention in layer 0; leave"),
    ):
        llm.generate(ids(), exact=True)


def test_false_and_none_are_plain_decoding() -> None:
    with hkv.load(build("llama"), config=small()) as llm:
        plain = llm.generate(ids(), max_new_tokens=NEW)
        for off in (False, None):
            found = llm.generate(ids(), exact=off, max_new_tokens=NEW)
            assert found.exact is None
            assert found.token_ids == plain.token_ids
    assert plain.token_ids != want()


# Threads -------------------------------------------------------------------------------


def test_a_second_thread_is_busy_meanwhile() -> None:
    errors: list[BaseException] = []
    with hkv.load(build("llama"), config=small()) as llm:

        def asks() -> None:
            try:
                llm.generate(ids(), max_new_tokens=2, exact=True)
            except BusyError as error:
                errors.append(error)

        def asks_beside() -> None:
            thread = threading.Thread(target=asks)
            thread.start()
            thread.join()

        criteria = StoppingCriteriaList([_Stops(PROMPT + 3, asks_beside)])
        found = llm.generate(ids(), exact=True, max_new_tokens=NEW, stopping_criteria=criteria)
    assert len(errors) == 1
    assert found.token_ids == want()


def test_the_loop_serves_generate_of_an_attached_model() -> None:
    """Without `LLM`: as `custom_generate` of transformers' own call."""
    model: Any = build("llama")
    with hkv.attach(model, small()) as runtime:
        cache = runtime.cache()
        loop = ExactDecoding(cache, most_drafts=4)
        out = model.generate(
            ids(),
            attention_mask=torch.ones_like(ids()),
            **passing(cache),
            max_new_tokens=NEW,
            do_sample=False,
            custom_generate=loop,
        )
    assert out[0, PROMPT:].tolist() == want()
    assert loop.work.drafted > loop.work.accepted > 0


def test_the_loop_computes_again_what_approximate_steps_have_left() -> None:
    model: Any = build("llama")
    with hkv.attach(model, small()) as runtime:
        cache = runtime.cache()
        how = {**passing(cache), "max_new_tokens": NEW, "do_sample": False}
        given = model.generate(ids(), attention_mask=torch.ones_like(ids()), **how)
        assert cache.exact_tokens == PROMPT < cache.get_seq_length()
        mask = torch.ones_like(given)
        out = model.generate(
            given, attention_mask=mask, **how, custom_generate=ExactDecoding(cache)
        )
        assert cache.exact_tokens == cache.get_seq_length()
    assert out[0, given.shape[1] :].tolist() == full_tokens(model, given)


@pytest.mark.parametrize(
    ("rows", "hidden", "options", "said"),
    [
        (2, 0, {}, "one sequence without padding, got 2 sequences"),
        (1, 3, {}, "one sequence without padding, got padding"),
        (1, 0, {"return_dict_in_generate": True}, "plain sampling, got return_dict_in_generate"),
    ],
)
def test_calls_of_transformers_that_it_does_not_serve_are_refused(
    rows: int, hidden: int, options: dict[str, Any], said: str
) -> None:
    model: Any = build("llama")
    given = ids().repeat(rows, 1)
    mask = torch.ones_like(given)
    mask[:, :hidden] = 0
    with hkv.attach(model, small()) as runtime:
        cache = runtime.cache()
        asked = {**passing(cache), "max_new_tokens": NEW, "custom_generate": ExactDecoding(cache)}
        with pytest.raises(ConfigError, match=said):
            model.generate(given, attention_mask=mask, **asked, **options)
        assert cache.get_seq_length() == 0
