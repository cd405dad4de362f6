"""Quest's page digests as an index."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybrid_kv.index import pages
from hybrid_kv.index.pages import PagesIndex
from tests.index.oracle import check_result, clustered, recall


def built(keys: torch.Tensor, page_size: int = 16) -> PagesIndex:
    index = PagesIndex(PagesIndex.Params(page_size=page_size))
    index.build(keys, None)
    return index


def bounds(keys: Tensor, queries: Tensor) -> Tensor:
    """[Hkv, M, P]: no query [Hkv, M, D] scores a key [Hkv, N, D] of a page of 16 higher."""
    pages = keys.split(16, 1)
    highest = torch.stack([page.amax(1) for page in pages], 1)
    lowest = torch.stack([page.amin(1) for page in pages], 1)
    high, low = (queries[:, :, None] * one[:, None] for one in (highest, lowest))
    return torch.maximum(high, low).sum(-1)


@pytest.mark.parametrize("rows", [49, 160, 333])
def test_the_pages_with_the_highest_bounds_are_read(rows: int) -> None:
    keys, queries = clustered(rows)
    best = bounds(keys, queries).topk(3, -1).indices.flatten(0, 1)
    found = built(keys).search(queries, 48).ids.flatten(0, 1)
    for wanted, ids in zip(best, found, strict=True):
        assert set((ids[ids >= 0] // 16).tolist()) == set(wanted.tolist())


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
    found, expected = index.search(queries, 48), built(keys).search(queries, 48)
    assert torch.equal(found.ids, expected.ids)


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
