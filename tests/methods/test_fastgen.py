"""FastGen: the cheapest policy that recovers a head's attention, by sets in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.methods.eviction import (
    NEW,
    PROMPT,
    Heads,
    Kept,
    causal_weights,
    kept_sets,
    method,
    of_groups,
    run,
    top,
)

WINDOW, SINKS, PAGE, OBSERVED = 32, 16, 16, 64


def policies(given: Heads, frequent: float, local: float) -> list[list[tuple[set[int], set[int]]]]:
    """By KV head what each policy keeps, and which of that is frequent."""
    q, k, _ = given
    weights = causal_weights(q[:, :PROMPT], k[:, :PROMPT], q.shape[-1] ** -0.5)
    mass = of_groups(weights[:, -OBSERVED:].sum(1), len(k))
    every = range(SINKS, PROMPT - WINDOW)
    recent = set(every[-round(local * PROMPT) :])
    found = []
    for head in mass:
        often = top(head, round(frequent * PROMPT), every)
        found.append(
            [
                (set(), set()),
                (often, often),
                (recent, set()),
                (often | recent, often),
                (set(every), set()),
            ]
        )
    return found


def recovered(given: Heads, ids: set[int], head: int) -> float:
    """Of the query head of a group that recovers least."""
    q, k, _ = given
    weights = causal_weights(q[:, :PROMPT], k[:, :PROMPT], q.shape[-1] ** -0.5)
    group = len(q) // len(k)
    always = [*range(SINKS), *range(PROMPT - WINDOW, PROMPT)]
    held = weights[head * group : (head + 1) * group, -OBSERVED:][..., sorted(ids) + always]
    return float(held.sum((1, 2)).min() / OBSERVED)


@pytest.mark.parametrize("recovery", [0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize(("frequent", "local"), [(0.1, 0.2), (0.3, 0.1)])
def test_heads_take_the_cheapest_policy_that_recovers(
    given: Heads, recovery: float, frequent: float, local: float
) -> None:
    tested = method(
        "fastgen",
        recovery=recovery,
        frequent_ratio=frequent,
        local_ratio=local,
        sink_tokens=SINKS,
        window_tokens=WINDOW,
    )
    driven = run(tested, given)
    expected: Kept = []
    answers: list[tuple[set[int], int]] = []
    for h, known in enumerate(policies(given, frequent, local)):
        enough = [recovered(given, ids, h) >= recovery for ids, _ in known[:-1]] + [True]
        sizes = [len(ids) if ok else PROMPT for (ids, _), ok in zip(known, enough, strict=True)]
        chosen = int(np.argmin(sizes))
        ids, often = known[chosen]
        expected.append(set(ids))
        answers.append((often, -1 if chosen == 4 else len(ids - often) if chosen > 1 else 0))
    before = PROMPT - WINDOW
    for step, kept in enumerate(driven.steps):
        if PROMPT + step + 1 - before >= WINDOW + PAGE:
            for h, (often, others) in enumerate(answers):
                more = expected[h] | set(range(before, before + PAGE))
                rest = sorted(more - often)
                expected[h] = more if others < 0 else often | set(rest[len(rest) - others :])
            before += PAGE
        assert kept_sets(kept, len(given[1])) == expected
    assert len(driven.steps) == NEW


def test_heads_of_one_kind_each_take_their_policy() -> None:
    """One head looks at the sinks, one at what is near, one at three tokens, one everywhere."""
    draw = torch.Generator().manual_seed(0)
    k = torch.randn(4, PROMPT + 1, 72, generator=draw) / 50
    q = torch.ones(4, PROMPT + 1, 72)
    k[0, :SINKS] += 1
    k[1, PROMPT - WINDOW - 20 :] += 1
    k[2, [40, 60, 80]] += 2
    settings = {"sink_tokens": SINKS, "window_tokens": WINDOW, "recovery": 0.9}
    tested = method("fastgen", frequent_ratio=0.05, local_ratio=0.2, observed_tokens=1, **settings)
    kept = kept_sets(run(tested, (q, k, k), new=1).kept, 4)
    assert kept[0] == set()
    assert kept[1] == set(range(PROMPT - WINDOW - 35, PROMPT - WINDOW))
    assert {40, 60, 80} < kept[2]
    assert len(kept[2]) == 9
    assert kept[3] == set(range(SINKS, PROMPT - WINDOW))


def test_a_limit_is_shared_in_proportion_to_what_policies_need(given: Heads) -> None:
    heads = len(given[1])
    tested = method("fastgen", recovery=0.999, budget_tokens=SINKS + WINDOW + 31)
    kept = kept_sets(run(tested, given, new=1).kept, heads)
    assert sum(map(len, kept)) == 31 * heads
    q, k, _ = given
    weights = causal_weights(q[:, :PROMPT], k[:, :PROMPT], q.shape[-1] ** -0.5)
    mass = of_groups(weights[:, -OBSERVED:].sum(1), heads)
    assert kept[0] == top(mass[0], len(kept[0]), range(SINKS, PROMPT - WINDOW))
