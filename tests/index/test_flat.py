"""The exact scan."""

from __future__ import annotations

import pytest
import torch

from hybrid_kv.errors import IntegrityError
from hybrid_kv.index import _scan
from hybrid_kv.index.flat import FlatIndex
from tests.index.oracle import check_result, clustered, recall


def flat(keys: torch.Tensor) -> FlatIndex:
    index = FlatIndex(FlatIndex.Params())
    index.build(keys, None)
    return index


def test_keys_stay_where_they_are() -> None:
    keys, queries = clustered(37)
    index = flat(keys)
    keys.mul_(2)
    check_result(index.search(queries, 5), queries, keys, 5)
    assert index.memory_bytes == 0


@pytest.mark.parametrize("stretch", [1, 7, 40, 333])
def test_the_width_of_blocks_changes_nothing(stretch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, queries = clustered(333)
    whole = flat(keys).search(queries, 16)
    monkeypatch.setattr(_scan, "SCRATCH_BYTES", 4 * 2 * 9 * stretch)
    monkeypatch.setattr(_scan, "_BLOCK_BYTES", 1)
    pieces = flat(keys).search(queries, 16)
    assert torch.equal(pieces.ids, whole.ids)
    assert recall(pieces, queries, keys, 16) == 1.0


def test_of_equal_scores_the_lower_id_comes_first() -> None:
    keys = torch.randn(2, 6, 72).repeat(1, 20, 1)
    ids = flat(keys).search(torch.randn(2, 9, 72), 60).ids
    for block in ids.split(20, -1):
        assert (block.diff(dim=-1) > 0).all()


def test_an_index_that_was_never_built_says_so() -> None:
    with pytest.raises(IntegrityError, match=r"the index was used before build; call build"):
        FlatIndex(FlatIndex.Params()).search(torch.randn(2, 9, 72), 5)
