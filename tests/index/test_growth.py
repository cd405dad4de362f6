"""Keys that come after the build: linked through the searches that found them, or scanned."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.index import _growth
from hybrid_kv.index._growth import RecentSearches, Wanted, wanted_keys
from hybrid_kv.index.graph import GraphIndex
from tests.index.oracle import check_result, recall
from tests.index.test_graph import GROUP, HEADS, NUM_KEYS, attention_like, build

pytestmark = pytest.mark.usefixtures("_engine")

FIRST, PAGE = 2200, 4
LINKS: dict[str, Any] = {"link_keys": 150, "link_positions": 80}


@pytest.fixture
def _engine() -> None:
    from hybrid_kv.ops.native import engine_state

    if engine_state().isa is None:
        pytest.skip(f"no native engine: {engine_state().detail}")


def grow(links: dict[str, Any] = LINKS, **params: Any) -> tuple[GraphIndex, Tensor, Tensor]:
    """An index that was built over FIRST keys and searched while the rest came, the keys, and
    queries to come.
    """
    keys, queries, later = attention_like()
    index = build(keys[:, :FIRST], queries[:, :, :600], **links, **params)
    for step, stop in enumerate(range(FIRST + PAGE, NUM_KEYS + 1, PAGE)):
        index.search(queries[:, :, 600 + step % 280], 20)
        before = index.reports
        index.add(keys[:, :stop])
        changed = [one != other for one, other in zip(before, index.reports, strict=True)]
        assert sum(changed) <= 1, "one head in an add"
    return index, keys, later


def test_linked_keys_are_found_and_fewer_are_scored() -> None:
    linked, keys, later = grow()
    scanned, _, _ = grow({"link_keys": 0})
    for index in (linked, scanned):
        result = index.search(later, 20)
        check_result(result, later, keys, 20)
        assert recall(result, later, keys, 20) >= 0.93
    assert any("later keys linked" in report.reason for report in linked.reports)
    assert not any("linked" in report.reason for report in scanned.reports)
    assert linked.search(later, 20).scored < 0.9 * scanned.search(later, 20).scored


def test_the_newest_keys_are_found_whoever_asked() -> None:
    index, keys, later = grow()
    grown = torch.cat([keys, 1.5 * attention_like(seed=1)[0][:, :30]], 1)
    index.add(grown)
    result = index.search(later, 20)
    assert recall(result, later, grown, 20) >= 0.93
    assert (result.ids >= NUM_KEYS).any()


def test_links_that_lose_keys_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_asks(*arguments: Any) -> Wanted:
        wanted = wanted_keys(*arguments)
        return Wanted(wanted.queries[:0], wanted.lists[:0], wanted.held)

    monkeypatch.setattr(_growth, "wanted_keys", nobody_asks)
    beam = {"beam": 200, "target_recall": 0.9}
    kept, keys, later = grow(**beam)
    plain, _, _ = grow({"link_keys": 0}, **beam)
    assert kept.reports == plain.reports
    assert torch.equal(kept.search(later, 20).ids, plain.search(later, 20).ids)
    assert recall(kept.search(later, 20), later, keys, 20) >= 0.9


def test_links_are_saved(tmp_path: Path) -> None:
    index, keys, later = grow()
    index.save(tmp_path / "layer.hkv")
    loaded = GraphIndex.load(tmp_path / "layer.hkv", keys)
    assert loaded.reports == index.reports
    assert torch.equal(loaded.search(later, 20).ids, index.search(later, 20).ids)


def test_a_build_forgets_what_was_asked_of_other_keys() -> None:
    index, keys, later = grow()
    index.build(-keys[:, :FIRST], None)
    index.add(-keys)
    check_result(index.search(later, 20), later, -keys, 20)


def test_recent_searches_are_the_latest_and_bounded() -> None:
    recent = RecentSearches(5, 4)
    asked = torch.arange(8 * HEADS * GROUP * 3.0).reshape(8, HEADS, GROUP, 3)
    for step, queries in enumerate(asked):
        wide = torch.full((HEADS, GROUP, 2 + step % 4), step)
        recent.record(queries, wide)
    queries, lists = recent.of_head(1)
    assert len(recent) == len(queries) == 5
    assert {float(row) for row in queries[:, 0, 0]} == {float(row) for row in asked[3:, 1, 0, 0]}
    assert sorted(lists[:, 0, 0].tolist()) == [3, 4, 5, 6, 7]
    for row in lists[:, 0].tolist():  # as many as were found, four at most
        found = min(4, 2 + row[0] % 4)
        assert row == [row[0]] * found + [-1] * (4 - found)


def test_searches_are_recorded_from_several_threads() -> None:
    recent = RecentSearches(64, 4)
    queries, ids = torch.zeros(HEADS, GROUP, 3), torch.zeros(HEADS, GROUP, 4, dtype=torch.int64)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: recent.record(queries, ids), range(64)))
    assert len(recent) == 64


def test_keys_of_a_later_batch_are_not_linked_yet() -> None:
    recent = RecentSearches(64, 3)
    for step in range(64):
        row = torch.tensor([step, 100 + step, -1])
        recent.record(torch.zeros(1, 2, 3), row.expand(1, 2, 3))
    wanted = wanted_keys(recent, 0, 110, 130)
    assert wanted.lists.max() == 129
    assert ((wanted.lists >= 110) & (wanted.lists < 130)).any(-1).all()
    assert wanted.held.shape == (16, 2, 3)
    assert len(wanted.lists) == len(wanted.queries) == 2 * (20 - 5), "held out ones left out"
