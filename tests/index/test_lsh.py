"""`lsh`: who is sampled, how probable that was, and that sums over samples are not biased."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybrid_kv.index import hashing
from hybrid_kv.index.hashing import HashTables, LshIndex, probability, tables_that_find
from hybrid_kv.types import SearchResult
from tests.index.oracle import clustered

SEEDS = 400


def built(keys: Tensor, **params: int) -> LshIndex:
    index = LshIndex(LshIndex.Params(**params))
    index.build(keys, None)
    return index


def sampled(result: SearchResult) -> list[set[int]]:
    return [set(ids[ids >= 0].tolist()) for ids in result.ids.flatten(0, 1)]


def collide_by_hand(keys: Tensor, query: Tensor, mean: Tensor, bits: int, tables: int) -> set[int]:
    """Rows of keys [N, D] whose signs agree with the query's on two groups of planes or more."""
    planes = torch.randn(keys.shape[1], tables * bits, generator=torch.Generator().manual_seed(7))
    same = (((keys - mean) @ planes > 0) == (query @ planes > 0)).unflatten(-1, (tables, bits))
    return set((same.all(-1).sum(-1) >= 2).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("known", [0, 301, 700])
def test_keys_that_collide_in_two_tables_are_sampled(known: int) -> None:
    """Those of tables, those behind them, and after tables were made anew."""
    keys, queries = clustered(700, offset=3.0)
    index = built(keys[:, :known], num_bits=5, num_tables=9, seed=7)
    index.add(keys[:, : known + 100])
    index.add(keys)
    found = index.search(queries, 700)
    mean = keys[:, :known].mean(1) if known else torch.zeros(2, keys.shape[2])
    expected = [
        collide_by_hand(keys[head], query, mean[head], 5, 9)
        for head in range(2)
        for query in queries[head]
    ]
    assert sampled(found) == expected
    assert 0 < found.scored == sum(map(len, expected)) < 700 * 18


def test_tables_are_made_anew_when_many_keys_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "_LEAST_TAIL", 10)
    keys, queries = clustered(700, offset=3.0)
    index = built(keys[:, :300], num_bits=5, num_tables=9, seed=7)
    before = index.memory_bytes
    index.add(keys)
    assert index.memory_bytes > 2 * before
    assert sampled(index.search(queries, 700)) == sampled(
        built(keys, num_bits=5, num_tables=9, seed=7).search(queries, 700)
    )


def test_a_key_is_sampled_as_often_as_its_weight_says() -> None:
    keys, queries = clustered(150, heads=1, queries=1, offset=2.0)
    counts, bias = torch.zeros(150), torch.zeros(150)
    for seed in range(SEEDS):
        found = built(keys, num_bits=3, num_tables=6, seed=seed).search(queries, 150)
        ids = found.ids[0, 0][found.ids[0, 0] >= 0]
        counts[ids] += 1
        assert found.bias is not None
        bias[ids] = found.bias[0, 0, : len(ids)]
    expected = SEEDS * (-bias).exp()
    seen = counts > 0
    error = (counts - expected)[seen] / (expected * (1 - (-bias).exp())).sqrt()[seen]
    assert error.abs().max() < 5
    assert error.square().mean() < 1.5


def test_sums_over_samples_estimate_the_sums_over_all_keys_without_bias() -> None:
    keys, queries = clustered(333, heads=1, queries=2, offset=2.0)
    values = torch.randn(333, 5)
    weights = torch.exp(0.2 * queries[0] @ keys[0].T)
    exact = torch.cat([weights @ values, weights.sum(-1, keepdim=True)], -1)
    estimates = []
    for seed in range(SEEDS):
        found = built(keys, num_bits=4, num_tables=8, seed=seed).search(queries, 333)
        assert found.bias is not None
        weighed = torch.exp(0.2 * found.scores[0] + found.bias[0])
        rows = torch.cat([values, torch.ones(333, 1)], -1)[found.ids[0].clamp_min(0)]
        estimates.append((weighed[..., None] * rows).sum(1))
    every = torch.stack(estimates)
    deviation = every.std(0) / math.sqrt(SEEDS)
    assert ((every.mean(0) - exact) / deviation).abs().max() < 4.5
    unweighed = (every.mean(0)[:, -1] - exact[:, -1]).abs() < 0.1 * exact[:, -1]
    assert unweighed.all()


def test_what_is_cut_off_is_the_worst_of_the_samples() -> None:
    keys, queries = clustered(700)
    index = built(keys, num_bits=4, num_tables=30)
    whole, cut = index.search(queries, 700), index.search(queries, 3, 40)
    assert (whole.ids[..., 40] >= 0).any()
    assert torch.equal(cut.ids, whole.ids[..., :40])
    assert whole.bias is not None
    assert cut.bias is not None
    assert torch.equal(cut.bias, whole.bias[..., :40])


def test_the_same_seed_gives_the_same_samples_and_another_gives_others() -> None:
    keys, queries = clustered(700)
    one, same, other = (
        sampled(built(keys, num_bits=6, seed=seed).search(queries, 700)) for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other


def test_probabilities_hold_at_their_ends() -> None:
    tables = HashTables(torch.randn(1, 5, 8), 10, 150, 0)
    ends = tables.log_probability(torch.tensor([1.0, -1.0, 0.0]))
    assert ends[0] == 0
    assert ends[1] == -torch.inf
    hand = 1 - (1 - 0.5**10) ** 150 - 150 * 0.5**10 * (1 - 0.5**10) ** 149
    assert float(ends[2].exp()) == pytest.approx(hand, rel=1e-9)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2, 0.7])
def test_a_share_is_turned_into_tables_that_find_it(share: float) -> None:
    bits, tables = tables_that_find(share, 10, 150)
    assert 1 <= bits <= 10
    assert 2 <= tables <= 150
    cosines = torch.randn(4000) / 96**0.5
    found = probability(1 - cosines.acos() / torch.pi, bits, tables).mean()
    assert float(found) == pytest.approx(share, rel=0.15)


@pytest.mark.parametrize("rows", [37, 601])
def test_tables_hold_what_is_counted_and_no_more(rows: int) -> None:
    """A view of the codes held two further bytes a key and table, which nobody counted."""
    keys, _ = clustered(rows)
    index = built(keys, num_bits=3, num_tables=5)
    assert all(tail.base is None for *_, tail in index._tables._tables)
    held = index.memory_bytes
    assert held == 2 * 5 * 4 * (rows + 2**3 + 1)
    promised = LshIndex.bytes_per_key(index.params, rows, 72) * 2 * rows
    assert held <= promised < held + 2 * rows
