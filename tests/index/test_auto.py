"""`auto`: every head by sketch, scan or graph, whichever is the fastest where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import IndexConfig
from hybrid_kv.errors import FileFormatError
from hybrid_kv.index import _auto_choice, _graph_choice, auto
from hybrid_kv.index._auto_choice import Cost, SearchRate, build_forecast, cheapest, decoding_pace
from hybrid_kv.index._base import runs
from hybrid_kv.index._file import read_arrays, write_arrays
from hybrid_kv.index._graph_learner import GraphLearner
from hybrid_kv.index.graph import GraphIndex
from hybrid_kv.index.sketch import SketchIndex
from hybrid_kv.ops.native import engine_state
from hybrid_kv.ops.native.library import default_pool
from hybrid_kv.plugins import BuildCancelled
from hybrid_kv.rotary import Samples
from hybrid_kv.store.index_builder import InlineRunner
from hybrid_kv.store.live_index import LiveIndex
from tests.index.oracle import check_result, recall
from tests.index.sketch_heads import seen_heads
from tests.kit import sized
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
OF_EACH_KIND = {
    ("sketch", 0): 9e-4,
    ("graph", 0): 8e-4,
    ("graph", 1): 9e-4,
    ("sketch", 2): 2.1e-4,
}
Times = dict[str | tuple[str, int], float]


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    """Seconds that kinds, or (kind, head), seem to take."""
    seconds: Times = {"sketch": SKETCH, "flat": FLAT, "graph": GRAPH}

    def measured(trials: Mapping[tuple[str, int], Any], queries: Tensor) -> Any:
        return {name: Cost(name[0], seconds.get(name, seconds[name[0]]), 0) for name in trials}

    for chooser in (_auto_choice, _graph_choice):
        monkeypatch.setattr(chooser, "measured", measured)
        monkeypatch.setattr(chooser, "decoding_pace", lambda: SearchRate(1, 1e9))
    return seconds


def heads() -> tuple[Tensor, Tensor, Tensor]:
    """Keys [HEADS, N, D], samples [HEADS, G, M, D] and later queries [HEADS, M, D]."""
    keys, samples, later = seen_heads(HEADS, NUM_KEYS)
    return keys, samples, later.flatten(1, 2)


def new(**changes: Any) -> auto.AutoIndex:
    index: auto.AutoIndex = IndexConfig(**sized("auto", **{**OPEN, **changes})).build()
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


@dataclass
class Trials:
    """Heads whose graphs were built, in their order, and core-seconds that each seems to take."""

    built: list[int] = field(default_factory=list)
    build_s: float = 0.1


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    told = Trials()
    learn_head, keys = GraphLearner.learn_head, heads()[0]

    def learn(self: GraphLearner, own: Tensor, *args: Any, **named: Any) -> Any:
        told.built += [head for head in range(HEADS) if torch.equal(own, keys[head])]
        return learn_head(self, own, *args, **named)

    def clock() -> float:
        return told.build_s * len(told.built)

    monkeypatch.setattr(GraphLearner, "learn_head", learn)
    monkeypatch.setattr(_graph_choice, "core_clock", lambda: (clock, 1))
    return told


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
    times |= OF_EACH_KIND
    index = with_graphs()
    assert serves(index) == ["flat", "sketch", "graph"]
    assert "sketch 200 us (work), graph 900 us" in index.describe()[1]["reason"]
    assert "graph 100 us (work), sketch 210 us" in index.describe()[2]["reason"]
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
    times |= {("sketch", head): 2.5e-4 for head in graphs}  # so that they are tried first
    index = with_graphs()
    assert [n for n, kind in enumerate(serves(index)) if kind == "graph"] == list(graphs)
    check_search(index)


def test_a_graph_is_tried_only_where_it_wins_back_its_build(times: Times) -> None:
    index = build()
    assert index.successor() is not None
    assert index.successor() is None, "asked for once"
    assert build(graph_tokens=10).successor() is None
    few = build(graph_min_keys=NUM_KEYS + 1)
    assert few.describe()[0]["reason"].endswith("; 5003 keys, a graph takes 5004")


def test_a_build_that_is_forecast_to_pass_the_bound_is_not_begun(times: Times) -> None:
    index = build(graph_trial_seconds=0)
    assert index.successor() is None
    assert "core-seconds to build, graph_trial_seconds is 0" in index.describe()[0]["reason"]


def test_where_every_sketch_fails_graphs_are_tried(times: Times) -> None:
    # 1M keys were scanned for good in 934 us where a graph took 116.
    assert serves(build(gain=10**6)) == ["flat"] * HEADS
    second = with_graphs(gain=10**6)
    assert serves(second) == ["graph"] * HEADS
    assert "graph 100 us (work), flat 300 us" in second.describe()[0]["reason"]
    check_search(second)


def test_a_context_whose_graphs_fail_forbids_none_to_the_next(times: Times) -> None:
    failed = with_graphs(max_scanned=1e-4)
    assert serves(failed) == ["sketch"] * HEADS
    assert "within 0%" in " ".join(told["reason"] for told in failed.describe())
    assert serves(with_graphs()) == ["graph"] * HEADS


def test_a_graph_of_no_use_speaks_for_heads_of_as_many_dimensions(
    times: Times, trials: Trials
) -> None:
    dims = [told["effective_dim"] for told in build(graph_tokens=0).describe()]
    easiest, middle, hardest = sorted(range(HEADS), key=dims.__getitem__)
    times[("sketch", middle)] = 2.5e-4  # has the most to win, so that it is the first
    times[("graph", middle)] = 9e-4
    index = with_graphs()
    assert trials.built == [middle, easiest]
    assert [index.describe()[n]["serves"] for n in (easiest, middle, hardest)] == [
        "graph",
        "sketch",
        "sketch",
    ]
    reason = index.describe()[hardest]["reason"]
    assert f"no graph, for that of head {middle} was of no use" in reason


def test_what_one_head_measured_decides_whether_the_next_pays(times: Times, trials: Trials) -> None:
    trials.build_s = 15
    times |= {("sketch", 0): 1.3e-4, ("sketch", 1): 1.2e-4}  # .2 and .3 us a token over the graph
    index = with_graphs(graph_tokens=10**5 * 6)
    assert trials.built == [2, 0]
    assert serves(index) == ["graph" if n in trials.built else "sketch" for n in range(HEADS)]
    assert (
        "a graph (100 us, 15.0 core-seconds to build) does not win that back in 600000 tokens"
        in index.describe()[1]["reason"]
    )


def test_graphs_of_no_use_are_bounded_in_core_seconds(times: Times, trials: Trials) -> None:
    dims = [told["effective_dim"] for told in build(graph_tokens=0).describe()]
    hardest_first = sorted(range(HEADS), key=lambda head: -dims[head])
    for place, head in enumerate(hardest_first):  # each one unlike all before
        times[("sketch", head)] = 2e-4 - place * 1e-5
    times["graph"], trials.build_s = 9e-4, 20
    index = with_graphs(graph_trial_seconds=30)
    assert trials.built == hardest_first[:2]
    assert (
        "40.0 core-seconds went into graphs of no use and 30 may"
        in (index.describe()[hardest_first[2]]["reason"])
    )


@pytest.mark.parametrize("keys", [131_072, 1_048_576])
def test_a_build_is_forecast_from_this_context_with_what_grows_and_what_does_not(
    keys: int,
) -> None:
    # 48.6 core-seconds were forecast where some three are true.
    scan = Cost("flat", 1.5e-3 * keys / 131_072, 0)
    sketch = Cost("sketch", 0.4e-3 * keys / 131_072, 0)
    taken = build_forecast(sketch, scan, 4, 2048)
    assert 1 < taken < 8
    assert taken < build_forecast(scan, scan, 4, 2048) < 12
    less = build_forecast(
        Cost("sketch", sketch.work_s / 8, 0), Cost("flat", scan.work_s / 8, 0), 4, 2048
    )
    assert less < taken < 4 * less, "eight times the keys are not eight times the work"


def test_more_than_the_cache_holds_is_read_between_two_searches_of_a_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: a sketch found its codes in the cache, and a graph of less time lost to it."""
    read: list[tuple[str, int]] = []

    class Small:
        read_bytes = 1000.0

        def __init__(self, name: str) -> None:
            self.name = name

        def search(self, queries: Tensor) -> None:
            read.append((self.name, 1000))

    monkeypatch.setattr(
        _auto_choice.scans, "stream", lambda array: read.append(("", array.numel()))
    )
    trials = {(name, 0): Small(name) for name in ("sketch", "graph")}
    _auto_choice.measured(trials, torch.zeros(1, 2, 12, 8))
    turns = [place for place, (name, _) in enumerate(read) if name == "sketch"]
    assert len(turns) > 5
    for first, stop in pairwise(turns[1:]):  # the first turn tells what a search reads
        assert sum(size for _, size in read[first:stop]) > 1.99 * _auto_choice.last_cache_bytes()


