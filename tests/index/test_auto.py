"""`auto` keeps a graph only where it is faster, and remembers where that begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import IndexConfig
from hybrid_kv.errors import FileFormatError
from hybrid_kv.index import auto
from hybrid_kv.index._choice import Cost, Pace, cheapest, decoding_pace
from hybrid_kv.index.crossover import crossover_path, read_crossovers
from hybrid_kv.index.graph import GraphIndex
from hybrid_kv.ops.native import engine_state
from hybrid_kv.ops.native.pool import default_pool
from hybrid_kv.rotary import Samples
from hybrid_kv.store.live_index import InlineRunner, LiveIndex
from tests.index.oracle import check_result, recall
from tests.index.test_graph import HEADS, NUM_KEYS, SETTINGS, attention_like

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

    def costs(kind: str) -> Any:
        def measured(self: Any, queries: Sequence[Tensor]) -> list[Cost | None]:
            return [Cost(kind, seconds.pop(0), 0)] * HEADS

        return measured

    monkeypatch.setattr(auto._Graphs, "costs", costs("graph"))
    monkeypatch.setattr(auto._Scan, "costs", costs("flat"))
    monkeypatch.setattr(auto, "decoding_pace", lambda: Pace(1, 1e9))
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
    assert index.reports[0].beam == 0
    assert index.reports[0].reason.endswith(
        "% scanned; flat 100 us (work), graph 150 us (work); 1 threads, 1 GB/s"
    )
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


def test_every_head_is_decided_alone(times: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    times.append(120e-6)  # of the scan
    graphs = [Cost("graph", 100e-6, 0), Cost("graph", 150e-6, 0)]
    monkeypatch.setattr(auto._Graphs, "costs", lambda self, queries: graphs)
    index = build()
    assert [report["serves"] for report in index.describe()] == ["graph", "flat"]
    keys, _, later = attention_like()
    result = index.search(later, 20)
    check_result(result, later, keys, 20)
    assert recall(result, later, keys, 20) >= 0.95
    whole = later.shape[1] * NUM_KEYS
    assert whole < result.scored < 2 * whole


@pytest.mark.parametrize(("threads", "bandwidth", "kind"), [(1, 1e9, "flat"), (8, 1e9, "graph")])
def test_many_threads_favour_what_reads_less(threads: int, bandwidth: float, kind: str) -> None:
    # Work and bytes of one head of 128K keys, as in docs/lab.md: alone the scan is faster.
    costs = [Cost("graph", 150e-6, 10_000), Cost("flat", 100e-6, 80_000)]
    chosen, why = cheapest(costs, Pace(threads, bandwidth))
    assert chosen == kind
    assert "flat 100 us (work)" in why if threads == 1 else "flat 80 us (memory)" in why


def test_a_third_kind_can_be_the_cheapest() -> None:
    costs = [Cost("graph", 3e-4, 0), Cost("sketch", 1e-4, 10), Cost("flat", 1e-4, 2**30)]
    assert cheapest(costs, Pace(2, 1e9))[0] == "sketch"


def test_the_pace_of_decoding_is_measured_with_its_threads() -> None:
    pace = decoding_pace()
    assert pace.threads == default_pool().threads
    assert 1e8 < pace.bandwidth < 1e13
    assert decoding_pace() is pace


def test_a_context_that_was_scanned_is_decided_anew_when_it_has_doubled(
    times: list[float],
) -> None:
    # 3,824 keys were scanned for good, at 15,000 as well.
    keys, samples, _ = attention_like()
    settings = {**SETTINGS, "min_keys": 4000, "horizon_tokens": 500}
    live = LiveIndex(
        lambda: IndexConfig(kind="auto", **settings).build(),
        keys,
        Samples(samples),
        InlineRunner(),
    )
    assert live.describe()[0]["reason"] == "3000 keys, a graph takes 4000"
    times += [100e-6, 150e-6]
    more = torch.cat([keys, keys[:, :2000] + 1], 1)
    live.add(more)
    assert live.describe()[0]["serves"] == "flat"
    live.add(torch.cat([more, keys[:, :1000] - 1], 1))
    assert {head["serves"] for head in live.describe()} == {"graph"}


def test_real_clocks_decide_for_the_cheapest_kind() -> None:
    index = build()
    pace = str(decoding_pace())
    for report in index.reports:
        assert report.reason.endswith(pace)
        first = report.reason.split("; ")[1].split()[0]
        assert report.serves == first
