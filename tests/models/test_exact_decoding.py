"""Exact decoding, greedily: the tokens are those of full attention, whatever the method drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import hybrid_kv as hkv
from hybrid_kv.errors import ConfigError
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.exact_steps import ExactWork
from hybrid_kv.plugins import METHODS
from tests.contracts.architectures import ARCHITECTURES, SLIDING_WINDOW, VOCAB, build
from tests.contracts.edges.calls import fresh
from tests.contracts.edges.further_models import further_config
from tests.kit import held
from tests.models.exact_calls import (
    NEW,
    PROMPT,
    answer,
    exact_tokens,
    full_tokens,
    ids,
    small,
    want,
)


@pytest.fixture(autouse=True)
def _heads(untrained_heads: None) -> None:
    """Methods with trained heads have drawn ones."""


def some_wrong(work: ExactWork) -> bool:
    """Whether drafts were right and wrong, so that the call has tested both."""
    return work.drafted > work.accepted > 0 and work.passes > 0


# Methods and architectures ------------------------------------------------------------------------

KEEPING = [
    *(
        "ctkvr",
        "double_sparsity",
        "flat",
        "full",
        "hnsw",
        "hybrid",
        "infinigen_proxy",
        "infllm",
        "ivf",
        "loki",
    ),
    *(
        "magic_pig",
        "pqcache",
        "quest",
        "rekv",
        "retrieval_attention",
        "retroinfer",
        "shadowkv",
        "sparq",
    ),
    "tidal_decode",
]


@pytest.mark.parametrize("method", KEEPING)
def test_tokens_of_every_method_that_keeps_entries_are_those_of_full(method: str) -> None:
    found, work = exact_tokens(build("llama"), small(method), ids())
    assert found == want()
    if method == "full":
        assert work == ExactWork(steps=NEW - 1, unverified=NEW - 1)
    else:
        assert some_wrong(work)
        assert work.unverified == work.ties == 0
        assert work.accepted + work.passes == NEW - 1


OFFLOADING = ["duo_attention", "fastgen", "h2o", "keyformer", "kvmerger", "snapkv", "tova"]


@pytest.mark.parametrize("method", OFFLOADING)
def test_methods_that_copy_what_they_evict_to_the_host_draft_as_well(method: str) -> None:
    budget = {} if method == "duo_attention" else {"budget_tokens": 16}
    copying = {"demote": "offload", **budget}
    found, work = exact_tokens(build("llama"), small(method, **copying), ids())
    assert found == want()
    assert some_wrong(work)


@pytest.mark.parametrize("method", [name for name in METHODS if name not in KEEPING])
def test_a_method_that_loses_entries_is_refused_before_the_prompt(method: str) -> None:
    model: Any = build("llama")
    needed = {"heads": "drawn"} if method == "locret" else {}
    with hkv.load(model, config={"method": method, **needed}) as llm:
        hook = model.register_forward_pre_hook(lambda *_: pytest.fail("the prompt is computed"))
        try:
            with pytest.raises(ConfigError) as refused:
                llm.generate(ids(), exact=True)
        finally:
            hook.remove()
    assert str(refused.value) == (
        f"exact=True must have a method that keeps every entry as it is, got '{method}', which "
        "drops or rounds some; take method='hybrid', or leave exact out"
    )


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "llama"])
def test_tokens_of_every_architecture_are_those_of_full(architecture: str) -> None:
    """Sliding windows, soft caps, sinks of the model, experts, partial and scaled rotation."""
    works = []
    for method in ("hybrid", "quest"):
        found, work = exact_tokens(build(architecture), small(method), ids())
        assert found == want(architecture)
        works.append(work)
    if architecture == "mistral":  # all of it slides: each step reads every entry that there is
        assert works == [ExactWork(steps=NEW - 1, unverified=NEW - 1)] * 2
    else:
        assert any(map(some_wrong, works))


def test_layers_that_share_keys_and_values() -> None:
    layers = ["sliding_attention", "full_attention", "full_attention"] * 2
    shape = {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": layers}
    model = fresh(further_config("gemma4_text", **shape))
    found, work = exact_tokens(model, small(), ids())
    assert found == full_tokens(model, ids())
    assert some_wrong(work)


# Sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        {"page_size": 1, "window_tokens": 1, "sink_tokens": 0},
        {"page_size": 3, "window_tokens": 6, "sink_tokens": 3},
        {"page_size": 16, "window_tokens": 16, "sink_tokens": 16},
        {"page_size": 4, "window_tokens": 4, "spare_tokens": 8, "page_budget": 1},
        {"prefill_chunk_tokens": 7},
        {"cold.select": "device"},
        {"cold.estimate": "none"},
        {"cold.look_ahead": "always"},
        {"audit_every": 2},
    ],
    ids=str,
)
def test_no_size_changes_a_token(sizes: dict[str, Any]) -> None:
    found, work = exact_tokens(build("llama"), {**small(), **sizes}, ids())
    assert found == want()
    assert some_wrong(work)


@pytest.mark.parametrize(
    ("architecture", "most", "top_k", "new"),
    [
        ("llama", 1, 2, 20),
        ("gpt_oss", 3, 2, 12),
        ("llama", 30, 2, 34),
        ("gemma2", 30, 2, 34),
        ("gpt_oss", 30, 2, 34),
    ],
)
def test_drafts_of_any_length_equal_full(
    architecture: str, most: int, top_k: int, new: int
) -> None:
    """30 are more than the windows hold, of the method and of the model, and are taken back."""
    settings = small(**{"cold.top_k": top_k})
    options = {"exact": most, "max_new_tokens": new}
    found, work = exact_tokens(build(architecture), settings, ids(1), **options)
    assert found == want(architecture, 1, new)
    assert some_wrong(work)
    assert most <= work.drafted <= most * work.passes


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_a_draft_longer_than_the_windows_is_taken_whole(architecture: str) -> None:
    settings, new = small(**{"cold.top_k": 48}), 2 * SLIDING_WINDOW
    options = {"exact": 50, "max_new_tokens": new}
    found, work = exact_tokens(build(architecture), settings, ids(1), **options)
    assert found == want(architecture, 1, new)
    assert work == ExactWork(passes=1, drafted=new - 2, accepted=new - 2, steps=new - 2)


def test_all_drafts_right_make_one_pass_of_all() -> None:
    """The whole of what was drafted is accepted, and one token more."""
    settings = {**small(), "cold.top_k": 64}
    found, work = exact_tokens(build("llama"), settings, ids(), exact=4, max_new_tokens=6)
    assert found == want()[:6]
    assert work == ExactWork(passes=1, drafted=4, accepted=4, steps=4)


@pytest.mark.parametrize("new", [1, 2, 3, 7])
def test_an_answer_may_end_anywhere_in_a_draft(new: int) -> None:
    found, work = exact_tokens(build("llama"), small(), ids(), max_new_tokens=new)
    assert found == want()[:new]
    assert work.accepted + work.passes == new - 1


@pytest.mark.parametrize("method", ["hybrid", "quest"])
@pytest.mark.parametrize("length", [3, 11, 13])
def test_short_prompts_grow_beyond_the_windows(method: str, length: int) -> None:
    """At first each step reads everything; then entries are left out."""
    model, given = build("llama"), ids(2, length)
    found, work = exact_tokens(model, small(method), given, max_new_tokens=30)
    assert found == full_tokens(model, given, max_new_tokens=30)
    assert work.unverified > 0
    assert some_wrong(work)
    assert work.unverified + work.accepted + work.passes == 29


@pytest.mark.parametrize("settings", ["full", small(**{"cold.top_k": "all"})], ids=["full", "all"])
def test_steps_that_read_everything_need_no_pass(settings: Any) -> None:
    rows: list[int] = []
    model: Any = build("llama")
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda _, args: rows.append(args[0].shape[1])
    )
    try:
        found, work = exact_tokens(model, settings, ids())
    finally:
        hook.remove()
    assert found == want()
    assert work == ExactWork(steps=NEW - 1, unverified=NEW - 1)
    assert rows[-NEW:] == [PROMPT] + [1] * (NEW - 1)


def test_windows_are_as_small_as_before() -> None:
    """Of the method and of the model: what drafts needed goes again."""
    found = []
    for exact in (False, True):
        with hkv.load(build("gemma2"), config=small()) as llm:
            cache = llm.runtime.cache()
            answer(llm, ids(), cache, exact=exact)
            windows = [layer for layer in cache.layers if layer.is_sliding]
            assert not any(layer.record_past for layer in windows)
            layers = [shape.layer_idx for shape in cache.kv.info.layers]
            resident = [len(held(cache, layer).resident) for layer in layers]
            found.append([layer.keys.shape[2] for layer in windows] + resident)
    assert found[0] == found[1]


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "approximate"])
@pytest.mark.parametrize("more", [0, 3])
def test_a_prompt_that_the_cache_holds_whole_is_answered_again(exact: bool, more: int) -> None:
    """Its last token at least is computed, which gives the first of the answer."""
    with hkv.load(build("llama"), config=small()) as llm:
        cache = llm.runtime.cache()
        first = answer(llm, ids(), cache, exact=exact).token_ids
        given = torch.cat([ids(), torch.tensor([first[:more]], dtype=torch.int64)], 1)
        found = answer(llm, given, cache, exact=True)
    assert found.token_ids == full_tokens(build("llama"), given)


# How it ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 4, 7])
def test_a_token_that_ends_the_answer_does_so_inside_of_a_draft(at: int) -> None:
    whole = want()
    end = whole[at]
    found, _ = exact_tokens(build("llama"), small(), ids(), eos_token_id=end)
    assert found == whole[: whole.index(end) + 1]


def test_a_draft_ends_with_a_token_that_ends_the_answer() -> None:
    end = want()[6]
    with hkv.load(build("llama"), config=small(**{"cold.top_k": 64})) as llm:
        work = answer(llm, ids(), exact=8, eos_token_id=end).exact
    assert work == ExactWork(passes=1, drafted=6, accepted=6, steps=6)


class _Shifts(LogitsProcessor):
    """Raises the token behind the newest one."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[0, (int(input_ids[0, -1]) + 1) % VOCAB] += 6.0
        return scores


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"min_new_tokens": 6, "eos_token_id": list(range(64))},
        {"no_repeat_ngram_size": 1},
        {"suppress_tokens": list(range(20, 80))},
        {"logits_processor": LogitsProcessorList([_Shifts()])},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_changes_logits_changes_them_alike(options: dict[str, Any]) -> None:
    model = build("llama")
    found, work = exact_tokens(model, small(), ids(), **options)
    expected = full_tokens(model, ids(), **options)
    assert found == expected
    assert found != want() or "min_new_tokens" in options
    assert some_wrong(work)


