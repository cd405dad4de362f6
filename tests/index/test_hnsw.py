"""Faiss HNSW."""

from __future__ import annotations

from typing import Any

import torch

from hybrid_kv.index.faiss_kinds import HnswIndex
from tests.index.oracle import check_result, clustered, recall


def built(keys: torch.Tensor, **params: Any) -> HnswIndex:
    index = HnswIndex(HnswIndex.Params(**params))
    index.build(keys, None)
    return index


def test_centring_finds_what_a_common_offset_hides() -> None:
    keys, queries = clustered(1500, heads=1, queries=30, offset=2.0)
    queries = queries - queries.mean(-1, keepdim=True)
    found = {
        centre: recall(
            built(keys, centre=centre, ef_search=32).search(queries, 16), queries, keys, 16
        )
        for centre in (True, False)
    }
    assert found[True] > 0.9, found
    assert found[True] > found[False] + 0.1, found


def test_scores_are_those_of_the_keys_with_and_without_centring() -> None:
    keys, queries = clustered(333, offset=3.0)
    for centre in (True, False):
        check_result(built(keys, centre=centre).search(queries, 16), queries, keys, 16)


def test_as_many_candidates_as_are_asked_for_are_kept() -> None:
    keys, queries = clustered(333)
    result = built(keys, ef_search=1).search(queries, 100)
    assert (result.ids >= 0).all()


def test_a_wider_search_scores_more_keys() -> None:
    keys, queries = clustered(1500)
    narrow = built(keys, ef_search=16).search(queries, 8).scored
    wide = built(keys, ef_search=256).search(queries, 8).scored
    assert 2 * 9 * 8 < narrow < wide <= 2 * 9 * 1500


def test_memory_holds_rows_and_links() -> None:
    keys, _ = clustered(333)
    rows_and_lowest_links = 2 * 333 * (4 * 72 + 4 * 2 * 32)
    assert rows_and_lowest_links < built(keys).memory_bytes < 1.1 * rows_and_lowest_links


def test_work_counts_the_entry_point() -> None:
    keys, queries = clustered(1)
    assert built(keys).search(queries, 1).scored == 2 * 9
