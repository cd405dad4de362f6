"""Pages that are chosen where the queries are."""

from __future__ import annotations

import pytest
import torch

from hybrid_kv.index import device_pages
from hybrid_kv.index.device_pages import DevicePages
from hybrid_kv.ops import get_ops
from hybrid_kv.plugins import Index
from tests.index.oracle import check_result, clustered

CPU = torch.device("cpu")


def pages_of(keys: torch.Tensor, size: int = 16) -> DevicePages:
    index = DevicePages(get_ops("auto"), size, CPU)
    index.build(keys, None)
    return index


def test_keys_added_later_are_chosen_like_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_pages, "_TOKENS", 100)
    keys, queries = clustered(437)
    grown = pages_of(keys[:, :300])
    grown.add(keys[:, :301])
    grown.add(keys)
    heads, group = len(keys), queries.shape[1] // 5 * 5
    queries = queries[:, :group]
    found, whole = (index.choose_pages(queries, 5) for index in (grown, pages_of(keys)))
    assert found.shape == (heads, 5, 7)
    assert torch.equal(found.sort().values, whole.sort().values)
    assert (found == 27).any(-1).all(), "the newest page is always read"


def test_fewer_pages_than_are_read_are_all_chosen() -> None:
    keys, queries = clustered(37)
    chosen = pages_of(keys).choose_pages(queries, queries.shape[1])
    assert (chosen.sort().values == torch.arange(3)).all()


def test_it_can_be_searched_as_well() -> None:
    keys, queries = clustered(437)
    check_result(pages_of(keys).search(queries, 20), queries, keys, 20)


def test_an_index_of_the_host_chooses_no_pages() -> None:
    from hybrid_kv.config import IndexConfig

    index = IndexConfig(kind="flat").build()
    assert isinstance(index, Index)
    assert not index.on_device
    with pytest.raises(NotImplementedError, match="call search"):
        index.choose_pages(torch.randn(2, 3, 8), 1)
