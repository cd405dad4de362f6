"""Methods that merge what they drop: keys and values, by loops over entries in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.entries import Entries
from hybrid_kv.methods.merging import left_out, nearest
from hybrid_kv.types import Needs
from tests.drive_method import drive
from tests.methods.eviction import (
    PROMPT,
    Array,
    Heads,
    causal_weights,
    kept_sets,
    method,
    of_groups,
    run,
    top,
)
from tests.tolerances import TOLERANCES

Pair = tuple[Array, Array]
"""Key and value of an entry."""
CLOSE = TOLERANCES[torch.float32]
WINDOW, ROOM = 32, 41


def total(given: Heads) -> Array:
    """[Hq, N] weights that all queries of the prompt gave."""
    q, k, _ = given
    return causal_weights(q[:, :PROMPT], k[:, :PROMPT], q.shape[-1] ** -0.5).sum(1)


def assert_entries(kept: Entries | None, expected: list[dict[int, Pair]]) -> None:
    """By KV head positions with their keys and values."""
    assert kept is not None
    for h, wanted in enumerate(expected):
        k, v, positions = kept.head(h)
        assert positions.tolist() == sorted(wanted)
        pairs = [wanted[at] for at in positions.tolist()]
        np.testing.assert_allclose(k.numpy(), [key for key, _ in pairs], **CLOSE)
        np.testing.assert_allclose(v.numpy(), [value for _, value in pairs], **CLOSE)


def cosine(a: Array, b: Array) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


class Alike:
    """D2O's merging of one head: threshold and weighted sums."""

    def __init__(self, ratio: float) -> None:
        self.ratio, self.threshold = ratio, None

    def merge(self, held: dict[int, Pair], gone: dict[int, Pair]) -> None:
        near = {}
        for n, (key, _) in gone.items():
            alike = {at: cosine(key, other[0]) for at, other in held.items()}
            near[n] = max(alike.items(), key=lambda pair: (pair[1], -pair[0]))
        mean = float(np.mean([u for _, u in near.values()]))
        old = self.threshold
        self.threshold = mean if old is None else self.ratio * mean + (1 - self.ratio) * old
        sums = {at: [math.e * pair[0], math.e * pair[1], math.e] for at, pair in held.items()}
        for n, (at, u) in near.items():
            if u >= self.threshold:
                for part, value in enumerate((*gone[n], 1.0)):
                    sums[at][part] = sums[at][part] + math.exp(u) * value
        for at, (key, value, weight) in sums.items():
            held[at] = (key / weight, value / weight)


