"""Quest's page digests as an index."""

from __future__ import annotations

import pytest
import torch

from hybrid_kv.index import pages
from hybrid_kv.index.pages import PagesIndex
from tests.index.oracle import SCORE_TOLERANCE, check_result, clustered, recall, true_scores


def built(keys: torch.Tensor, page_size: int = 16) -> PagesIndex:
    index = PagesIndex(PagesIndex.Params(page_size=page_size))
    index.build(keys, None)
    return index


@pytest.mark.parametrize("rows", [1, 16, 37, 160])
def test_upper_bound_is_never_below_any_score(rows: int) -> None:
    keys, queries = clustered(rows)
    bounds = built(keys).upper_bounds(queries).repeat_interleave(16, -1)[..., :rows]
    assert (bounds - true_scores(queries, keys)).min() > -SCORE_TOLERANCE


def test_the_pages_with_the_highest_bounds_are_read() -> None:
    keys, queries = clustered(320)
    index = built(keys)
    expected = index.upper_bounds(queries).topk(3, -1).indices.sort(-1).values
    read = (index.search(queries, 48).ids // 16).sort(-1).values[..., ::16]
    assert torch.equal(read, expected)


def test_a_budget_of_all_tokens_is_exact() -> None:
    keys, queries = clustered(333)
    assert recall(built(keys).search(queries, 333), queries, keys, 333) == 1.0


def test_a_short_last_page_leaves_places_empty() -> None:
    keys = torch.zeros(1, 37, 72)
    keys[:, 32:] = 1.0  # five keys on the last page, the best for this query
    result = built(keys).search(torch.ones(1, 1, 72), 16)
    assert result.ids[0, 0].tolist() == [32, 33, 34, 35, 36] + [-1] * 11
    assert (result.scores[0, 0, 5:] == -torch.inf).all()
    assert result.scored == 3 + 5


@pytest.mark.parametrize("known", [0, 5, 16, 30, 36])
def test_digests_of_added_rows_are_those_of_a_build(known: int) -> None:
    keys, queries = clustered(100)
    index = built(keys[:, :known])
    for stop in range(known, 101, 5):
        index.add(keys[:, :stop])
    index.add(keys)
    assert torch.equal(index.upper_bounds(queries), built(keys).upper_bounds(queries))


def test_work_counts_bounds_and_scores() -> None:
    keys, queries = clustered(320)
    assert built(keys).search(queries, 20).scored == 2 * 9 * (20 + 2 * 16)


def test_many_queries_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, queries = clustered(320)
    whole = built(keys).search(queries, 20)
    monkeypatch.setattr(pages, "SCRATCH_BYTES", 1)
    parts = built(keys).search(queries, 20)
    assert torch.equal(parts.ids, whole.ids)
    assert parts.scored == whole.scored


def test_digests_take_two_keys_per_page() -> None:
    keys, queries = clustered(320)
    index = built(keys.bfloat16())
    assert index.memory_bytes == 2 * (20 + 64) * 2 * 72 * 2, "and room for those to come"
    check_result(index.search(queries, 20), queries, keys.bfloat16(), 20)
