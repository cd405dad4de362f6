"""Methods that follow every step beside H2O and TOVA: as a loop over tokens says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.drive_method import drive
from tests.methods.eviction import (
    PROMPT,
    Array,
    Heads,
    Stepwise,
    causal_weights,
    kept_sets,
    method,
    of_groups,
    run,
)

PLACES = [(32, 0, 16), (48, 16, 8), (15, 0, 1)]
ROOM = 29


def prompt_weights(given: Heads) -> Array:
    q, k, _ = given
    return causal_weights(q[:, :PROMPT], k[:, :PROMPT], q.shape[-1] ** -0.5)


@pytest.mark.parametrize(("window", "sinks", "page"), PLACES)
@pytest.mark.parametrize("forgetting", [0.0, 0.4, 0.97])
def test_a2sf_forgets_older_queries(
    given: Heads, window: int, sinks: int, page: int, forgetting: float
) -> None:
    q, k, _ = given
    ages = np.arange(PROMPT)[::-1]
    factors = forgetting**ages
    score = of_groups((prompt_weights(given) * factors[:, None]).sum(1), len(k)) * (
        len(q) // len(k)
    )
    formula = Stepwise(
        q,
        k,
        scale=q.shape[-1] ** -0.5,
        prompt=PROMPT,
        sinks=sinks,
        window=window,
        page=page,
        room=ROOM,
        score=score,
        move=lambda old, mass: forgetting * old + mass,
    )
    sizes = {"sink_tokens": sinks, "window_tokens": window, "budget_tokens": sinks + window + ROOM}
    driven = run(method("a2sf", page, forgetting=forgetting, **sizes), given, page=page)
    for step, kept in enumerate(driven.steps):
        assert kept_sets(kept, len(k)) == formula.step(PROMPT + step), step


def test_forgetting_looks_at_no_more_queries_than_count() -> None:
    assert method("a2sf", forgetting=0.0).needs.last_queries == 1
    assert method("a2sf", forgetting=0.5).needs.last_queries == 24
    assert method("a2sf", forgetting=0.99).needs.last_queries == 1604


def test_tokens_of_one_step_age_what_came_before_by_their_number() -> None:
    tested = method("a2sf", forgetting=0.5)
    moment = type("", (), {"new": 3, "end": 10, "group": 2})
    moved = tested.moved(torch.tensor([[8.0, 0.0]]), torch.tensor([[1.0, 2.0]]), moment)
    assert moved.tolist() == [[2.0, 2.0]]


class Unimportant:
    """Which entries each query weighed below the mean; how often the recent ones did."""

    def __init__(self, weights: Array, half: int) -> None:
        self.half, self.by_query = half, []
        for at in range(weights.shape[1]):
            self.by_query.append(weights[:, at, : at + 1] < 1 / (at + 1))

    def move(self, old: Array, mass: Array) -> Array:
        self.by_query.append(mass < 1 / mass.shape[1])
        return old

    def counts(self, scores: Array) -> Array:
        end = len(self.by_query)
        found = np.zeros_like(scores)
        for at, below in enumerate(self.by_query):
            if (at + 1) // self.half >= end // self.half - 1:
                found[:, : at + 1] -= below
        return found


@pytest.mark.parametrize(("window", "sinks", "page"), PLACES)
@pytest.mark.parametrize("history", [2, 26, 64])
def test_scissorhands_drops_what_was_often_unimportant(
    given: Heads, window: int, sinks: int, page: int, history: int
) -> None:
    q, k, _ = given
    group = len(q) // len(k)
    recent = Unimportant(of_groups(prompt_weights(given), len(k)), history // 2)
    formula = Stepwise(
        q,
        k,
        scale=q.shape[-1] ** -0.5,
        prompt=PROMPT,
        sinks=sinks,
        window=window,
        page=page,
        room=ROOM,
        score=np.zeros((len(k), PROMPT)),
        move=lambda old, mass: recent.move(old, mass / group),
        decide=recent.counts,
    )
    sizes = {"sink_tokens": sinks, "window_tokens": window, "budget_tokens": sinks + window + ROOM}
    driven = run(method("scissorhands", page, history_tokens=history, **sizes), given, page=page)
    for step, kept in enumerate(driven.steps):
        assert kept_sets(kept, len(k)) == formula.step(PROMPT + step), step


def test_the_past_of_scissorhands_ends() -> None:
    """What all queries but those of the last half passed by is forgotten."""
    driven = drive(method("scissorhands", history_tokens=20, window_tokens=16), prompt=PROMPT)
    assert driven.kept is not None
    assert 0 < float(driven.kept.columns["score"].max()) <= 10


def test_tokens_of_one_step_count_as_their_mean() -> None:
    tested = method("scissorhands", history_tokens=8)
    moment = type("", (), {"new": 3, "end": 10, "group": 2})
    moved = tested.moved(torch.tensor([[[1.0, 2.0]] * 2]), torch.tensor([[0.5, 0.7]]), moment)
    # Below 1 / 10 on average over 3 tokens and 2 heads; a half of 4 tokens has ended in between.
    assert moved.tolist() == [[[3.0, 1.0], [0.0, 1.0]]]
