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


def test_the_first_pages_that_leave_the_window_make_no_digests_anew() -> None:
    """They doubled: at 128K, from 1 to 2 GiB over 32 layers, in the first step that spilled."""
    keys, _ = clustered(16 * 2100)
    index = pages_of(keys[:, : 16 * 2000])
    before = index._digests.untyped_storage()
    assert before.nbytes() <= 1.07 * 2 * keys.nbytes / 2100 * 2000 / 16
    index.add(keys)
    assert index._digests.untyped_storage().data_ptr() == before.data_ptr()


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
