"""What every registered index must do; a new kind is tested by being registered."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hybrid_kv.errors import ConfigError
from hybrid_kv.plugins import BuildCancelled
from tests.index.oracle import (
    DIM,
    KINDS,
    RECALL_FLOOR,
    check_result,
    clustered,
    floor,
    make,
    make_default,
    recall,
)
from tests.pairs import in_pairs

pytestmark = pytest.mark.host("an index lies in host memory, whatever computes")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    ("kind", "rows", "top_k", "num_queries"),
    in_pairs(KINDS, [1, 5, 37, 700], [1, 16, 50], [1, 3, 33]),
)
def test_finds_the_best_keys(kind: str, rows: int, top_k: int, num_queries: int) -> None:
    keys, queries = clustered(rows, heads=3, queries=num_queries)
    index = make(kind)
    index.build(keys, queries[:, None])
    result = index.search(queries, top_k)
    check_result(result, queries, keys, top_k)
    assert recall(result, queries, keys, top_k) >= floor(index)
    assert result.scored >= int((result.ids >= 0).sum()), "what was found was scored"
    assert len(index) == rows


def test_default_settings_keep_the_contract(kind: str) -> None:
    keys, queries = clustered(333)
    index = make_default(kind)
    index.build(keys, None)
    check_result(index.search(queries, 21), queries, keys, 21)


def test_every_dtype_is_searched_with_true_scores(kind: str, dtype: torch.dtype) -> None:
    keys, queries = clustered(333)
    keys, queries = keys.to(dtype), queries.to(dtype)
    index = make(kind)
    index.build(keys, queries[:, None])
    result = index.search(queries, 21)
    check_result(result, queries, keys, 21)
    assert recall(result, queries, keys, 21) >= floor(index)


@pytest.mark.parametrize(("top_k", "most"), [(1, 1), (7, 9), (16, 500), (3, 10_000)])
def test_the_whole_beam_is_what_was_ranked_anyway(kind: str, top_k: int, most: int) -> None:
    keys, queries = clustered(333)
    index = make(kind)
    index.build(keys, queries[:, None])
    asked, whole = index.search(queries, top_k), index.search(queries, top_k, most)
    check_result(whole, queries, keys, top_k, most)
    assert whole.scored == asked.scored, "no further work"
    assert torch.equal(whole.ids[..., :top_k], asked.ids)


def test_a_kind_that_ranks_more_than_it_was_asked_for_gives_it_away(kind: str) -> None:
    keys, queries = clustered(333)
    index = make_default(kind)
    index.build(keys, queries[:, None])
    found = int((index.search(queries, 20, 333).ids >= 0).sum(-1).amin())
    assert found == 333 if kind in ("flat", "flat-stored") else found > 20


def test_a_budget_that_no_search_can_keep_is_refused(kind: str) -> None:
    keys, queries = clustered(37)
    index = make(kind)
    index.build(keys, None)
    for top_k, most in ((0, None), (-1, 5), (5, 4)):
        with pytest.raises(ConfigError, match="must be at least"):
            index.search(queries, top_k, most)


def test_exact_kinds_score_every_key(kind: str) -> None:
    keys, queries = clustered(333)
    index = make(kind)
    index.build(keys, queries[:, None])
    scored = index.search(queries, 7).scored
    assert not index.exact or scored == queries.shape[0] * queries.shape[1] * 333


def test_no_keys_give_no_columns(kind: str) -> None:
    keys, queries = clustered(0)
    index = make(kind)
    index.build(keys, None)
    result = index.search(queries, 5)
    check_result(result, queries, keys, 5)
    assert (result.scored, len(index)) == (0, 0)


def test_no_queries_give_no_rows(kind: str) -> None:
    keys, queries = clustered(37)
    index = make(kind)
    index.build(keys, None)
    assert index.search(queries[:, :0], 5).ids.shape == (2, 0, 5)


@pytest.mark.parametrize("known", [0, 1, 300, 680, 700])
def test_adding_rows_is_building_on_the_whole(kind: str, known: int) -> None:
    keys, queries = clustered(700)
    index = make(kind)
    index.build(keys[:, :known], queries[:, None] if known else None)
    for stop in (known, (known + 700) // 2, 700):
        index.add(keys[:, :stop])
    result = index.search(queries, 16)
    check_result(result, queries, keys, 16)
    assert recall(result, queries, keys, 16) >= floor(index)
    assert len(index) == 700


def test_storage_may_move_on_add(kind: str) -> None:
    keys, queries = clustered(120)
    old = torch.empty(2, 256, DIM)  # rows in a larger array, as the cold tier keeps them
    old[:, :100] = keys[:, :100]
    index = make(kind)
    index.build(old[:, :100], queries[:, None])
    old.fill_(1e3)
    index.add(keys)
    result = index.search(queries, 16)
    check_result(result, queries, keys, 16)
    assert recall(result, queries, keys, 16) >= floor(index)


def test_build_replaces_the_content(kind: str) -> None:
    index = make(kind)
    index.build(clustered(700)[0], None)
    keys, queries = clustered(37)
    index.build(keys, queries[:, None])
    check_result(index.search(queries, 50), queries, keys, 50)
    assert len(index) == 37


@pytest.mark.parametrize("distinct", [1, 3])
def test_equal_keys_are_found_once_each(kind: str, distinct: int) -> None:
    few, queries = clustered(distinct)
    keys = few.repeat(1, 120 // distinct, 1)
    index = make(kind)
    index.build(keys, queries[:, None])
    result = index.search(queries, 16)
    check_result(result, queries, keys, 16)
    assert recall(result, queries, keys, 16) >= floor(index)


def test_memory_is_reported_and_grows_with_rows(kind: str) -> None:
    keys, _ = clustered(700)
    index = make(kind)
    index.build(keys[:, :350], None)
    before = index.memory_bytes
    index.add(keys)
    assert 0 <= before <= index.memory_bytes <= 8 * keys.numel() * keys.itemsize


def test_memory_stays_below_what_was_announced(kind: str) -> None:
    keys, queries = clustered(3000, queries=900)
    index = make(kind)
    index.build(keys, queries[:, None])
    announced = 2 * 3000 * type(index).bytes_per_key(index.params, 3000, DIM)
    fixed = 2 * 4 * DIM * 256 + 8192  # centroids, tables
    assert index.memory_bytes <= announced + fixed


def test_searches_from_two_threads_agree_with_one(kind: str) -> None:
    keys, _ = clustered(700)
    index = make(kind)
    index.build(keys, None)
    batches = [torch.randn(2, 5, DIM) for _ in range(24)]
    alone = [index.search(queries, 16) for queries in batches]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda queries: index.search(queries, 16), batches))
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.ids, other.ids)
        assert one.scored == other.scored


def test_an_index_built_in_another_thread_serves_in_this_one(kind: str) -> None:
    keys, queries = clustered(700)
    index = make(kind)
    with ThreadPoolExecutor(1) as other:
        other.submit(index.build, keys[:, :500], queries[:, None]).result()
    index.add(keys)
    result = index.search(queries, 16)
    check_result(result, queries, keys, 16)
    assert recall(result, queries, keys, 16) >= floor(index)


def test_a_stand_in_keeps_the_contract_at_once(kind: str) -> None:
    keys, queries = clustered(700)
    stand_in = make(kind).stand_in(keys[:, :500], queries[:, None])
    if stand_in is None:
        return  # its build is quick and waited for
    stand_in.build(keys[:, :500], None)
    stand_in.add(keys)
    check_result(stand_in.search(queries, 16), queries, keys, 16)
    assert recall(stand_in.search(queries, 16), queries, keys, 16) >= RECALL_FLOOR
    assert stand_in.stand_in(keys, queries[:, None]) is None, "or there would be no end"


def test_a_build_that_is_not_wanted_ends_early_or_well(kind: str) -> None:
    keys, queries = clustered(700)
    index = make(kind)
    index.cancel()
    try:
        index.build(keys, queries[:, None])
    except BuildCancelled:
        return
    check_result(index.search(queries, 16), queries, keys, 16)
