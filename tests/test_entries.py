"""Entries: values over flat, ragged memory that grows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hybrid_kv.entries import Entries
from hybrid_kv.errors import ShapeError
from hybrid_kv.ragged import Ragged

HEADS, DIM = 3, 72


def entries(count: int, first: int = 0, heads: int = HEADS, **columns: Tensor) -> Entries:
    k, v = torch.randn(2, heads, count, DIM)
    return Entries.of(k, v, torch.arange(first, first + count), **columns)


def ragged(lengths: Sequence[int]) -> Entries:
    whole = entries(max(lengths), heads=len(lengths))
    return whole.select([torch.arange(n) for n in lengths])


def assert_same(found: Entries, expected: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
    assert found.lengths == tuple(len(k) for k, _, _ in expected)
    for h, rows in enumerate(expected):
        for got, want in zip(found.head(h), rows, strict=True):
            assert torch.equal(got, want)


def by_head(found: Entries) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [tuple(part.clone() for part in found.head(h)) for h in range(found.num_heads)]


def joined(*parts: Entries) -> list[tuple[Tensor, Tensor, Tensor]]:
    per_head = zip(*(by_head(part) for part in parts), strict=True)
    return [tuple(torch.cat(same) for same in zip(*rows, strict=True)) for rows in per_head]


def test_heads_of_any_length_lie_without_padding() -> None:
    found = ragged([37, 0, 5])
    assert len(found.k) == 42
    assert found.lengths == (37, 0, 5)
    row = DIM * 4
    assert found.nbytes == 42 * (2 * row + 8)


def test_extended_appends_to_every_head() -> None:
    first, second, third = ragged([37, 0, 5]), entries(16, 37), entries(3, 53)
    expected = joined(first, second, third)
    assert_same(first.extended(second).extended(third), expected)


def test_extending_copies_an_entry_a_few_times_however_many_pages_come() -> None:
    """Each page copied all that was there: quadratic in the length of an answer."""
    kept, moved, last = entries(16), 0, None
    for page in range(1, 400):
        kept = kept.extended(entries(16, 16 * page))
        if kept.k.data_ptr() != last:
            moved, last = moved + len(kept.k), kept.k.data_ptr()
    assert kept.lengths == (6400,) * HEADS
    assert moved < 12 * 6400 * HEADS
    assert len(kept.k) < 1.13 * 6400 * HEADS + 32 * HEADS


def test_older_values_do_not_see_what_was_appended() -> None:
    first = entries(37).extended(entries(1, 37))
    before = by_head(first)
    second = first.extended(entries(16, 38))
    assert second.k.data_ptr() == first.k.data_ptr(), "it had room"
    assert_same(first, before)


def test_two_that_continue_from_one_value_do_not_disturb_each_other() -> None:
    """Beams share what was kept; the second to append would have overwritten the first's."""
    start = entries(37).extended(entries(1, 37))
    one, other = entries(16, 38), entries(16, 38)
    expected = joined(start, one), joined(start, other)
    left, right = start.extended(one), start.extended(other)
    assert_same(left, expected[0])
    assert_same(right, expected[1])
    more = entries(2, 54)
    expected_left = joined(left, more)
    assert_same(left.extended(more), expected_left)
    assert_same(right, expected[1])


def test_a_column_follows_growth_and_selection() -> None:
    score = torch.rand(HEADS, 37)
    kept = entries(37, score=score).extended(entries(5, 37))
    assert [column.tolist()[37:] for column in kept.split("score")] == [[0.0] * 5] * HEADS
    ids = torch.tensor([[1, 40], [36, 0], [7, 8]])
    chosen = kept.select(ids)
    expected = torch.stack([score[0, 1], torch.tensor(0.0)])
    assert torch.equal(chosen.split("score")[0], expected)
    assert torch.equal(chosen.split("score")[1], score[1, [0, 36]])


def test_a_column_that_older_entries_lack_is_zero_for_them() -> None:
    bias = torch.randn(HEADS, 5)
    kept = entries(37).extended(entries(5, 37, bias=bias))
    assert torch.equal(kept.split("bias")[2], torch.cat([torch.zeros(37), bias[2]]))


def test_zeros_are_written_where_another_value_has_been() -> None:
    kept = entries(37, score=torch.rand(HEADS, 37)).select(
        torch.arange(37).repeat(HEADS, 1), room=9
    )
    grown = kept.extended(entries(5, 37))
    assert grown.k.data_ptr() == kept.k.data_ptr()
    assert grown.dense("score")[:, 37:].abs().sum() == 0


def test_selecting_by_mask_by_ids_and_by_matrix_agree() -> None:
    kept = entries(37)
    masks = torch.zeros(HEADS, 37, dtype=torch.bool)
    masks[:, [3, 17, 36]] = True
    ids = torch.tensor([[36, 3, 17]] * HEADS)
    for chosen in (masks, list(masks), ids, list(ids)):
        found = kept.select(chosen)
        assert found.lengths == (3,) * HEADS
        assert all(at.tolist() == [3, 17, 36] for at in found.split("positions"))
        assert torch.equal(found.head(1)[0], kept.head(1)[0][[3, 17, 36]])


def test_selecting_frees_the_rest() -> None:
    kept = entries(1000).select(torch.arange(10).repeat(HEADS, 1))
    assert kept.nbytes == HEADS * 10 * (2 * DIM * 4 + 8)


