"""Faiss cells."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_kv.index.faiss_kinds import IvfIndex
from tests.index.oracle import check_result, clustered, recall


def built(keys: torch.Tensor, **params: Any) -> IvfIndex:
    index = IvfIndex(IvfIndex.Params(**params))
    index.build(keys, None)
    return index


def test_probing_every_cell_is_exact() -> None:
    keys, queries = clustered(1000)
    result = built(keys, nlist=20, nprobe=20).search(queries, 16)
    assert recall(result, queries, keys, 16) == 1.0
    assert result.scored == 2 * 9 * (1000 + 20)


def test_probing_few_cells_scores_few_keys_and_finds_most() -> None:
    keys, queries = clustered(2000)
    result = built(keys, nlist=40, nprobe=10).search(queries, 8)
    assert result.scored < 0.6 * 2 * 9 * 2000
    assert recall(result, queries, keys, 8) > 0.7


def test_a_cell_smaller_than_top_k_leaves_places_empty() -> None:
    keys, queries = clustered(1000)
    result = built(keys, nlist=20, nprobe=1).search(queries, 600)
    check_result(result, queries, keys, 600)
    assert (result.ids[..., -1] == -1).all()


def test_keys_lie_in_the_cell_of_the_nearest_centroid() -> None:
    keys, _ = clustered(1000, heads=1)
    index = built(keys, nlist=20)
    head = index._heads[0]
    centroids = torch.from_numpy(head.quantizer.reconstruct_n(0, 20))
    rows = keys[0] - keys[0].mean(0)
    sizes = torch.cdist(rows, centroids).argmin(1).bincount(minlength=20)
    assert sizes.tolist() == [head.invlists.list_size(cell) for cell in range(20)]


@pytest.mark.parametrize(
    ("rows", "nlist"), [(1, 1), (77, 1), (78, 2), (1000, 25), (16384, 420), (131072, 1448)]
)
def test_automatic_cells_keep_enough_rows_to_train_on(rows: int, nlist: int) -> None:
    assert IvfIndex(IvfIndex.Params())._nlist(rows) == nlist


def test_more_cells_than_rows_can_train_are_not_made() -> None:
    assert IvfIndex(IvfIndex.Params(nlist=512))._nlist(390) == 10


def test_cells_are_made_anew_when_rows_have_grown_fourfold() -> None:
    keys, _ = clustered(1000)
    index = built(keys[:, :250])
    index.add(keys[:, :999])
    assert index._heads[0].nlist == 6
    index.add(keys)
    assert index._heads[0].nlist == 25


def test_the_same_keys_give_the_same_cells() -> None:
    keys, queries = clustered(1000)
    first, second = (built(keys).search(queries, 16) for _ in range(2))
    assert torch.equal(first.ids, second.ids)
    assert first.scored == second.scored


def test_memory_holds_rows_ids_and_centroids() -> None:
    keys, _ = clustered(1000)
    expected = 2 * (1000 * (4 * 72 + 8) + 25 * 4 * 72 + 4 * 72)
    assert built(keys).memory_bytes == expected