class _ShiftsInPlace(LogitsProcessor):
    """As `_Shifts`, but writes into the scores that it was given."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[0, (int(input_ids[0, -1]) + 1) % VOCAB] += 3.0
        return scores


def test_what_changes_logits_where_they_lie_changes_them_once() -> None:
    """Where steps read every entry a token is drafted and taken from the same logits."""
    model, options = build("llama"), {"logits_processor": LogitsProcessorList([_ShiftsInPlace()])}
    for settings in ("full", small()):
        found, _ = exact_tokens(model, settings, ids(), max_new_tokens=12, **options)
        assert found == full_tokens(model, ids(), max_new_tokens=12, **options)


def test_drafts_are_chosen_with_those_before_them_in_mind() -> None:
    settings = {**small(), "cold.top_k": 64}
    options = {"exact": 4, "max_new_tokens": 6, "no_repeat_ngram_size": 1}
    _, work = exact_tokens(build("llama"), settings, ids(), **options)
    assert work == ExactWork(passes=1, drafted=4, accepted=4, steps=4)


# 16 bits ------------------------------------------------------------------------------------------


@pytest.fixture
def halved() -> Any:
    return fresh(build("llama").config).to(torch.bfloat16)


def test_16_bits_give_the_tokens_of_the_pass_and_count_ties(halved: Any) -> None:
    """A teacher-forced pass over all tokens has each of them within its rounding."""
    found, work = exact_tokens(halved, small(), ids(), max_new_tokens=60)
    assert some_wrong(work)
    assert work.ties > 0
    whole = torch.cat([ids(), torch.tensor([found])], 1)
    with hkv.attach(halved, "full") as runtime, torch.no_grad():
        logits = halved(whole, **passing(runtime.cache())).logits[0, PROMPT - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(found)[:, None])[:, 0]
    best = logits.max(1).values
    assert (best - chosen <= 4 * torch.finfo(torch.bfloat16).eps * best.abs()).all()
    assert (best == chosen).sum() >= 54


def test_a_tie_of_a_token_that_no_pass_has_verified_is_not_counted(halved: Any) -> None:
    """It is the method's own choice, whatever full attention would choose."""
    config = small("hybrid", **{"cold.estimate": "gaussian"})
    options = {"max_new_tokens": 60, "max_error": 1e9}
    _, work = exact_tokens(halved, config, ids(), exact=False, **options)
    assert (work.passes, work.trusted) == (0, 59)
    assert work.ties == 0
