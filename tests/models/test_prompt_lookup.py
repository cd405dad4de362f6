"""Guesses from what stands in a text, and exact decoding of texts that repeat themselves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

import hybrid_kv as hkv
from hybrid_kv.models.exact_steps import PromptLookup
from tests.models.exact_calls import answer, small
from tests.serve.asking import small_model

PROMPT, NEW = [5, 3, 9, 4, 7, 11, 6] * 20, 40
SAMPLED = {"do_sample": True, "temperature": 0.7}


@pytest.mark.parametrize(
    ("ids", "more", "count", "found"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3, 4], [], 4, [5, 6, 1, 2]),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3, 4], [], 1, [5]),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3, 4], [], 0, []),
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4], 2, [5, 6]),
        ([1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1, 2, 3, 4], [], 2, [6, 1]),
        ([1, 2, 3, 4, 5, 9, 2, 3, 4], [], 4, []),
        ([1, 1, 1, 1, 1], [], 4, [1]),
        ([1, 2, 3, 4], [], 4, []),
        ([], [], 4, []),
    ],
)
def test_what_followed_the_last_time(
    ids: Sequence[int], more: Sequence[int], count: int, found: list[int]
) -> None:
    assert PromptLookup(ids).guess(more, count) == found
    one_by_one = PromptLookup([])
    for token in ids:
        one_by_one.add(token)
    assert one_by_one.num_tokens == len(ids)
    assert one_by_one.guess(more, count) == found


@cache
def want(seed: int, sampled: bool) -> list[int]:
    with hkv.load(small_model(seed), config="full") as llm:
        how = SAMPLED if sampled else {}
        return llm.generate(PROMPT, max_new_tokens=NEW, seed=seed, **how).token_ids


@pytest.mark.parametrize("settings", [{}, {"dense_extend_tokens": 1}, {"dense_extend_tokens": 3}])
@pytest.mark.parametrize("sampled", [False, True])
def test_steps_check_several_guesses_and_tokens_stay_those_of_full(
    settings: dict[str, int], sampled: bool
) -> None:
    """A prompt of one period: sharp logits of a small vocabulary often go on with it."""
    how = SAMPLED if sampled else {}
    steps = drafted = 0
    for seed in range(3):
        with hkv.load(small_model(seed), config=small("hybrid", **settings)) as llm:
            given = torch.tensor([PROMPT])
            found = answer(llm, given, seed=seed, exact=True, max_new_tokens=NEW, **how)
        assert found.token_ids == want(seed, sampled)
        assert found.exact is not None
        steps, drafted = steps + found.exact.steps, drafted + found.exact.drafted
    if settings.get("dense_extend_tokens") == 1:
        assert steps >= drafted
    else:
        assert steps < drafted


@pytest.mark.parametrize("right", [0, 2])
def test_wrong_guesses_leave_nothing_behind_where_no_pass_follows(
    monkeypatch: pytest.MonkeyPatch, right: int
) -> None:
    """Steps that read every entry: their tokens come out as they are."""
    tokens = want(2, sampled=False)
    asked: list[int] = []

    def guess(self: PromptLookup, more: Sequence[int], count: int) -> list[int]:
        at = self.num_tokens + len(more) - len(PROMPT)
        asked.append(count)
        wrong = [(token + 1) % 7 for token in tokens[at + right :]]
        return [*tokens[at : at + right], *wrong][:count]

    monkeypatch.setattr(PromptLookup, "guess", guess)
    with hkv.load(small_model(2), config="full") as llm:
        found = answer(llm, torch.tensor([PROMPT]), exact=True, max_new_tokens=NEW)
    assert found.token_ids == tokens
    assert max(asked) > right + 1
    assert found.exact is not None
    assert found.exact.passes == 0


def test_what_came_out_is_looked_up_as_well() -> None:
    """The answer repeats a token that the prompt lacks."""
    tokens = want(0, sampled=False)
    assert tokens[1:] == [8] * (NEW - 1)
    with hkv.load(small_model(0), config=small("hybrid")) as llm:
        found = answer(llm, torch.tensor([PROMPT]), exact=True, max_new_tokens=NEW)
    assert found.token_ids == tokens
    assert found.exact is not None
    assert 3 * found.exact.steps < 2 * found.exact.drafted, "a third was guessed"
