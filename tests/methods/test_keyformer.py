"""Keyformer: sums of a softmax with Gumbel noise, by loops over queries and entries in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hybrid_kv.methods.h2o import Keyformer
from tests.methods.eviction import NEW, PROMPT, Array, Heads, kept_sets, method, run, top

WINDOW, ROOM, PAGE = 32, 41, 16
SETTINGS = {"window_tokens": WINDOW, "sampled_queries": PROMPT, "answer_tokens": 20}


def noise_of(tested: Keyformer, heads: int) -> Array:
    return tested.noise(0, heads, torch.arange(PROMPT + NEW)).double().numpy()


def scores_of(logits: Array, noise: Array, temperature: float) -> Array:
    raised = np.exp((logits + noise) / temperature)
    return raised / raised.sum()


@pytest.mark.parametrize("sinks", [0, 16])
@pytest.mark.parametrize(("first", "last"), [(1.0, 2.0), (0.7, 0.7)])
def test_keyformer_keeps_the_highest_sums_of_a_noisy_softmax(
    given: Heads, sinks: int, first: float, last: float
) -> None:
    q, k, _ = (one.double().numpy() for one in given)
    group, heads, scale = len(q) // len(k), len(k), q.shape[-1] ** -0.5
    tested = method(
        "keyformer",
        sink_tokens=sinks,
        budget_tokens=sinks + WINDOW + ROOM,
        first_temperature=first,
        last_temperature=last,
        **SETTINGS,
    )
    driven = run(tested, given)
    noise = noise_of(tested, heads)
    sums = np.zeros((heads, k.shape[1]))
    for h in range(heads):
        for g in range(group):
            for at in range(PROMPT):
                logits = k[h, : at + 1] @ q[h * group + g, at] * scale
                sums[h, : at + 1] += scores_of(logits, noise[h, : at + 1], first)
    before = PROMPT - WINDOW
    kept = [top(sums[h], ROOM, range(sinks, before)) for h in range(heads)]
    for step, entries in enumerate(driven.steps):
        at = PROMPT + step
        temperature = first + min(1.0, (at + 1 - PROMPT) / 20) * (last - first)
        for h in range(heads):
            ids = sorted(kept[h] | {*range(sinks), *range(before, at + 1)})
            for g in range(group):
                logits = k[h, ids] @ q[h * group + g, at] * scale
                sums[h, ids] += scores_of(logits, noise[h, ids], temperature)
        if at + 1 - before >= WINDOW + PAGE:
            leaving = set(range(before, before + PAGE))
            before += PAGE
            kept = [
                set(sorted(kept[h] | leaving, key=lambda n: (-sums[h, n], n))[:ROOM])
                for h in range(heads)
            ]
        assert kept_sets(entries, heads) == kept
    assert entries is not None
    for h, (at, found) in enumerate(zip(*map(entries.split, ("positions", "score")), strict=True)):
        np.testing.assert_allclose(found.numpy(), sums[h, at.numpy()], rtol=2e-4)


def test_the_noise_is_gumbels() -> None:
    tested = method("keyformer")
    noise = tested.noise(3, 4, torch.arange(50_000)).double()
    assert noise.mean() == pytest.approx(0.57722, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.03)
    assert abs(np.corrcoef(noise)[0, 1:]).max() < 0.02
    assert abs(torch.corrcoef(torch.stack([noise[0, 1:], noise[0, :-1]]))[0, 1]) < 0.02
    few = torch.arange(9)
    for other in (tested.noise(4, 4, few), method("keyformer", seed=1).noise(3, 4, few)):
        assert (other.double() != noise[:, :9]).all()
    torch.testing.assert_close(tested.noise(3, 4, torch.arange(7, 9)).double(), noise[:, 7:9])
