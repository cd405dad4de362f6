"""Which pages become hot: those found most, lately, and clearly more than what they replace."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_kv.store.hot import HotPages

SIZE = 16
WHOLE = 50


def ids_in(*pages: int, heads: int = 2, queries: int = 3) -> Tensor:
    """[Hkv, M, K] one entry in each page, not the same for every head and query."""
    offsets = torch.arange(heads * queries * len(pages)).view(heads, queries, -1) % SIZE
    return SIZE * torch.tensor(pages) + offsets


def step(hot: HotPages, *found: Tensor) -> list[int]:
    """Pages promoted after a step that found these entries."""
    for ids in found:
        hot.book(ids, 0, WHOLE, None)
    promotions = hot.next_step()
    for promotion in promotions:
        hot.take(promotion)
    return [promotion.page for promotion in promotions]


def test_free_places_go_to_the_pages_found_most_and_few_in_a_step() -> None:
    hot = HotPages(SIZE, 7)
    first = step(hot, ids_in(9, 9, 9, 4, 4, 30, 30, 1, 2, 3))
    assert first[0] == 9
    assert len(first) == 4
    assert {9, 4, 30} < set(first)
    assert len(step(hot, ids_in(*range(10, 20)))) == 3, "there is no more room"
    assert len(hot) == 7


def test_a_page_that_is_no_better_takes_nobodys_place() -> None:
    hot = HotPages(SIZE, 2)
    step(hot, ids_in(3, 5))
    for _ in range(20):
        assert step(hot, ids_in(3, 5, 6)) == []
    assert hot.pages == [3, 5]


def test_what_is_found_now_replaces_what_was_found_long_ago() -> None:
    hot = HotPages(SIZE, 2)
    for _ in range(200):
        step(hot, ids_in(3, 5))
    changes = [step(hot, ids_in(3, 6)) for _ in range(150)]
    assert changes.count([6]) == 1
    assert 50 < changes.index([6]) < 120, "neither at once nor after as many steps again"
    assert hot.pages == [3, 6]


def test_only_filled_pages_become_hot() -> None:
    hot = HotPages(SIZE, 3)
    hot.book(ids_in(1, 2), 0, 2, None)
    assert [promotion.page for promotion in hot.next_step()] == [1]


def test_missing_ids_count_for_nothing() -> None:
    hot = HotPages(SIZE, 3)
    assert step(hot, torch.full((2, 3, 4), -1)) == []
    step(hot, ids_in(0))
    assert not hot.book(torch.full((2, 3, 4), -1), 0, WHOLE, None).any()


def test_pages_of_a_later_extent_have_numbers_of_their_own() -> None:
    hot = HotPages(SIZE, 3)
    hot.book(ids_in(2), 7, 4, None)
    assert [promotion.page for promotion in hot.next_step()] == [9]


def test_an_entry_is_covered_where_its_head_and_token_attend_the_page() -> None:
    """Two tokens and a group of three: row g * T + t belongs to token t."""
    hot = HotPages(SIZE, 2)
    assert step(hot, ids_in(8, 8, 4)) == [8, 4]
    attended = torch.zeros(2, 2, 2, dtype=torch.bool)
    attended[0, 1, 0] = attended[1, 0, 1] = True
    covered = hot.book(ids_in(4, 8, 20, queries=6), 0, WHOLE, attended)
    expected = torch.zeros(2, 6, 3, dtype=torch.bool)
    expected[0, 1::2, 1] = expected[1, 0::2, 0] = True
    assert torch.equal(covered, expected)


def test_scores_stay_finite_over_very_many_steps() -> None:
    hot = HotPages(SIZE, 1)
    for _ in range(50_000):
        hot.next_step()
    hot.book(ids_in(3), 0, WHOLE, None)
    hot.book(ids_in(3, 4), 0, WHOLE, None)
    assert [promotion.page for promotion in hot.next_step()] == [3]


def test_a_copy_goes_its_own_way() -> None:
    hot = HotPages(SIZE, 3)
    step(hot, ids_in(3))
    other = hot.copy()
    step(other, ids_in(5))
    assert (hot.pages, other.pages) == ([3], [3, 5])
    assert step(hot, ids_in(6)) == [6]


def test_cropped_pages_are_forgotten_and_scores_of_others_stay() -> None:
    hot = HotPages(SIZE, 1)
    step(hot, ids_in(5, 5))
    step(hot, ids_in(2, 2))
    hot.book(ids_in(2, 5), 0, WHOLE, None)
    hot.truncate(5)
    assert hot.pages == []
    assert [promotion.page for promotion in hot.next_step()] == [2]
