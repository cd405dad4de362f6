"""An index that serves from its first moment on: takeovers, failures, ends."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import IndexConfig
from hybrid_kv.errors import CapacityError, ConfigError, IndexBuildWarning
from hybrid_kv.index.flat import FlatIndex
from hybrid_kv.index.graph import GraphIndex
from hybrid_kv.ops.native import engine_state
from hybrid_kv.plugins import BuildCancelled, Index
from hybrid_kv.rotary import Rotary, Samples
from hybrid_kv.store import index_builder
from hybrid_kv.store.index_builder import InlineRunner
from hybrid_kv.store.live_index import LATEST, SPREAD, LiveIndex
from hybrid_kv.transfer import ThreadExecutor
from tests.index.oracle import check_result, clustered, recall
from tests.index.test_graph import SETTINGS, attention_like
from tests.store.scene import LaterRunner

PATIENCE = 60
"""Seconds after which a test that waits for a thread has failed."""

needs_engine = pytest.mark.skipif(
    engine_state().isa is None, reason=f"no native engine: {engine_state().detail}"
)


class Learning(FlatIndex):
    """Builds as told; the plain scan stands in for it."""

    error: Exception | None = None

    def __init__(self) -> None:
        super().__init__(FlatIndex.Params(precision="int8"))
        self.was_cancelled = False

    def stand_in(self, keys: Tensor, samples: Tensor | None) -> Index | None:
        return Standing(FlatIndex.Params())

    def cancel(self) -> None:
        self.was_cancelled = True

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        if self.error is not None:
            raise self.error
        super()._rebuild(samples, nearest)

    def describe(self) -> list[dict[str, Any]]:
        return [{"serves": "learned"}]


class Standing(FlatIndex):
    def describe(self) -> list[dict[str, Any]]:
        return [{"serves": "stand-in"}]


class Selecting(Learning):
    selects = True


class Failing(Learning):
    error = CapacityError("out of memory in the middle")


class Wrong(Learning):
    error = ConfigError("cap must be smaller")


def test_who_serves_and_who_has_served_is_told() -> None:
    keys, queries = clustered(300)
    runner = LaterRunner()
    live = LiveIndex(Learning, keys, None, runner)
    for _ in range(3):
        live.search(queries, 5)
    told = {
        "serves": "stand-in",
        "build": "in progress",
        "searches": 3,
        "searches_before": 3,
    }
    assert live.describe() == [told | {"samples": None}]
    runner.finish()
    live.settle(keys)
    live.search(queries, 5)
    told = {"serves": "learned", "build": "done", "searches": 4, "searches_before": 3}
    assert live.describe() == [told | {"samples": None}]


def test_what_a_build_learns_from_counts_as_memory_until_it_is_done() -> None:
    keys, queries = clustered(300)
    runner = LaterRunner()
    live = LiveIndex(Learning, keys, Samples(queries[:, None]), runner)
    assert live.memory_bytes == queries.nbytes
    runner.finish()
    live.settle(keys)
    built = Learning()
    built.build(keys, None)
    assert live.memory_bytes == built.memory_bytes


def test_a_build_that_is_done_at_once_needs_no_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Standing, "build", lambda *_: pytest.fail("a stand-in was built"))
    keys, queries = clustered(300)
    live = LiveIndex(Learning, keys, None, InlineRunner())
    assert live.builder.pending is None
    live.search(queries, 5)
    told = {"serves": "learned", "build": "done", "searches": 1, "searches_before": 0}
    assert live.describe() == [told | {"samples": None}]


def test_a_device_searches_what_serves_there_and_no_stand_in_of_the_host() -> None:
    keys, _ = clustered(300)
    runner = LaterRunner()
    live = LiveIndex(Selecting, keys, None, runner)
    assert live.selector is None
    runner.finish()
    live.settle(keys)
    assert live.selector is live.serving


def test_a_kind_without_a_stand_in_is_waited_for() -> None:
    keys, queries = clustered(300)
    runner = LaterRunner()
    live = LiveIndex(IndexConfig(kind="flat").build, keys, None, runner)
    assert runner.held == []
    check_result(live.search(queries, 5), queries, keys, 5)


def test_searches_go_on_in_two_threads_while_the_index_takes_over() -> None:
    keys, queries = clustered(700)
    runner = LaterRunner()
    live = LiveIndex(Learning, keys, None, runner)
    swapped, enough = threading.Event(), threading.Barrier(3, timeout=PATIENCE)

    def search() -> list[float]:
        found = [recall(live.search(queries, 16), queries, keys, 16)]
        enough.wait()  # both have searched the stand-in; they go on while it is replaced
        while not swapped.is_set():
            found.append(recall(live.search(queries, 16), queries, keys, 16))
        found.append(recall(live.search(queries, 16), queries, keys, 16))
        return found

    with ThreadPoolExecutor(2) as pool:
        searching = [pool.submit(search) for _ in range(2)]
        enough.wait()
        runner.finish()
        live.settle(keys)
        swapped.set()
        found = [value for future in searching for value in future.result(PATIENCE)]
    assert live.builder.pending is None
    assert min(found) >= 0.99


def test_a_build_that_fails_later_warns_once_and_the_stand_in_serves_on() -> None:
    keys, queries = clustered(300)
    more = torch.cat([keys, keys[:, :20] + 1], 1)
    runner = LaterRunner()
    live = LiveIndex(Wrong, keys, None, runner)
    runner.finish()
    live.add(more)
    with pytest.warns(IndexBuildWarning, match=r"\(ConfigError: cap must be smaller\); its keys"):
        live.settle(more)
    live.settle(more)
    assert live.describe()[0]["build"] == "failed: ConfigError: cap must be smaller"
    check_result(live.search(queries, 16), queries, more, 16)
    assert len(live.serving) == 320


def test_memory_that_runs_out_while_a_build_is_waited_for_is_survived() -> None:
    keys, queries = clustered(300)
    with pytest.warns(IndexBuildWarning, match="CapacityError: out of memory in the middle"):
        live = LiveIndex(Failing, keys, None, InlineRunner())
    check_result(live.search(queries, 16), queries, keys, 16)
    assert live.describe()[0]["build"].startswith("failed: CapacityError")


def test_memory_that_runs_out_when_the_index_takes_over_is_survived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, queries = clustered(300)
    runner = LaterRunner()
    live = LiveIndex(Learning, keys, None, runner)
    runner.finish()
    monkeypatch.setattr(Learning, "add", lambda *_: (_ for _ in ()).throw(MemoryError("full")))
    with pytest.warns(IndexBuildWarning, match="MemoryError: full"):
        live.settle(keys)
    check_result(live.search(queries, 16), queries, keys, 16)


def test_another_error_of_a_build_that_is_waited_for_is_raised() -> None:
    with pytest.raises(ConfigError, match="cap must be smaller"):
        LiveIndex(Wrong, clustered(300)[0], None, InlineRunner())


def test_a_build_that_its_executor_gave_up_is_told() -> None:
    keys, queries = clustered(300)
    runner = LaterRunner()
    live = LiveIndex(Learning, keys, None, runner)
    runner.held[0].future.cancel()
    with pytest.warns(IndexBuildWarning, match="its executor ended"):
        live.settle(keys)
    check_result(live.search(queries, 16), queries, keys, 16)


def test_a_cancelled_build_is_not_adopted_even_when_it_ends_well() -> None:
    keys, queries = clustered(300)
    runner, made = LaterRunner(), list[Learning]()

    def make() -> Learning:
        made.append(Learning())
        return made[-1]

    live = LiveIndex(make, keys, None, runner)
    (build,) = runner.held
    assert build.future.set_running_or_notify_cancel()  # it has begun
    live.cancel()
    assert made[0].was_cancelled
    build.future.set_result(None)
    live.settle(keys)
    assert live.describe()[0]["serves"] == "stand-in"
    assert live.describe()[0]["build"] == "given up"
    check_result(live.search(queries, 16), queries, keys, 16)


def test_an_index_that_nobody_refers_to_is_not_built() -> None:
    runner = LaterRunner()
    live = LiveIndex(Learning, clustered(300)[0], None, runner)
    del live
    gc.collect()
    assert runner.held[0].future.cancelled()


def test_rebuilding_gives_up_the_build_and_forgets_its_failure() -> None:
    keys, queries = clustered(300)
    runner = LaterRunner()
    live = LiveIndex(Learning, keys, None, runner)
    live.rebuild(keys[:, :100])
    assert runner.held[0].future.cancelled()
    assert (len(live.serving), live.describe()[0]["build"]) == (100, "done")
    check_result(live.search(queries, 16), queries, keys[:, :100], 16)


# The graph itself


def graph() -> GraphIndex:
    index = IndexConfig(kind="graph", **SETTINGS).build()
    assert isinstance(index, GraphIndex)
    return index


@needs_engine
def test_a_graph_built_in_the_background_is_the_one_that_is_waited_for() -> None:
    keys, samples, later = attention_like()
    more = torch.cat([keys, keys[:, :9] + 1], 1)
    waited = graph()
    waited.build(keys, samples)
    waited.add(more)
    executor, made = ThreadExecutor(1), list[GraphIndex]()

    class Runner(InlineRunner):
        def beside(self, build: Any, holds: int = 0) -> Any:
            self.future = executor.background(build)
            return self.future

    def make() -> GraphIndex:
        made.append(graph())
        return made[-1]

    runner = Runner()
    with torch.inference_mode():
        live = LiveIndex(make, keys, Samples(samples), runner)
        live.add(more)
        runner.future.result(PATIENCE)
        live.settle(more)
    executor.close()
    # A number for people, which torch sums in another order on one thread.
    dims = [[report.effective_dim for report in index.reports] for index in (made[0], waited)]
    assert dims[0] == pytest.approx(dims[1], rel=1e-5)
    alike = [
        [replace(report, effective_dim=0) for report in index.reports]
        for index in (made[0], waited)
    ]
    assert alike[0] == alike[1]
    for one, other in zip(made[0]._graphs, waited._graphs, strict=True):
        assert torch.equal(one.keys_of, other.keys_of)
        assert torch.equal(one.lists, other.lists)
        assert torch.equal(one.entries, other.entries)
    found, expected = live.search(later, 20), waited.search(later, 20)
    assert torch.equal(found.ids, expected.ids)
    assert found.scored == expected.scored


@needs_engine
def test_a_graph_stands_in_only_where_it_can_be_learned() -> None:
    keys, samples, later = attention_like()
    index = graph()
    stand_in = index.stand_in(keys, samples)
    assert stand_in is not None
    stand_in.build(keys, None)
    assert recall(stand_in.search(later, 20), later, keys, 20) >= 0.99
    assert {head["serves"] for head in stand_in.describe()} == {"flat"}
    assert index.stand_in(keys, None) is None
    assert index.stand_in(keys[:, :999], samples) is None


@needs_engine
def test_a_cancelled_graph_gives_up_between_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, samples, _ = attention_like()
    index, asked = graph(), list[int]()
    monkeypatch.setattr("hybrid_kv.index._graph_learner._QUERIES_AT_ONCE", 100)
    from hybrid_kv.index import _graph_learner

    nearest = _graph_learner.nearest_keys

    def counting(*args: Any, **options: Any) -> Tensor:
        asked.append(1)
        if len(asked) == 3:
            index.cancel()
        return nearest(*args, **options)

    monkeypatch.setattr(_graph_learner, "nearest_keys", counting)
    with pytest.raises(BuildCancelled):
        index.build(keys, samples)
    assert len(asked) == 3


# Learning again


class Ageing(Learning):
    """Learns again after nine further keys, and tells from what."""

    relearn_keys = 9

    def __init__(self) -> None:
        super().__init__()
        self.learned: list[Tensor] = []

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        if samples is not None:
            self.learned.append(samples)
        super()._rebuild(samples, nearest)


class FailingAgain(Ageing):
    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        self.error = None if type(self).made == 1 else MemoryError("full")


ROTARY = Rotary((1.0, 0.1, 0.01))


def ageing(
    kind: type[Ageing] = Ageing, num_keys: int = 300
) -> tuple[LiveIndex, LaterRunner, Tensor, list[Ageing]]:
    """An index over keys [2, N, 16] that learned from 20 samples of two query heads."""
    keys, _ = clustered(num_keys)
    made: list[Ageing] = []

    def make() -> Index:
        made.append(kind())
        return made[-1]

    samples = Samples(torch.randn(len(keys), 2, 20, keys.shape[2]), torch.arange(20) * 15, ROTARY)
    runner = LaterRunner()
    live = LiveIndex(make, keys, samples.ahead(num_keys + 10, 64), runner)
    runner.finish()
    live.settle(keys)
    return live, runner, keys, made


def test_an_index_learns_again_when_enough_keys_have_come() -> None:
    live, runner, keys, made = ageing()
    grown = torch.cat([keys, keys[:, :9] + 1], 1)
    live.add(grown[:, :308])
    assert live.builder.pending is None
    live.add(grown)
    assert live.builder.pending is not None
    assert live.describe()[0]["build"] == "again in progress"
    queries = torch.randn(len(keys), 2, keys.shape[2])
    check_result(live.search(queries, 7), queries, grown, 7)  # by the one from before
    more = torch.cat([grown, keys[:, :5] - 1], 1)
    live.add(more)
    assert len(made) == 2
    runner.finish()
    live.settle(more)
    check_result(live.search(queries, 7), queries, more, 7)
    assert live.describe()[0] | {"searches": 0} == {
        "serves": "learned",
        "build": "done",
        "searches": 0,
        "searches_before": 1,
        "samples": "turned to positions 319 to 382",
    }


def test_it_learns_from_the_prompt_and_the_latest_queries_where_decoding_is_now() -> None:
    live, runner, keys, made = ageing()
    asked = torch.randn(6, len(keys), 2, keys.shape[2])
    for queries in asked:
        live.search(queries, 5)
    live.search(torch.randn(len(keys), 4, keys.shape[2]), 5)  # two tokens at once: not kept
    live.add(torch.cat([keys, keys[:, :9] + 1], 1))
    runner.finish()
    first, again = made[0].learned[0], made[1].learned[0]
    assert again.shape == (len(keys), 2, 26, keys.shape[2])
    # Turning back what was turned gives what was asked.
    before = Samples(again, Samples(again, torch.arange(26), ROTARY).ahead(319, 64).positions)
    assert before.positions is not None
    was = ROTARY.turn(again[:, :, :6], 310 - before.positions[:6])
    torch.testing.assert_close(was, asked.permute(1, 2, 0, 3))
    norms = (first.norm(dim=-1), again[:, :, 6:].norm(dim=-1))
    torch.testing.assert_close(*norms)
    assert not torch.allclose(first, again[:, :, 6:])


def test_queries_are_kept_in_bounded_memory() -> None:
    live, runner, keys, made = ageing(num_keys=4100)  # of fewer keys fewer queries are kept
    empty = live.memory_bytes
    queries = torch.randn(SPREAD + 3 + LATEST, len(keys), 2, keys.shape[2])
    for asked in queries:
        live.search(asked, 1)
    latest, spread = queries[-LATEST:], queries[: SPREAD + 3 : 2]
    assert live.memory_bytes == empty + latest.nbytes + spread.nbytes
    live.add(torch.cat([keys, keys[:, :9] + 1], 1))
    runner.finish()
    learned = made[1].learned[0]
    for kept, asked in ((learned[:, :, :LATEST], latest), (learned[:, :, LATEST + 20 :], spread)):
        norms = (kept.norm(dim=-1), asked.permute(1, 2, 0, 3).norm(dim=-1))
        torch.testing.assert_close(*norms)


@pytest.mark.parametrize("kind", [Ageing, FailingAgain])
def test_what_learning_again_has_freed_is_given_back(
    kind: type[Ageing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C library kept several times what a context had grown by."""
    FailingAgain.made, calls = 0, list[None]()
    monkeypatch.setattr(index_builder, "give_back_freed", lambda: calls.append(None))
    live, runner, keys, _ = ageing(kind)
    live.add(torch.cat([keys, keys[:, :9] + 1], 1))
    assert not calls
    runner.finish()
    assert len(calls) == 1


def test_what_served_serves_on_where_learning_again_fails() -> None:
    FailingAgain.made = 0
    live, runner, keys, _ = ageing(FailingAgain)
    grown = torch.cat([keys, keys[:, :9] + 1], 1)
    live.add(grown)
    runner.finish()
    with pytest.warns(IndexBuildWarning, match="full.*the one from before serves on"):
        live.settle(grown)
    queries = torch.randn(len(keys), 2, keys.shape[2])
    check_result(live.search(queries, 7), queries, grown, 7)


def test_an_index_over_other_keys_is_learned_again_from_the_prompt_alone() -> None:
    live, runner, keys, made = ageing()
    live.search(torch.randn(len(keys), 2, keys.shape[2]), 3)
    live.rebuild(keys[:, :100])
    assert live.aging is not None
    assert not live.aging.asked
    assert live.builder.pending is not None
    live.add(keys)
    runner.finish()
    live.settle(keys)
    assert len(made) == 3  # what scans meanwhile, and what was learned
    assert live.serving is made[-1]
    queries = torch.randn(len(keys), 2, keys.shape[2])
    check_result(live.search(queries, 7), queries, keys, 7)
