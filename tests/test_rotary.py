"""Queries turned from one position to another."""

from __future__ import annotations

import pytest
import torch

from hybrid_kv.rotary import Rotary, Samples
from hybrid_kv.types import Evidence, LayerShape, ModelInfo
from tests.tolerances import TOLERANCES


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, **TOLERANCES[torch.float32])


FREQUENCIES = (1.0, 0.3, 0.05, 1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_turns_add_up_and_undo_each_other(interleaved: bool) -> None:
    rotary = Rotary(FREQUENCIES, interleaved)
    x, there = torch.randn(3, 2, 5, 12), torch.tensor([0, 1, 37, 4096, 1_000_000])
    moved = rotary.turn(x, there)
    assert torch.equal(moved[..., 0, :], x[..., 0, :])
    assert torch.equal(moved[..., 8:], x[..., 8:])  # channels that are not turned
    close(rotary.turn(moved, -there), x)
    close(rotary.turn(rotary.turn(x, there), there), rotary.turn(x, 2 * there))


def test_scores_depend_on_the_distance_alone() -> None:
    rotary = Rotary(FREQUENCIES)
    q, k = torch.randn(1, 8), torch.randn(1, 8)
    near = rotary.turn(q, torch.tensor([40])) @ rotary.turn(k, torch.tensor([3])).T
    far = rotary.turn(q, torch.tensor([100_040])) @ rotary.turn(k, torch.tensor([100_003])).T
    close(near, far)


def test_the_layouts_differ() -> None:
    x, by = torch.randn(1, 8), torch.tensor([5])
    assert not torch.allclose(
        Rotary(FREQUENCIES).turn(x, by), Rotary(FREQUENCIES, interleaved=True).turn(x, by)
    )


def test_samples_are_spread_over_what_decoding_will_ask() -> None:
    samples = Samples(torch.randn(2, 3, 100, 8), torch.arange(100) * 7, Rotary(FREQUENCIES))
    ahead = samples.ahead(700, 64)
    assert ahead.positions is not None
    assert ahead.positions.min() >= 700
    assert ahead.positions.max() < 764
    assert len(ahead.positions.unique()) > 50
    for part in ahead.positions.split(25):  # any run of them covers the horizon, denser at first
        counts = torch.histc(part.float(), 4, 700, 764)
        assert counts.min() >= 3
        assert counts[0] == counts.max() > 25 / 4
    assert samples.positions is not None
    back = samples.rotary.turn(ahead.queries, samples.positions - ahead.positions)
    close(back, samples.queries)
    assert ahead.describe() == "turned to positions 700 to 763"


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        (Samples(torch.randn(1, 1, 9, 8)), "are not known"),
        (Samples(torch.randn(1, 1, 9, 8), torch.arange(9), Rotary(reason="no RoPE")), "no RoPE"),
    ],
)
def test_what_cannot_be_turned_is_left_and_says_why(samples: Samples, why: str) -> None:
    ahead = samples.ahead(100, 64)
    assert torch.equal(ahead.queries, samples.queries)
    assert why in ahead.describe()


def test_nothing_is_turned_without_a_horizon() -> None:
    samples = Samples(torch.randn(1, 1, 9, 8), torch.arange(9), Rotary(FREQUENCIES))
    assert samples.ahead(100, 0).queries is samples.queries


def test_evidence_knows_the_positions_of_its_queries() -> None:
    q = torch.randn(6, 20, 8)
    evidence = Evidence(20, q[:, ::5], q[:, -3:], torch.arange(4) * 5)
    samples = evidence.samples(2, Rotary(FREQUENCIES))
    assert samples is not None
    assert samples.positions is not None
    assert samples.positions.tolist() == [0, 5, 10, 15, 17, 18, 19]
    assert torch.equal(samples.queries.flatten(0, 1), q[:, samples.positions])
    made_up = Evidence(20, q[:, ::5], q[:, -3:]).samples(2, Rotary(FREQUENCIES))
    assert made_up is not None
    assert made_up.positions is None
    assert Evidence(20).samples(2, Rotary(FREQUENCIES)) is None


def test_each_layer_has_its_rotary() -> None:
    shapes = (LayerShape(0, 6, 2, 8), LayerShape(3, 6, 2, 8))
    info = ModelInfo(shapes, (Rotary(reason="none"), Rotary(FREQUENCIES)))
    assert info.rotary_of(3).frequencies == FREQUENCIES
    assert info.rotary_of(0).reason == "none"
    assert ModelInfo(shapes).rotary_of(0).reason