def test_a_head_exchanges_its_row_without_moving_the_others() -> None:
    one = entries(16).select([torch.tensor([1]), torch.arange(3), torch.arange(0)], room=8)
    found = one
    for step in range(4):
        new = entries(5, 20 + step).select([torch.tensor([0]), torch.arange(0), torch.arange(0)])
        found = found.extended(new).without_first([1, 0, 0])
        assert found.k.data_ptr() == one.k.data_ptr()
        assert_same(found, [by_head(new)[0], by_head(one)[1], by_head(one)[2]])
    assert found.without_first([1, 2, 0]).lengths == (0, 1, 0)


def test_room_lets_a_fixed_buffer_take_a_page_in_place() -> None:
    kept = entries(37).select([torch.arange(n) for n in (5, 0, 37)], room=16)
    page = entries(16, 37)
    expected = joined(kept, page)
    grown = kept.extended(page)
    assert grown.k.data_ptr() == kept.k.data_ptr()
    assert_same(grown, expected)


@pytest.mark.parametrize("lengths", [[37, 37, 37], [37, 0, 5], [0, 0, 0]])
def test_entries_before_a_position_are_what_was_older(lengths: list[int]) -> None:
    kept = ragged(lengths).extended(entries(16, 37))
    found = kept.before(40)
    expected = [tuple(part[: n + 3] for part in kept.head(h)) for h, n in enumerate(lengths)]
    assert_same(found, expected)
    assert kept.before(53) is kept


@pytest.mark.parametrize("shared", [True, False], ids=["a view", "gathered"])
def test_borrowed_memory_is_never_written(shared: bool) -> None:
    memory = torch.randn(HEADS, 100, DIM)
    k = memory[:, 10:60] if shared else memory[:, torch.arange(10, 60)].transpose(0, 1)
    k = k if shared else k.transpose(0, 1)
    left = Entries.borrowed(k, k, torch.arange(7, 57))
    assert (left.k.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()) == shared
    before, page = memory.clone(), entries(16, 60)
    expected = joined(left, page)
    assert_same(left, [(rows, rows, torch.arange(7, 57)) for rows in memory[:, 10:60]])
    assert_same(left.extended(page), expected)
    assert left.is_borrowed
    assert not left.copied().is_borrowed
    assert torch.equal(memory, before)
    assert_same(left.copied(), by_head(left))
    assert_same(
        left.select([torch.arange(n) for n in (1, 0, 3)]).select(
            [torch.arange(n) for n in (1, 0, 2)]
        ),
        [tuple(part[:n] for part in left.head(h)) for h, n in enumerate((1, 0, 2))],
    )


def test_even_heads_have_a_dense_view_and_ragged_ones_none() -> None:
    grown = entries(37).extended(entries(16, 37))
    dense = grown.dense("k")
    assert dense is not None
    assert dense.shape == (HEADS, 53, DIM)
    assert all(torch.equal(dense[h], grown.head(h)[0]) for h in range(HEADS))
    assert dense.untyped_storage().data_ptr() == grown.k.untyped_storage().data_ptr()
    assert ragged([37, 0, 5]).dense("k") is None


def test_tables_and_state_are_kept_and_counted() -> None:
    table = Ragged(columns={"scale": torch.ones(HEADS * 2, 4)}, starts=(0, 2, 4), lengths=(2, 2, 2))
    kept = entries(5).with_tables(groups=table).with_state(seen=torch.ones(7))
    kept = kept.extended(entries(1, 5)).select(torch.zeros(HEADS, 1, dtype=torch.int64))
    assert kept.state["seen"].shape == (7,)
    grown = kept.tables["groups"].extended(table)
    assert grown.lengths == (4, 4, 4)
    assert kept.nbytes == HEADS * (2 * DIM * 4 + 8) + 4 * (HEADS * 2 * 4) + 4 * 7


def test_no_entries_are_a_place_for_state() -> None:
    kept = Entries.empty(entries(5), seen=torch.ones(7))
    assert kept.lengths == (0, 0, 0)
    page = entries(16, 37)
    expected = by_head(page)
    grown = kept.extended(page)
    assert_same(grown, expected)
    assert grown.state["seen"].shape == (7,)


def test_what_does_not_fit_together_is_refused() -> None:
    kept = entries(5)
    with pytest.raises(ShapeError, match=r"rows of 3 KV heads must be extended by as many"):
        kept.extended(entries(5, heads=2))
    with pytest.raises(ShapeError, match=r"column 'k' must be \[capacity, 72\] torch.float32"):
        kept.extended(Entries.of(*torch.randn(2, 3, 4, 71), torch.arange(4)))
    with pytest.raises(ShapeError, match="for each of 3 KV heads, got 2"):
        kept.select(torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"mask of KV head 1 must be \[5\]"):
        kept.select([torch.ones(5).bool(), torch.ones(4).bool(), torch.ones(5).bool()])
    with pytest.raises(ShapeError, match=r"v must be \[3, 5, \.\.\.\] as the keys"):
        Entries.of(torch.randn(3, 5, DIM), torch.randn(3, 4, DIM), torch.arange(5))
    with pytest.raises(ShapeError, match="column 'score' must have 15 rows"):
        kept.with_columns(score=torch.zeros(14))
