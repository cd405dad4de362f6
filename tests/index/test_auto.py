"""`auto`: every head by sketch, scan or graph, whichever is the fastest where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import IndexConfig
from hybrid_kv.errors import FileFormatError
from hybrid_kv.index import _choice, auto
from hybrid_kv.index._choice import Cost, Pace, cheapest, decoding_pace
from hybrid_kv.index._file import read_arrays, write_arrays
from hybrid_kv.index._parts import runs
from hybrid_kv.index.crossover import crossover_path, read_crossovers, write_crossover
from hybrid_kv.index.graph import GraphIndex
from hybrid_kv.index.sketch import SketchIndex
from hybrid_kv.ops.native import engine_state
from hybrid_kv.ops.native.workers import default_pool
from hybrid_kv.plugins import BuildCancelled
from hybrid_kv.rotary import Samples
from hybrid_kv.store.live_index import InlineRunner, LiveIndex
from tests.index.oracle import check_result, recall
from tests.index.sketch_heads import seen_heads
from tests.store.scene import LaterRunner

pytestmark = pytest.mark.skipif(
    engine_state().isa is None, reason=f"no native engine: {engine_state().detail}"
)
HEADS, NUM_KEYS = 3, 5003
OPEN: dict[str, Any] = {
    "min_keys": 1,
    "gain": 0,
    "target_mass": 0.9,
    "graph_min_keys": 1,
    "graph_tokens": 10**6,
    "max_scanned": 1,
    "check_top_k": 37,
}
SKETCH, FLAT, GRAPH = 2e-4, 3e-4, 1e-4
"""Seconds of a search where all kinds have their use."""
Times = dict[str | tuple[str, int], float]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    """Seconds that kinds, or (kind, head), seem to take."""
    seconds: Times = {"sketch": SKETCH, "flat": FLAT, "graph": GRAPH}

    def measured(trials: Mapping[tuple[str, int], Any], queries: Tensor) -> Any:
        return {name: Cost(name[0], seconds.get(name, seconds[name[0]]), 0) for name in trials}

    monkeypatch.setattr(auto, "measured", measured)
    monkeypatch.setattr(auto, "decoding_pace", lambda: Pace(1, 1e9))
    return seconds


def heads() -> tuple[Tensor, Tensor, Tensor]:
    """Keys [HEADS, N, D], samples [HEADS, G, M, D] and later queries [HEADS, M, D]."""
    keys, samples, later = seen_heads(HEADS, NUM_KEYS)
    return keys, samples, later.flatten(1, 2)


def new(**changes: Any) -> auto.AutoIndex:
    index: auto.AutoIndex = IndexConfig(kind="auto", **{**OPEN, **changes}).build()
    return index


def build(**changes: Any) -> auto.AutoIndex:
    index = new(**changes)
    index.build(*heads()[:2])
    return index


def with_graphs(**changes: Any) -> auto.AutoIndex:
    """What follows the index that begins with sketches."""
    index = build(**changes).successor()
    assert index is not None
    index.build(*heads()[:2])
    return index


def serves(index: auto.AutoIndex) -> list[str]:
    return [told["serves"] for told in index.describe()]


def check_search(index: auto.AutoIndex) -> None:
    keys, _, later = heads()
    found = index.search(later, 37)
    check_result(found, later, keys, 37)
    assert recall(found, later, keys, 37) > 0.94
    for head in range(HEADS):
        own = slice(head, head + 1)
        single = found.scores[own], keys[own]
        assert (single[0][..., 0] <= (later[own] @ single[1].mT).amax(-1) + 1e-3).all()


def test_a_sketch_serves_where_it_is_faster_than_the_scan_and_says_both_figures(
    times: Times,
) -> None:
    index = build(graph_tokens=0)
    assert serves(index) == ["sketch"] * HEADS
    reason = index.describe()[0]["reason"]
    assert "; sketch 200 us (work), flat 300 us (work); 1 threads, 1 GB/s; " in reason
    assert reason.endswith("no graphs are wanted")
    assert index.successor() is None
    check_search(index)


def test_a_scan_serves_where_it_is_faster_and_the_sketch_is_let_go(times: Times) -> None:
    sketched = build(graph_tokens=0).memory_bytes
    times["flat"] = 1e-4
    index = build(graph_tokens=0)
    assert serves(index) == ["flat"] * HEADS
    assert "flat 100 us (work), sketch 200 us" in index.describe()[2]["reason"]
    assert [told["tiers"] for told in index.describe()] == [()] * HEADS
    assert [told["recall"] for told in index.describe()] == [0] * HEADS, "no promise of its own"
    assert index.memory_bytes > 1.5 * sketched
    check_search(index)


def test_heads_of_one_layer_are_served_by_three_kinds(times: Times) -> None:
    times |= {("graph", 0): 9e-4, ("sketch", 1): 9e-4, ("graph", 1): 8e-4}
    index = with_graphs()
    assert serves(index) == ["sketch", "flat", "graph"]
    assert "sketch 200 us (work), graph 900 us" in index.describe()[0]["reason"]
    assert "graph 100 us (work), sketch 200 us" in index.describe()[2]["reason"]
    check_search(index)
    keys, _, later = heads()
    more = torch.cat([keys, 1.5 * keys[:, :71]], 1)
    index.add(more)
    found = index.search(later, 37)
    check_result(found, later, more, 37)
    assert recall(found, later, more, 37) > 0.94
    assert (found.ids >= NUM_KEYS).any(), "keys that came later are found"


@pytest.mark.parametrize("graphs", [(0, 2), (1,), (0, 1, 2)])
def test_every_mixture_finds_for_each_head_its_own_keys(
    times: Times, graphs: tuple[int, ...]
) -> None:
    times |= {("graph", head): 9e-4 for head in range(HEADS) if head not in graphs}
    index = with_graphs()
    assert [n for n, kind in enumerate(serves(index)) if kind == "graph"] == list(graphs)
    check_search(index)


def test_a_graph_is_tried_only_where_it_wins_back_its_build(times: Times) -> None:
    index = build(remember=False)
    assert index.successor() is not None
    assert index.successor() is None, "asked for once"
    assert build(graph_tokens=10, remember=False).successor() is None
    few = build(graph_min_keys=NUM_KEYS + 1)
    assert few.describe()[0]["reason"].endswith("; 5003 keys, a graph takes 5004")


@pytest.mark.parametrize(
    ("graph_us", "build_s", "wins"), [(150, 40, True), (150, 60, False), (201, 1, False)]
)
def test_what_was_measured_here_is_what_forecasts_are_made_from(
    times: Times, graph_us: float, build_s: float, wins: bool
) -> None:
    with_graphs()
    (name,) = read_crossovers()
    write_crossover(name, NUM_KEYS, graph_s=1e-6 * graph_us, other_s=1e-4, build_s=build_s)
    index = build()  # saves 50 us x a million tokens
    verb = "wins" if wins else "does not win"
    assert (
        f"a graph ({graph_us} us, by forecast {build_s:.1f} core-seconds to build) {verb}"
        in (index.describe()[0]["reason"])
    )
    assert (index.successor() is not None) == wins


def test_what_was_measured_is_kept_for_the_machine(times: Times) -> None:
    index = with_graphs()
    (known,) = read_crossovers().values()
    assert (known.keys, known.measured_keys) == (round(NUM_KEYS / 2), NUM_KEYS)
    assert (round(known.graph_us), round(known.other_us)) == (100, 200)
    parts = [told["lists_s"] + told["project_s"] for told in index.describe()]
    assert known.build_s > sum(parts) / HEADS, "copies and self-check are part of a build"


def test_graphs_that_miss_the_goal_count_as_no_gain(times: Times) -> None:
    index = with_graphs(target_recall=0.9, max_scanned=1e-4)
    assert serves(index) == ["sketch"] * HEADS
    assert "within 0%" in index.describe()[0]["reason"]
    (known,) = read_crossovers().values()
    assert known.graph_us == known.other_us
    assert build().successor() is None


def test_nothing_is_kept_where_that_was_declined(times: Times) -> None:
    with_graphs(remember=False)
    assert not crossover_path().exists()


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"a": {"keys": 3}}', "\0", '{"a": {"scan_us": 1}}']
)
def test_a_damaged_memory_is_measured_anew(times: Times, content: str) -> None:
    crossover_path().parent.mkdir()
    crossover_path().write_text(content, encoding="utf-8")
    assert set(serves(with_graphs())) == {"graph"}
    assert len(read_crossovers()) == 1


def test_a_folder_that_cannot_be_written_costs_nothing(
    times: Times, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert set(serves(with_graphs())) == {"graph"}
    assert read_crossovers() == {}


def test_sketches_serve_while_graphs_are_built_and_take_later_keys(times: Times) -> None:
    keys, samples, later = heads()
    runner = LaterRunner()
    live = LiveIndex(new, keys, Samples(samples), runner)
    assert {told["serves"] for told in live.describe()} == {"flat"}
    runner.finish()
    live.settle(keys)
    assert {told["serves"] for told in live.describe()} == {"sketch"}
    assert live.is_building
    more = torch.cat([keys, 1.5 * keys[:, :150]], 1)
    live.add(more)
    runner.finish()
    assert {told["serves"] for told in live.describe()} == {"sketch"}
    live.settle(more)
    assert {told["serves"] for told in live.describe()} == {"graph"}
    assert not live.is_building
    assert len(live) == more.shape[1]
    found = live.search(later, 37)
    check_result(found, later, more, 37)
    assert (found.ids >= NUM_KEYS).any()


def test_what_is_built_at_once_ends_with_graphs(times: Times) -> None:
    keys, samples, _ = heads()
    live = LiveIndex(new, keys, Samples(samples), InlineRunner())
    assert {told["serves"] for told in live.describe()} == {"graph"}


def test_a_build_of_either_stage_can_be_cancelled(times: Times) -> None:
    first, second = new(), build().successor()
    assert second is not None
    for index in (first, second):
        index.cancel()
        with pytest.raises(BuildCancelled):
            index.build(*heads()[:2])


def test_a_mixed_layer_comes_back_as_what_it_was(times: Times, tmp_path: Path) -> None:
    times |= {("graph", 0): 9e-4, ("sketch", 1): 9e-4, ("graph", 1): 8e-4}
    index, path = with_graphs(), tmp_path / "layer.hkv"
    keys, _, later = heads()
    index.save(path)
    loaded = auto.AutoIndex.load(path, keys)
    ours, theirs = index.search(later, 20), loaded.search(later, 20)
    assert torch.equal(ours.ids, theirs.ids)
    assert torch.equal(ours.scores, theirs.scores)
    assert serves(loaded) == ["sketch", "flat", "graph"]
    assert [told["reason"] for told in loaded.describe()] == [
        told["reason"] for told in index.describe()
    ]
    for kind in (GraphIndex, SketchIndex):
        with pytest.raises(FileFormatError, match="holds an index of kind 'auto', expected"):
            kind.load(path, keys)
    with pytest.raises(FileFormatError, match="was made for other keys"):
        auto.AutoIndex.load(path, keys + 1)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ([3], r"part 0 serves heads \[3\]"),
        ([-1], r"part 0 serves heads \[-1\]"),
        ([], r"part 0 serves heads \[\]"),
        ([2, 2], r"part 0 serves heads \[2, 2\]"),
        ([0], "was made for other keys"),
        (None, r"its parts serve heads \[0, 1\] of 3"),
    ],
)
def test_parts_that_do_not_make_a_layer_are_refused(
    times: Times, tmp_path: Path, own: list[int] | None, message: str
) -> None:
    times |= {("graph", 0): 9e-4, ("graph", 1): 9e-4}
    index, path = with_graphs(), tmp_path / "layer.hkv"
    index.save(path)
    meta, arrays = read_arrays(path, "auto")
    assert [part["heads"] for part in meta["parts"]] == [[2], [0, 1]]
    if own is None:
        del meta["parts"][0]
        arrays = {name.replace("1/", "0/"): array for name, array in arrays.items()}
    else:
        meta["parts"][0]["heads"] = own
    write_arrays(path, "auto", meta, arrays)
    with pytest.raises(FileFormatError, match=message):
        auto.AutoIndex.load(path, heads()[0])


def test_runs_of_heads_are_views() -> None:
    assert runs([]) == []
    assert runs([3]) == [slice(3, 4, 1)]
    assert runs([0, 2, 4, 5, 6]) == [slice(0, 5, 2), slice(5, 7, 1)]
    assert runs(range(8)) == [slice(0, 8, 1)]


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


def test_a_context_that_was_scanned_is_decided_anew_when_it_has_doubled(times: Times) -> None:
    # What was scanned once was scanned for good, however long it grew.
    keys, samples, _ = heads()
    live = LiveIndex(
        lambda: new(min_keys=6000, horizon_tokens=500, graph_tokens=0),
        keys,
        Samples(samples),
        InlineRunner(),
    )
    assert live.describe()[0]["reason"] == "5003 keys, a sketch takes 6000"
    more = torch.cat([keys, keys[:, :4000] + 0.01], 1)
    live.add(more)
    assert live.describe()[0]["serves"] == "flat"
    live.add(torch.cat([more, keys[:, :1010] - 0.01], 1))
    assert {head["serves"] for head in live.describe()} == {"sketch"}


def test_real_clocks_decide_for_the_cheapest_kind() -> None:
    index = build(graph_tokens=0)
    pace = str(decoding_pace())
    for told in index.describe():
        _, costs, told_pace, _ = told["reason"].split("; ")
        assert told_pace == pace
        assert told["serves"] == costs.split()[0]


def test_waiting_for_a_core_is_no_lack_of_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = (
        count()
    )  # of a thread that works for half a second from one look at its clock to another
    monkeypatch.setattr(_choice, "default_pool", lambda: SimpleNamespace(threads=1))
    monkeypatch.setattr(_choice, "thread_time", lambda: next(ticks) / 2)
    assert decoding_pace.__wrapped__() == Pace(1, _choice._STREAMED_BYTES / 0.5)
