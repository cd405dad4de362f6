"""`auto` keeps a graph only where it is faster, and remembers where that begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import IndexConfig
from hybrid_kv.errors import FileFormatError
from hybrid_kv.index import auto
from hybrid_kv.index.crossover import crossover_path, read_crossovers
from hybrid_kv.index.graph import GraphIndex
from hybrid_kv.ops.native import engine_state
from tests.index.oracle import check_result, recall
from tests.index.test_graph import NUM_KEYS, SETTINGS, attention_like

pytestmark = pytest.mark.skipif(
    engine_state().isa is None, reason=f"no native engine: {engine_state().detail}"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Seconds that graph and scan seem to take, in this order, build after build."""
    seconds: list[float] = []

    def measured(search: Callable[[Tensor], Any], queries: list[Tensor]) -> float:
        search(queries[0])
        return seconds.pop(0)

    monkeypatch.setattr(auto, "_median_time", measured)
    yield seconds
    assert not seconds, "fewer builds were timed than expected"


def build(**changes: Any) -> auto.AutoIndex:
    keys, samples, _ = attention_like()
    index: auto.AutoIndex = IndexConfig(kind="auto", **{**SETTINGS, **changes}).build()
    index.build(keys, samples)
    return index


def test_a_faster_graph_is_kept(times: list[float]) -> None:
    times += [100e-6, 150e-6]
    index = build()
    assert {report.serves for report in index.reports} == {"graph"}
    later = attention_like()[2]
    result = index.search(later, 20)
    assert result.scored < 0.9 * later.shape[0] * later.shape[1] * NUM_KEYS


def test_a_slower_graph_is_dropped_and_the_reason_has_both_times(times: list[float]) -> None:
    times += [150e-6, 100e-6]
    index = build()
    assert {report.serves for report in index.reports} == {"flat"}
    assert index.reports[0].reason == "the scan is faster here: 100 against 150 us"
    keys, _, later = attention_like()
    result = index.search(later, 20)
    check_result(result, later, keys, 20)
    assert recall(result, later, keys, 20) >= 0.99
    index.add(torch.cat([keys, keys[:, :9] + 1], 1))
    assert len(index) == NUM_KEYS + 9


def test_contexts_far_below_the_crossover_build_no_graph(times: list[float]) -> None:
    times += [150e-6, 100e-6]
    build()  # 3000 keys: they would meet at 4500
    index = build()
    assert index.reports[0].reason == "3000 keys; on this machine graphs pay from 4,500 on"
    (known,) = read_crossovers().values()
    assert (known.keys, known.measured_keys) == (4500, NUM_KEYS)


def test_contexts_near_the_crossover_are_measured_again(times: list[float]) -> None:
    times += [110e-6, 100e-6, 90e-6, 100e-6]
    assert build().reports[0].serves == "flat"
    assert build().reports[0].serves == "graph"


def test_nothing_is_kept_where_that_was_declined(times: list[float]) -> None:
    times += [150e-6, 100e-6, 150e-6, 100e-6]
    build(remember=False)
    build(remember=False)
    assert not crossover_path().exists()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": {"keys": 3}}', "\0"])
def test_a_damaged_memory_is_measured_anew(times: list[float], content: str) -> None:
    crossover_path().parent.mkdir()
    crossover_path().write_text(content, encoding="utf-8")
    times += [100e-6, 150e-6]
    assert build().reports[0].serves == "graph"
    assert len(read_crossovers()) == 1


def test_a_folder_that_cannot_be_written_costs_nothing(
    times: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    times += [100e-6, 150e-6]
    assert build().reports[0].serves == "graph"
    assert read_crossovers() == {}


def test_a_saved_index_comes_back_as_what_it_was(times: list[float], tmp_path: Path) -> None:
    times += [100e-6, 150e-6]
    index = build()
    keys, _, later = attention_like()
    index.save(tmp_path / "layer.hkv")
    loaded = auto.AutoIndex.load(tmp_path / "layer.hkv", keys)
    assert torch.equal(loaded.search(later, 20).ids, index.search(later, 20).ids)
    with pytest.raises(FileFormatError, match="holds an index of kind 'auto', expected 'graph'"):
        GraphIndex.load(tmp_path / "layer.hkv", keys)


def test_real_clocks_decide_for_the_faster_one() -> None:
    index = build()
    (known,) = read_crossovers().values()
    faster = "graph" if known.graph_us <= known.scan_us else "flat"
    assert {report.serves for report in index.reports} == {faster}
