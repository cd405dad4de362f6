"""What an index learns from again, across inference mode."""

from __future__ import annotations

import pytest
import torch

from hybrid_kv.index.flat import FlatIndex
from hybrid_kv.rotary import Samples
from hybrid_kv.store.index_builder import InlineRunner
from hybrid_kv.store.live_index import LATEST, PROMPT, SPREAD, IndexRefresh, LiveIndex

KEYS = PROMPT + LATEST + SPREAD


def test_queries_are_noted_outside_of_the_mode_that_the_prompt_was_computed_in() -> None:
    """A context that was made in inference mode could not be asked outside of it."""
    with torch.inference_mode():
        aging = IndexRefresh(Samples(torch.randn(2, 3, 37, 8)), 100)
        aging.note(torch.randn(2, 3, 8).clone(), 101)
    aging.note(torch.ones(2, 3, 8), 102)
    assert aging.renew(102).queries[:, :, 1].eq(1).all()


def test_no_more_of_a_prompt_is_kept_than_is_learned_from_again() -> None:
    samples = Samples(torch.randn(2, 3, 2 * PROMPT + 5, 8))
    aging = IndexRefresh(samples, 3 * (PROMPT + LATEST + SPREAD))
    assert aging.memory_bytes == 2 * 3 * PROMPT * 8 * 4
    renewed = aging.renew(200).queries
    assert renewed.shape == (2, 3, PROMPT, 8)
    assert torch.equal(renewed[:, :, 0], samples.queries[:, :, 0])  # spread over all of it
    assert torch.isin(renewed[:, :, -1], samples.queries[:, :, -4:]).all()


@pytest.mark.parametrize("count", [LATEST, LATEST + SPREAD, LATEST + SPREAD + 1, 20000])
def test_what_was_asked_is_kept_evenly_and_the_latest_whole(count: int) -> None:
    aging = IndexRefresh(Samples(torch.full((1, 1, 4, 2), -1.0), torch.arange(4)), KEYS)
    for number in range(count):
        aging.note(torch.full((1, 1, 2), float(number)), KEYS + number)
    kept = [asked.num_keys - KEYS for asked in aging.asked]
    assert kept[-LATEST:] == list(range(count - LATEST, count))
    spread = kept[:-LATEST]
    stride = spread[1] - spread[0] if spread else 1
    assert spread == list(range(0, count - LATEST, stride))
    assert min(SPREAD // 2, count - LATEST) <= len(spread) <= SPREAD
    # The latest, the prompt's and those between: what an index checks itself on comes last.
    renewed = aging.renew(KEYS + 100 + count)
    asked = renewed.queries[0, 0, :, 0].tolist()
    assert asked == [*kept[-LATEST:], *[-1] * 4, *spread]
    assert renewed.positions is not None
    assert (renewed.positions == torch.tensor([*kept[-LATEST:], 0, 1, 2, 3, *spread])).all()
    assert aging.memory_bytes == 8 * (4 + len(kept))


@pytest.mark.parametrize("group", [1, 4, 7])
def test_what_is_learned_from_is_a_share_of_the_keys_of_a_short_context(group: int) -> None:
    """It was four to six times keys and values of a context of some hundred tokens."""
    for num_keys in (300, 1001, 5003):
        keys = 2 * num_keys * 8 * 4
        samples = Samples(torch.randn(2, group, 2048, 8))
        aging = IndexRefresh(samples, num_keys)
        for _ in range(2000):
            aging.note(torch.zeros(2, group, 8), num_keys)
        least = 3 * 32 * 2 * group * 8 * 4
        assert aging.memory_bytes <= max(keys, least)
        assert aging.prompt.queries.shape[2] >= 32


def test_two_indexes_keep_their_own_of_what_both_were_asked() -> None:
    aging = IndexRefresh(Samples(torch.zeros(1, 1, 4, 2)), KEYS)
    for number in range(LATEST + 9):
        aging.note(torch.zeros(1, 1, 2), KEYS + number)
    later = aging.behind(KEYS - 40)
    aging.note(torch.zeros(1, 1, 2), 2 * KEYS)
    assert len(later.asked) == LATEST + 9
    assert [asked.num_keys for asked in later.asked][:2] == [40, 41]


def test_queries_are_noted_as_they_were_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step may write its queries where these were."""
    monkeypatch.setattr(FlatIndex, "relearn_keys", 50)
    samples = Samples(torch.randn(2, 3, 37, 8))
    live = LiveIndex(lambda: FlatIndex(FlatIndex.Params()), keys(), samples, InlineRunner())
    queries = torch.ones(2, 3, 8)
    live.search(queries, 5)
    queries.zero_()
    assert live.aging is not None
    assert live.aging.renew(102).queries[:, :, 0].eq(1).all()


def keys() -> torch.Tensor:
    return torch.randn(2, 100, 8)
