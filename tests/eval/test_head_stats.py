"""Statistics of heads on keys whose answers are known."""

from __future__ import annotations

import pytest
import torch

from benchmarks.common.head_stats import effective_dim, head_stats


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_isotropic_data_have_their_full_dimension() -> None:
    assert effective_dim(normal(4001, 24), normal(3001, 24, seed=1)) == pytest.approx(24, rel=0.05)


def test_directions_that_no_query_looks_at_do_not_count() -> None:
    queries = normal(3001, 24, seed=1)
    queries[:, 5:] = 0
    assert effective_dim(normal(4001, 24), queries) == pytest.approx(5, rel=0.05)


def test_a_common_shift_of_the_keys_does_not_count() -> None:
    keys, queries = normal(4001, 24), normal(3001, 24, seed=1)
    assert effective_dim(keys + 50, queries) == pytest.approx(
        effective_dim(keys, queries), rel=0.01
    )


def test_distances_are_in_units_of_the_keys_spread() -> None:
    scale = torch.linspace(0.1, 10, 24)
    keys = normal(4001, 24) * scale + 3
    inside = head_stats(keys, normal(3001, 24, seed=1) * scale + 3, keys[:11])
    outside = head_stats(keys, 4 * normal(3001, 24, seed=1) * scale + 3, keys[:11])
    assert inside.key_distance == pytest.approx(24**0.5, rel=0.05)
    assert inside.distance_ratio == pytest.approx(1, rel=0.05)
    assert outside.distance_ratio == pytest.approx(4, rel=0.05)


def test_mass_of_equal_keys_is_their_share() -> None:
    stats = head_stats(
        torch.cat([normal(3000, 24), normal(1, 24)]), normal(99, 24), torch.zeros(7, 24)
    )
    assert stats.top100_mass == pytest.approx(100 / 3001, rel=1e-3)
    assert stats.top1000_mass == pytest.approx(1000 / 3001, rel=1e-3)


def test_hubs_are_the_ten_most_frequent_best_keys() -> None:
    keys = 1000.0 * torch.eye(24).repeat(5, 1)[:41] * torch.arange(41, 0, -1)[:, None]
    asked = torch.eye(24)[[0] * 20 + list(range(1, 21))]  # one key serves 20 queries, 20 keys one
    stats = head_stats(keys + normal(41, 24), normal(99, 24), asked)
    assert stats.hub_share == pytest.approx((20 + 9) / 40)
    assert stats.top100_mass == pytest.approx(1, rel=1e-3)