@pytest.mark.parametrize("ratio", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("sinks", [0, 16])
def test_d2o_merges_what_is_alike_enough(given: Heads, ratio: float, sinks: int) -> None:
    q, k, v = given
    group = len(q) // len(k)
    tested = method(
        "d2o",
        sink_tokens=sinks,
        window_tokens=WINDOW,
        budget_tokens=sinks + WINDOW + ROOM,
        mean_ratio=ratio,
    )
    driven = run(tested, given)
    scores = of_groups(total(given), len(k)) * group
    keys, values = k.double().numpy(), v.double().numpy()
    first = PROMPT - WINDOW
    expected: list[dict[int, Pair]] = []
    merging = [Alike(ratio) for _ in k]
    for h in range(len(k)):
        every = {n: (keys[h, n], values[h, n]) for n in range(sinks, first)}
        chosen = top(scores[h], ROOM, range(sinks, first))
        held = {n: every[n] for n in chosen}
        merging[h].merge(held, {n: every[n] for n in every if n not in chosen})
        expected.append(held)
    running = np.zeros((len(k), k.shape[1]))
    running[:, :PROMPT] = scores
    for step, kept in enumerate(driven.steps):
        at = PROMPT + step
        for h in range(len(k)):
            near = {n: (keys[h, n], values[h, n]) for n in [*range(sinks), *range(first, at + 1)]}
            there = {**near, **expected[h]}
            for query in q[h * group : (h + 1) * group, at].double().numpy():
                logits = {n: query @ pair[0] * q.shape[-1] ** -0.5 for n, pair in there.items()}
                whole = sum(math.exp(logit) for logit in logits.values())
                for n, logit in logits.items():
                    running[h, n] += math.exp(logit) / whole
        if at + 1 - first >= WINDOW + 16:
            for h in range(len(k)):
                every = dict(expected[h])
                every |= {n: (keys[h, n], values[h, n]) for n in range(first, first + 16)}
                chosen = set(sorted(every, key=lambda n: (-running[h, n], n))[:ROOM])
                held = {n: every[n] for n in chosen}
                merging[h].merge(held, {n: every[n] for n in every if n not in chosen})
                expected[h] = held
            first += 16
        assert_entries(kept, expected)


def test_d2o_merges_the_only_entry_that_goes(given: Heads) -> None:
    """It is as alike as the mean."""
    keys, values = (one.double().numpy() for one in given[1:])
    stop, group = PROMPT - WINDOW, len(given[0]) // len(keys)
    tested = method("d2o", sink_tokens=0, window_tokens=WINDOW, budget_tokens=PROMPT - 1)
    scores, expected = of_groups(total(given), len(keys)) * group, []
    for h in range(len(keys)):
        every = {n: (keys[h, n], values[h, n]) for n in range(stop)}
        held = {n: every[n] for n in top(scores[h], stop - 1, range(stop))}
        Alike(0.5).merge(held, {n: every[n] for n in every if n not in held})
        expected.append(held)
    assert_entries(run(tested, given, new=1).kept, expected)


@pytest.mark.parametrize("sinks", [0, 16])
@pytest.mark.parametrize("elastic", [0, 7, 25, 100])
def test_elastic_cache_averages_neighbours_and_evicts_at_one_place(
    given: Heads, sinks: int, elastic: int
) -> None:
    _, k, v = given
    tested = method(
        "elastic_cache",
        sink_tokens=sinks,
        window_tokens=WINDOW,
        budget_tokens=sinks + WINDOW + ROOM,
        elastic_tokens=elastic,
    )
    driven = run(tested, given)
    keys, values = k.double().numpy(), v.double().numpy()
    first = PROMPT - WINDOW
    anchors = sorted(top(total(given).sum(0), ROOM, range(sinks, first)))
    buckets: dict[int, list[int]] = {n: [n] for n in anchors}
    for n in set(range(sinks, first)) - set(anchors):
        buckets[min(anchors, key=lambda anchor: (abs(anchor - n), anchor))].append(n)
    order = list(anchors)
    means: dict[int, list[Pair]] = {}
    heads = range(len(k))
    for step, kept in enumerate(driven.steps):
        if PROMPT + step + 1 - first >= WINDOW + 16:
            for n in range(first, first + 16):
                order.append(n)
                buckets[n] = [n]
                del order[max(0, ROOM - elastic)]
            first += 16
        for n in set(order) - means.keys():  # a bucket changes no more
            means[n] = [(keys[h, buckets[n]].mean(0), values[h, buckets[n]].mean(0)) for h in heads]
        assert_entries(kept, [{n: means[n][h] for n in order} for h in heads])


@pytest.mark.parametrize("name", ["d2o", "elastic_cache"])
def test_nothing_is_merged_into_the_first_tokens_by_default(given: Heads, name: str) -> None:
    """They hold most of the attention, so that an average in their place changes every output."""
    q, k, v = (one.clone() for one in given)
    k[:, 0] = 4 * q.mean((0, 1))
    kept = run(method(name, budget_tokens=WINDOW + ROOM, window_tokens=WINDOW), (q, k, v)).kept
    assert kept is not None
    for head in range(len(k)):
        held = kept.head(head)[2]
        assert int(held.min()) >= 4, "the first tokens are sinks, not entries that take in others"


def test_d2o_weighs_means_evenly_by_default() -> None:
    assert HybridConfig(method="d2o").mean_ratio == 0.5


@pytest.mark.parametrize("name", ["d2o", "elastic_cache"])
def test_with_a_cold_tier_what_is_kept_are_true_copies(given: Heads, name: str) -> None:
    """A merged entry in the place of an original would be attended as if it were that."""
    driven = run(method(name, window_tokens=WINDOW, budget_tokens=77, demote="offload"), given)
    assert driven.kept is not None
    for h in range(len(given[1])):
        k, v, positions = driven.kept.head(h)
        assert torch.equal(k, given[1][h, positions])
        assert torch.equal(v, given[2][h, positions])
    assert max(driven.error) < CLOSE["atol"]


@pytest.mark.parametrize("name", ["kvmerger", "look_m", "d2o", "elastic_cache"])
def test_an_index_of_what_is_not_kept_is_asked_for_as_well(name: str) -> None:
    index = method("retrieval_attention").needs
    assert method(name).needs == Needs(column_sums=True)
    assert method(name, demote="offload").needs == index | Needs(column_sums=True)


def test_what_is_left_out_is_the_rest() -> None:
    chosen = torch.stack([torch.randperm(37)[:5] for _ in range(3)])
    rest = left_out(chosen, 37)
    for some, others in zip(chosen.tolist(), rest.tolist(), strict=True):
        assert others == sorted(set(range(37)) - set(some))
    assert left_out(torch.arange(4)[None], 4).shape == (1, 0)


def test_the_most_alike_is_found_in_blocks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, kept = torch.randn(3, 37, 72), torch.randn(3, 5, 72)
    whole = nearest(gone, kept)
    monkeypatch.setattr("hybrid_kv.methods.merging._BLOCK_NUMBERS", 40)
    for a, b in zip(whole, nearest(gone, kept), strict=True):
        torch.testing.assert_close(a, b)
    alike: Tensor = torch.cosine_similarity(gone[:, :, None], kept[:, None], dim=-1)
    assert torch.equal(whole[0], alike.argmax(-1))


@pytest.mark.parametrize("name", ["d2o", "elastic_cache"])
def test_a_prompt_that_fits_is_not_merged(name: str) -> None:
    driven = drive(method(name, window_tokens=WINDOW, budget_tokens=173), prompt=173, new=1)
    assert max(driven.error) < CLOSE["atol"]
    assert kept_sets(driven.kept, 2) == [set(range(min(driven.kept.positions), 141))] * 2
