"""Methods that merge the prompt at its end: KVMerger and LOOK-M, by loops in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.methods.eviction import PROMPT, Array, Heads, kept_sets, method, of_groups, run, top
from tests.methods.test_merging import CLOSE, assert_entries, cosine, total

WINDOW, ROOM = 32, 41
Sets = list[list[int]]


def group_totals(given: Heads) -> Array:
    q, k, _ = given
    return of_groups(total(given), len(k)) * (len(q) // len(k))


@pytest.mark.parametrize("sinks", [0, 16])
@pytest.mark.parametrize("merging", ["averaged", "pivotal", "weighted"])
def test_look_m_merges_what_it_drops_into_the_most_alike(
    given: Heads, sinks: int, merging: str
) -> None:
    keys, values = (one.double().numpy() for one in given[1:])
    budget = sinks + WINDOW + ROOM
    settings = {"sink_tokens": sinks, "window_tokens": WINDOW, "budget_tokens": budget}
    driven = run(method("look_m", merging=merging, **settings), given, new=1)
    scores, expected = group_totals(given), []
    for h in range(len(keys)):
        chosen = sorted(top(scores[h], ROOM, range(sinks, PROMPT - WINDOW)))
        near: dict[int, list[tuple[int, float]]] = {n: [] for n in chosen}
        for n in set(range(sinks, PROMPT - WINDOW)) - set(chosen):
            alike = {at: cosine(keys[h, n], keys[h, at]) for at in chosen}
            at = max(alike, key=lambda one: (alike[one], -one))
            near[at].append((n, alike[at]))
        held = {}
        for at in chosen:
            pair = []
            for rows in (keys[h], values[h]):
                others = {
                    "averaged": [rows[n] for n, _ in near[at]],
                    "pivotal": [(rows[n] + rows[at]) / 2 for n, _ in near[at]],
                    "weighted": [s * rows[n] for n, s in near[at]],
                }[merging]
                pair.append((rows[at] + sum(others)) / (len(others) + 1))
            held[at] = (pair[0], pair[1])
        expected.append(held)
    assert_entries(driven.kept, expected)


def cut(keys: Array, guarded: set[int], room: int, first: int) -> Sets:
    """Neighbours joined by cosine, the most alike first, until there are `room` sets."""
    sets = [[n] for n in range(first, first + len(keys))]
    links = sorted(
        (-cosine(keys[n - 1], keys[n]), n + first)
        for n in range(1, len(keys))
        if not {n + first, n + first - 1} & guarded
    )
    for _, n in links[: len(keys) - room]:
        (right,) = (one for one in sets if one[0] == n)
        (left,) = (one for one in sets if one[-1] == n - 1)
        sets.remove(right)
        left.extend(right)
    return sets


@pytest.mark.parametrize("sinks", [0, 16])
@pytest.mark.parametrize(("ratio", "room"), [(0.0, 41), (0.2, 41), (0.5, 41), (0.5, 40)])
def test_kvmerger_averages_neighbours_by_their_distance_from_the_pivot(
    given: Heads, sinks: int, ratio: float, room: int
) -> None:
    keys, values = (one.double().numpy() for one in given[1:])
    budget = sinks + WINDOW + room
    settings = {"sink_tokens": sinks, "window_tokens": WINDOW, "budget_tokens": budget}
    driven = run(method("kvmerger", protected_ratio=ratio, **settings), given, new=1)
    scores, expected, sizes = group_totals(given), [], []
    stop = PROMPT - WINDOW
    for h in range(len(keys)):
        guarded = top(scores[h], min(int(ratio * room), (room - 1) // 2), range(sinks, stop))
        sets = cut(keys[h, sinks:stop], guarded, room, sinks)
        assert len(sets) == room
        held = {}
        for members in sets:
            pivot = max(members, key=lambda n: (scores[h, n], -n))
            far = [np.linalg.norm(keys[h, pivot] - keys[h, n]) for n in members]
            width = np.mean(far) / np.sqrt(2)
            weights = [np.exp(-(one**2) / (2 * width**2)) if width else 1.0 for one in far]
            pair = [
                sum(w * rows[n] for w, n in zip(weights, members, strict=True)) / sum(weights)
                for rows in (keys[h], values[h])
            ]
            held[pivot] = (pair[0], pair[1])
        expected.append(held)
        sizes.append([len(members) for members in sets])
    assert_entries(driven.kept, expected)
    assert driven.kept is not None
    assert driven.kept.bias is not None
    for bias, counts in zip(driven.kept.split(driven.kept.bias), sizes, strict=True):
        np.testing.assert_allclose(bias.exp().numpy(), counts, rtol=1e-5)


def test_kvmerger_knows_no_scale_of_keys(given: Heads) -> None:
    q, k, v = given
    settings = {"window_tokens": WINDOW, "budget_tokens": WINDOW + ROOM}
    plain, small = (
        run(method("kvmerger", **settings), (q / scale, k * scale, v), new=1).kept
        for scale in (1.0, 2.0**-12)
    )
    assert plain is not None
    assert small is not None
    assert torch.equal(plain.positions, small.positions)
    torch.testing.assert_close(small.v, plain.v, **CLOSE)


@pytest.mark.parametrize("name", ["kvmerger", "look_m"])
def test_what_is_offloaded_is_not_merged(given: Heads, name: str) -> None:
    settings = {"window_tokens": WINDOW, "budget_tokens": WINDOW + ROOM, "demote": "offload"}
    kept = run(method(name, **settings), given, new=1).kept
    assert kept is not None
    assert kept.bias is None
    for h, at in enumerate(kept.split("positions")):
        assert (kept.head(h)[0] == given[1][h, at]).all()
    assert [len(one) for one in kept_sets(kept, len(given[1]))] == [ROOM] * len(given[1])