def test_a_sketch_of_wide_codes_loses_to_a_graph_of_half_its_time(times: Times) -> None:
    # The defaults, in figures of 128K keys: 64 B and 500 candidates against a graph.
    times |= {"sketch": 476e-6, "flat": 1500e-6, "graph": 240e-6}
    assert serves(with_graphs(graph_tokens=32768, graph_trial_seconds=30)) == ["graph"] * HEADS


def test_a_file_that_still_has_the_memory_of_the_machine_is_read(
    times: Times, tmp_path: Path
) -> None:
    path = tmp_path / "layer.hkv"
    index = build(graph_tokens=0)
    index.save(path)
    meta, arrays = read_arrays(path, "auto")
    meta["params"]["remember"] = True
    write_arrays(path, "auto", meta, arrays)
    assert serves(auto.AutoIndex.load(path, heads()[0])) == serves(index)


def test_sketches_serve_while_graphs_are_built_and_take_later_keys(times: Times) -> None:
    keys, samples, later = heads()
    runner = LaterRunner()
    live = LiveIndex(new, keys, Samples(samples), runner)
    assert {told["serves"] for told in live.describe()} == {"flat"}
    runner.finish()
    live.settle(keys)
    assert {told["serves"] for told in live.describe()} == {"sketch"}
    assert live.builder.pending is not None
    more = torch.cat([keys, 1.5 * keys[:, :150]], 1)
    live.add(more)
    runner.finish()
    assert {told["serves"] for told in live.describe()} == {"sketch"}
    live.settle(more)
    assert {told["serves"] for told in live.describe()} == {"graph"}
    assert live.builder.pending is None
    assert len(live.serving) == more.shape[1]
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
    times |= OF_EACH_KIND
    index, path = with_graphs(), tmp_path / "layer.hkv"
    keys, _, later = heads()
    index.save(path)
    loaded = auto.AutoIndex.load(path, keys)
    ours, theirs = index.search(later, 20), loaded.search(later, 20)
    assert torch.equal(ours.ids, theirs.ids)
    assert torch.equal(ours.scores, theirs.scores)
    assert serves(loaded) == ["flat", "sketch", "graph"]
    assert [told["reason"] for told in loaded.describe()] == [
        told["reason"] for told in index.describe()
    ]
    for kind in (GraphIndex, SketchIndex):
        with pytest.raises(FileFormatError, match="holds an index of kind 'auto', expected"):
            kind.load(path, keys)
    with pytest.raises(FileFormatError, match="was made for other keys"):
        auto.AutoIndex.load(path, keys + 1)


