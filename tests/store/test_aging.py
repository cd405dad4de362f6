"""What an index learns from again, across inference mode."""

from __future__ import annotations

import pytest
import torch

from hybrid_kv.index.flat import FlatIndex
from hybrid_kv.rotary import Samples
from hybrid_kv.store.aging import KEPT_POSITIONS, Aging
from hybrid_kv.store.live_index import InlineRunner, LiveIndex


def test_queries_are_noted_outside_of_the_mode_that_the_prompt_was_computed_in() -> None:
    """A context that was made in inference mode could not be asked outside of it."""
    with torch.inference_mode():
        aging = Aging(Samples(torch.randn(2, 3, 37, 8)), 100)
        aging.asked.append((torch.randn(2, 3, 8).clone(), 101))
    aging.asked.append((torch.ones(2, 3, 8), 102))
    assert aging.renew(102).queries[:, :, -1].eq(1).all()


def test_no_more_of_a_prompt_is_kept_than_is_learned_from_again() -> None:
    samples = Samples(torch.randn(2, 3, 2 * KEPT_POSITIONS + 5, 8))
    aging = Aging(samples, 100)
    assert aging.memory_bytes == 2 * 3 * KEPT_POSITIONS * 8 * 4
    renewed = aging.renew(200).queries
    assert renewed.shape == (2, 3, KEPT_POSITIONS, 8)
    assert torch.equal(renewed[:, :, 0], samples.queries[:, :, 0])  # spread over all of it
    assert torch.isin(renewed[:, :, -1], samples.queries[:, :, -4:]).all()


def test_queries_are_noted_as_they_were_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step may write its queries where these were."""
    monkeypatch.setattr(FlatIndex, "relearn_keys", 50)
    samples = Samples(torch.randn(2, 3, 37, 8))
    live = LiveIndex(lambda: FlatIndex(FlatIndex.Params()), keys(), samples, InlineRunner())
    queries = torch.ones(2, 3, 8)
    live.search(queries, 5)
    queries.zero_()
    assert live._aging is not None
    assert live._aging.renew(102).queries[:, :, -1].eq(1).all()


def keys() -> torch.Tensor:
    return torch.randn(2, 100, 8)
