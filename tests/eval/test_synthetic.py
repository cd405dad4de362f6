"""Made-up heads: the statistics of attention, at a size that a test can afford, and their seeds.

Bands are wide: they tell attention-like data from Gaussian noise, not one seed from another.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from benchmarks.common.head_stats import HeadStats, effective_dim, head_stats
from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.eval.synthetic import PAPER, PROFILES, STRESS, SyntheticHead, _smooth

KEYS = 16_411
SEEDS = (0, 5)
BOTH = pytest.mark.parametrize("profile", sorted(PROFILES))


@cache
def made(profile: str, seed: int = 0) -> SyntheticHead:
    return SyntheticHead(
        PROFILES[profile], KEYS, num_q_heads=1, weight_seed=seed, text_seed=seed, test_tokens=512
    )


@cache
def stats(profile: str, seed: int) -> HeadStats:
    head = made(profile, seed)
    return head_stats(head.keys, head.build_queries(0), head.test_queries(0))


def mean(profile: str, name: str) -> float:
    return sum(getattr(stats(profile, seed), name) for seed in SEEDS) / len(SEEDS)


def small(**options: int) -> SyntheticHead:
    return SyntheticHead(
        PAPER, **{"num_keys": 5003, "num_q_heads": 2, "test_tokens": 37, **options}
    )


@BOTH
def test_queries_lie_outside_the_keys(profile: str) -> None:
    assert 2.7 < mean(profile, "distance_ratio") < 5.5
    assert 9 < mean(profile, "key_distance") < 11.4  # sqrt(128) for Gaussian keys


@pytest.mark.parametrize(("profile", "low", "high"), [("paper", 0.8, 0.99), ("stress", 0.5, 0.9)])
def test_a_hundred_keys_hold_most_of_the_mass(profile: str, low: float, high: float) -> None:
    assert low < mean(profile, "top100_mass") < high
    assert mean(profile, "top100_mass") < mean(profile, "top1000_mass") < 0.999


@pytest.mark.parametrize(("profile", "low", "high"), [("paper", 0.3, 0.8), ("stress", 0.12, 0.4)])
def test_few_keys_serve_many_queries(profile: str, low: float, high: float) -> None:
    assert low < mean(profile, "hub_share") < high


@BOTH
def test_queries_see_few_directions(profile: str) -> None:
    assert 3 < mean(profile, "effective_dim") < 24


def test_most_keys_score_below_zero() -> None:
    head = made("paper")
    logits = head.test_queries(0)[:64] @ head.keys[-4096:].T / 128**0.5
    assert -30 < logits.mean() < -3


def test_a_hub_lifts_the_keys_of_salient_types() -> None:
    with_hub, without = (
        SyntheticHead(replace(PAPER, hub=hub), 5003, num_q_heads=1) for hub in (12.0, 1e-6)
    )
    part = with_hub.keys - without.keys
    salience = torch.from_numpy(with_hub._type_salience[with_hub._types[4:5007]])
    assert torch.corrcoef(torch.stack([salience, part.norm(dim=1)]))[0, 1] > 0.6
    assert (with_hub.test_queries(0) @ part.T).mean() / 128**0.5 > 0.1


def test_smoothing_in_blocks_is_smoothing_at_once() -> None:
    noise = np.random.default_rng(0).standard_normal((9001, 3), dtype=np.float32)
    expected = noise.copy()
    for lag in (1, 2, 4):
        expected[lag:] = (expected[lag:] + 0.5 * expected[:-lag]) / 1.25**0.5
    _smooth(noise)
    np.testing.assert_allclose(noise, expected, atol=1e-5)


def test_queries_of_high_rank_see_more_directions() -> None:
    params = replace(PAPER, query_rank=0, query_noise=1.0, sharpness=6.0)
    wide = SyntheticHead(params, KEYS, num_q_heads=1)
    usual = stats("paper", 0).effective_dim
    assert effective_dim(wide.keys, wide.build_queries(0)) > 1.5 * usual


def test_a_query_looks_for_its_target() -> None:
    params = replace(STRESS, drift=0.0, sharpness=6.0, sharpness_sd=0.0)
    head = SyntheticHead(params, 5003, num_q_heads=1)
    rows = torch.arange(2000, 5003, 7)
    targets = torch.from_numpy(head.targets[0])[rows + 4] - 4
    kept = targets >= 0
    scores = head.build_queries(0, rows[kept]) @ head.keys.T
    rank = (scores > scores.gather(1, targets[kept, None])).float().mean(1)
    assert rank.median() < 0.2  # 0.5 by chance; RoPE turns the offsets, which blurs it


def test_targets_lie_before_the_query() -> None:
    targets = torch.from_numpy(made("paper").targets[0])
    assert bool((targets[1:] < torch.arange(1, len(targets))).all())
    assert bool((targets >= 0).all())
    near = (torch.arange(len(targets)) - targets < 2000)[8000:].float().mean()
    assert 0.25 < near < 0.6


def test_shapes_are_those_asked_for() -> None:
    head = small(head_dim=72, num_q_heads=3)
    assert head.keys.shape == (5003, 72)
    assert head.build_queries(2).shape == (5003, 72)
    assert head.test_queries(0).shape == (37, 72)
    assert head.params.latent_dim == 36
    assert head.keys.dtype == head.test_queries(0).dtype == torch.float32


def test_a_text_may_be_tiny() -> None:
    head = SyntheticHead(PAPER, 3, num_q_heads=1, sink_tokens=0, window_tokens=0, test_tokens=0)
    assert bool(head.keys.isfinite().all())
    assert head.test_queries(0).shape == (0, 128)


def test_rows_on_demand_are_rows_of_the_whole() -> None:
    head = small()
    rows = torch.tensor([4999, 3, 4095, 4092, 3, 0])
    assert torch.allclose(head.build_queries(1, rows), head.build_queries(1)[rows], atol=1e-4)
    assert torch.allclose(
        head.test_queries(1, torch.tensor([36, 1])), head.test_queries(1)[[36, 1]], atol=1e-4
    )
    assert head.build_queries(0, torch.empty(0, dtype=torch.int64)).shape == (0, 128)


def test_equal_seeds_give_equal_numbers() -> None:
    assert torch.equal(small().keys, small().keys)
    assert torch.equal(small().test_queries(1), small().test_queries(1))


@pytest.mark.parametrize("seed", ["weight_seed", "text_seed"])
def test_either_seed_changes_keys_and_queries(seed: str) -> None:
    one, other = small(), small(**{seed: 1})
    assert not torch.allclose(one.keys, other.keys, atol=0.1)
    assert not torch.allclose(one.test_queries(0), other.test_queries(0), atol=0.1)


def test_another_text_keeps_the_model() -> None:
    def mean_key(**seeds: int) -> torch.Tensor:
        return small(**seeds).keys.mean(0)

    def alike(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(torch.cosine_similarity(a, b, dim=0))

    assert alike(mean_key(), mean_key(text_seed=1)) > 0.95
    assert alike(mean_key(), mean_key(weight_seed=1)) < 0.8


def test_heads_differ_and_do_not_depend_on_how_many_there_are() -> None:
    pair, single = small(), small(num_q_heads=1)
    assert torch.equal(pair.test_queries(0), single.test_queries(0))
    assert not torch.allclose(pair.test_queries(0), pair.test_queries(1), atol=0.1)


def test_a_longer_text_begins_with_the_shorter_one() -> None:
    short, long = small(), small(num_keys=9001)
    assert torch.allclose(long.keys[:5003], short.keys, atol=1e-4)
    rows = torch.arange(0, 5003, 101)
    assert torch.allclose(long.build_queries(0, rows), short.build_queries(0, rows), atol=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [{"num_keys": 0}, {"head_dim": 33}, {"head_dim": 8}, {"num_q_heads": 0}, {"test_tokens": -1}],
)
def test_impossible_sizes_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        small(**wrong)


def test_unknown_heads_and_rows_are_refused() -> None:
    head = small()
    with pytest.raises(ShapeError):
        head.build_queries(2)
    with pytest.raises(ShapeError):
        head.build_queries(0, torch.tensor([5003]))
    with pytest.raises(ShapeError):
        head.test_queries(0, torch.tensor([-1]))