REFUSED: list[tuple[list[int] | None, str]] = [
    ([3], r"part 0 serves heads \[3\]"),
    ([-1], r"part 0 serves heads \[-1\]"),
    ([], r"part 0 serves heads \[\]"),
    ([2, 2], r"part 0 serves heads \[2, 2\]"),
    ([0], "was made for other keys"),
    (None, r"its parts serve heads \[0, 1\] of 3"),
]
"""Heads that the first part of two says it serves, or no such part."""


def test_parts_that_do_not_make_a_layer_are_refused(times: Times, tmp_path: Path) -> None:
    times |= {("graph", 0): 9e-4, ("graph", 1): 9e-4, ("sketch", 2): 2.5e-4}
    index, path = with_graphs(), tmp_path / "layer.hkv"
    index.save(path)
    meta, arrays = read_arrays(path, "auto")
    assert [part["heads"] for part in meta["parts"]] == [[2], [0, 1]]
    for own, message in REFUSED:
        changed, written = deepcopy(meta), arrays
        if own is None:
            del changed["parts"][0]
            written = {name.replace("1/", "0/"): array for name, array in arrays.items()}
        else:
            changed["parts"][0]["heads"] = own
        other = tmp_path / f"{own}.hkv"
        write_arrays(other, "auto", changed, written)
        with pytest.raises(FileFormatError, match=message):
            auto.AutoIndex.load(other, heads()[0])


def test_runs_of_heads_are_views() -> None:
    assert runs([]) == []
    assert runs([3]) == [slice(3, 4, 1)]
    assert runs([0, 2, 4, 5, 6]) == [slice(0, 5, 2), slice(5, 7, 1)]
    assert runs(range(8)) == [slice(0, 8, 1)]


@pytest.mark.parametrize(("threads", "bandwidth", "kind"), [(1, 1e9, "flat"), (8, 1e9, "graph")])
def test_many_threads_favour_what_reads_less(threads: int, bandwidth: float, kind: str) -> None:
    # Work and bytes of one head of 128K keys, as in docs/lab.md: alone the scan is faster.
    costs = [Cost("graph", 150e-6, 10_000), Cost("flat", 100e-6, 80_000)]
    chosen, why = cheapest(costs, SearchRate(threads, bandwidth))
    assert chosen == kind
    assert "flat 100 us (work)" in why if threads == 1 else "flat 80 us (memory)" in why


def test_a_third_kind_can_be_the_cheapest() -> None:
    costs = [Cost("graph", 3e-4, 0), Cost("sketch", 1e-4, 10), Cost("flat", 1e-4, 2**30)]
    assert cheapest(costs, SearchRate(2, 1e9))[0] == "sketch"


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
    monkeypatch.setattr(_auto_choice, "default_pool", lambda: SimpleNamespace(threads=1))
    monkeypatch.setattr(_auto_choice, "thread_time", lambda: next(ticks) / 2)
    assert decoding_pace.__wrapped__() == SearchRate(1, _auto_choice._STREAMED_BYTES / 0.5)
