"""One prefill serves all methods: as if each had computed its own."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

import hybrid_kv as hkv
from hybrid_kv.contest.prompts import PrefilledPrompt, SharedPrompt
from hybrid_kv.types import Needs
from tests.tolerances import TOLERANCES

NEEDS = Needs(sampled_queries=24, last_queries=11, column_sums=True)
CONTEXT = torch.randint(16, 500, (301,), generator=torch.Generator().manual_seed(1)).tolist()
QUESTION = [5, 6, 40, 50]


def assert_same(one: PrefilledPrompt, other: PrefilledPrompt) -> None:
    close = TOLERANCES[torch.float32]
    assert one.ids.tolist() == other.ids.tolist()
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        torch.testing.assert_close(mine[0], theirs[0], **close)
        torch.testing.assert_close(mine[1], theirs[1], **close)
    for mine, theirs in zip(one.evidence, other.evidence, strict=True):
        for field in fields(mine[0]):
            value, expected = (getattr(seen[0], field.name) for seen in (mine, theirs))
            torch.testing.assert_close(value, expected, **close)


@pytest.mark.parametrize("question", [QUESTION, QUESTION[:1]])
def test_a_question_behind_the_context_is_as_if_it_came_at_once(
    llm: hkv.LLM, question: list[int]
) -> None:
    shared = SharedPrompt(llm.runtime, CONTEXT, NEEDS)
    together, first = shared.with_question(question)
    assert_same(together, SharedPrompt(llm.runtime, CONTEXT + question, NEEDS).context())
    with torch.inference_mode():
        plain = llm.model(torch.tensor([CONTEXT + question])).logits[0, -1]
    assert first == int(plain.argmax())


def test_a_question_leaves_no_trace_for_the_next(llm: hkv.LLM) -> None:
    shared = SharedPrompt(llm.runtime, CONTEXT, NEEDS)
    shared.with_question([7, 8, 9])
    assert_same(shared.context(), SharedPrompt(llm.runtime, CONTEXT, NEEDS).context())
    again, _ = shared.with_question(QUESTION)
    assert_same(again, SharedPrompt(llm.runtime, CONTEXT + QUESTION, NEEDS).context())


@pytest.mark.parametrize(
    "needs",
    [
        Needs(),
        Needs(5, 3),
        Needs(24, 11),
        Needs(12),
        Needs(0, 7),
        Needs(1, 1),
        Needs(column_sums=True),
    ],
)
def test_a_method_gets_the_evidence_that_it_would_have_got_alone(
    llm: hkv.LLM, needs: Needs
) -> None:
    many = SharedPrompt(llm.runtime, CONTEXT, NEEDS).context()
    alone = SharedPrompt(llm.runtime, CONTEXT, needs).context()
    for all_seen, own in zip(many.evidence, alone.evidence, strict=True):
        seen = all_seen[0].narrowed(needs)
        if not own:  # nobody asked
            assert (seen.sampled_queries, seen.last_queries) == (None, None)
            assert seen.column_sums is None
            continue
        for name in ("sampled_queries", "last_queries", "column_sums"):
            torch.testing.assert_close(getattr(seen, name), getattr(own[0], name), rtol=0, atol=0)
        if needs.sampled_queries:
            assert seen.sampled_positions.tolist() == own[0].sampled_positions.tolist()
