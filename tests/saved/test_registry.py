"""Prompts that begin with contexts on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hybrid_kv as hkv
from tests.contracts.architectures import build
from tests.contracts.edges.test_forks import drawn
from tests.kit import cache_of
from tests.models.folder import tokenizer
from tests.saved.scene import SMALL, TEXT, long_model

WORDS = TEXT.split()
FULL: dict[str, dict[str, Any]] = {
    "full": {},
    "quest": {"page_budget": "all", "page_size": 16},
    "hybrid": {**SMALL, "cold": {"top_k": "all"}},
    "retrieval_attention": {
        "page_size": 37,
        "sink_tokens": 37,
        "window_tokens": 74,
        "cold": {"top_k": "all"},
    },
    "flat": {**SMALL, "cold": {"top_k": "all"}},
}


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return long_model()


@contextmanager
def cached(
    plain: PreTrainedModel, folder: Path | None, method: str = "hybrid", **settings: Any
) -> Iterator[hkv.LLM]:
    limit = settings.pop("cache_limit", "1GiB")
    settings = settings or FULL[method]
    config = hkv.HybridConfig(method=method, index_build="wait", **settings)
    with hkv.load(
        plain, tokenizer=tokenizer(), config=config, cache_dir=folder, cache_limit=limit
    ) as llm:
        yield llm


def text(count: int, *more: str) -> str:
    return " ".join([*WORDS[:count], *more])


def generated(llm: hkv.LLM, prompt: str) -> tuple[list[int], int]:
    answer = llm.generate(prompt, max_new_tokens=3)
    return answer.token_ids, answer.reused_tokens


@pytest.mark.parametrize("method", FULL)
def test_an_answer_is_the_same_with_and_without_reuse(
    plain: PreTrainedModel, method: str, tmp_path: Path
) -> None:
    """Shorter, equal, one token more, longer, differing inside of a page, at a page, early."""
    prompts = [
        *(text(700), text(700), text(701), text(699), text(500), text(900)),
        *(text(600, "owl", "owl", "sea"), text(640, *WORDS[:300]), text(260, "zzz", *WORDS[:90])),
        text(100, "zzz", *WORDS[:300]),
    ]
    with cached(plain, None, method) as llm:
        expected = [generated(llm, prompt)[0] for prompt in prompts]
    with cached(plain, tmp_path, method) as llm:
        found = [generated(llm, prompt) for prompt in prompts]
    assert [ids for ids, _ in found] == expected
    assert [reused for _, reused in found] == [0, 699, 700, 698, 499, 700, 600, 640, 260, 0]


@pytest.mark.parametrize("method", FULL)
def test_a_context_begins_with_what_is_there(
    plain: PreTrainedModel, method: str, tmp_path: Path
) -> None:
    with cached(plain, None, method) as llm:
        expected = [
            llm.context(text(count)).ask("oak fox", max_new_tokens=3).token_ids
            for count in (900, 500, 901)
        ]
    with cached(plain, tmp_path, method) as llm:
        llm.generate(text(600), max_new_tokens=2)
    with cached(plain, tmp_path, method) as llm:
        found = []
        for count in (900, 500, 901):
            context = llm.context(text(count))
            cache_of(context).check_integrity()
            found.append(context.ask("oak fox", max_new_tokens=3).token_ids)
        counters = llm.prefixes.registry.counters
    assert found == expected
    assert (counters.hits, counters.misses) == (3, 1)
    assert counters.tokens_saved == 600 + 500 + 900
    assert counters.added == 2  # 600 and 900: nothing else had a new block


@pytest.mark.parametrize("method", ["streaming_llm", "snapkv", "kivi"])
def test_a_method_that_does_not_keep_everything_takes_whole_contexts_alone(
    plain: PreTrainedModel, method: str, tmp_path: Path
) -> None:
    settings = {"page_size": 16} | (SMALL if method == "streaming_llm" else {})
    with cached(plain, None, method, **settings) as llm:
        expected = generated(llm, text(700))[0]
        asked = llm.context(text(700)).ask("oak", max_new_tokens=3).token_ids
    with cached(plain, tmp_path, method, **settings) as llm:
        assert llm.context(text(700)).ask("oak", max_new_tokens=3).token_ids == asked
        assert llm.context(text(700)).ask("oak", max_new_tokens=3).token_ids == asked
        assert llm.prefixes.registry.counters.tokens_saved == 700
        llm.context(text(690))
        assert generated(llm, text(700)) == (expected, 0)
        assert generated(llm, text(800))[1] == 0
        assert llm.prefixes.registry.counters.tokens_saved == 700


def test_a_model_with_sliding_windows_takes_whole_contexts_alone(tmp_path: Path) -> None:
    """A window has its newest tokens only, whatever the method keeps."""
    model, ids = build("gemma3"), drawn(0, 300)[0].tolist()
    with hkv.load(model, config={"method": "full", "page_size": 4}) as llm:
        expected = llm.context(ids).ask([5, 6], max_new_tokens=5).token_ids
        longer = llm.generate([*ids, 7, 8], max_new_tokens=3).token_ids
    folder = {"cache_dir": tmp_path, "cache_limit": "1GiB"}
    with hkv.load(model, config={"method": "full", "page_size": 4}, **folder) as llm:
        for _ in range(2):
            assert llm.context(ids).ask([5, 6], max_new_tokens=5).token_ids == expected
        answer = llm.generate([*ids, 7, 8], max_new_tokens=3)
        assert (answer.token_ids, answer.reused_tokens) == (longer, 0)
        assert llm.prefixes.registry.counters.tokens_saved == 300


def test_a_conversation_begins_with_what_is_there(plain: PreTrainedModel, tmp_path: Path) -> None:
    def talk(folder: Path | None) -> tuple[list[str], list[int]]:
        with cached(plain, folder) as llm:
            chat = llm.conversation()
            answers = [chat.send(t, max_new_tokens=5) for t in (text(600), "oak", "fox sea")]
            return [it.text for it in answers], [it.reused_tokens for it in answers]

    expected = talk(None)[0]
    assert talk(tmp_path) == (expected, [0, 0, 0])
    assert talk(tmp_path) == (expected, [599, 0, 0])


def test_what_is_streamed_is_left_too(plain: PreTrainedModel, tmp_path: Path) -> None:
    with cached(plain, tmp_path) as llm:
        first = "".join(llm.generate(text(600), stream=True, max_new_tokens=5))
        stream = llm.generate(text(600), stream=True, max_new_tokens=5)
        assert "".join(stream) == first
        assert stream.result.reused_tokens == 599
        llm.generate(text(900), num_beams=2, max_new_tokens=3)  # beams have rows of their own
        assert llm.prefixes.registry.counters.added == 1


def test_only_contexts_of_the_same_kind_are_taken(plain: PreTrainedModel, tmp_path: Path) -> None:
    with cached(plain, tmp_path, "full") as llm:
        llm.generate(text(600), max_new_tokens=2)
    with cached(plain, tmp_path, "hybrid") as llm:
        assert generated(llm, text(600))[1] == 0
    other = long_model()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    with cached(other, tmp_path, "full") as llm:
        assert generated(llm, text(600))[1] == 0
    with cached(plain, tmp_path, "full") as llm:
        assert generated(llm, text(600))[1] == 599


# Below the full budget --------------------------------------------------------------------------

FEW = {**SMALL, "cold": {"top_k": 2, "index": {"kind": "flat"}}}


def test_the_rest_of_a_prompt_attends_exactly_however_short(
    plain: PreTrainedModel, tmp_path: Path
) -> None:
    """Few tokens behind a cache are a step of decoding elsewhere, within the budget."""
    words = ["owl", "fox", "bee", "ice", "oak", "sun"]
    prompts = [
        text(700, *words[number:], *words[:number][:rest]) for number in range(6) for rest in (0, 3)
    ]
    prompts = [text(700), *prompts, text(700, *WORDS[:90])]
    with cached(plain, None, "full") as llm:
        expected = [generated(llm, prompt)[0][0] for prompt in prompts]
    with cached(plain, tmp_path, "hybrid", **FEW) as llm:
        found = [generated(llm, prompt) for prompt in prompts]
    assert [reused for _, reused in found] == [0] + [700] * (len(prompts) - 1)
    assert [ids[0] for ids, _ in found] == expected


@pytest.mark.parametrize("count", [500, 700, 900])
def test_what_was_taken_and_what_came_behind_it_is_found_alike(
    plain: PreTrainedModel, count: int, tmp_path: Path
) -> None:
    """A prefix that was cut, a whole one, and one that goes on: an exact index misses nothing, and
    the budget is that of a prompt that was computed as a whole.
    """
    limits = {"min_recall": 0, "max_missed_mass": None, "max_output_error": None}
    settings = {**FEW, "audit_every": 1, "audit": {"action": "widen", **limits}}
    prompt = text(count, *WORDS[:150])

    def asked(folder: Path | None) -> hkv.Generation:
        with cached(plain, folder, "hybrid", **settings) as llm:
            return llm.generate(prompt, max_new_tokens=12)

    with cached(plain, tmp_path, "hybrid", **settings) as llm:
        llm.generate(text(700), max_new_tokens=1)
    fresh, found = asked(None), asked(tmp_path)
    assert found.reused_tokens == min(count, 700)
    assert found.audit is not None
    assert found.audit.recall().mean == 1.0
    assert len(found.audit.findings) == len(fresh.audit.findings) > 5
    # Resident tokens may differ by what a window lets wait before a page leaves.
    per_step = (found.work.attended - fresh.work.attended) / found.work.steps
    assert abs(per_step) <= SMALL["page_size"]
