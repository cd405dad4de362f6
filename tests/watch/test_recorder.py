"""Measuring phases: sums, spans, and a device's own clock that nobody waits for."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from hybrid_kv.watch import phases as phases_module
from hybrid_kv.watch.phases import ATTENTION, FORWARD, Phases, cost_of_measuring
from hybrid_kv.watch.recorder import DEVICE, HOST, DeviceClock, Recorder, TraceSpan, device_clock


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is a second later whenever somebody looks."""
    ticks = count(100.0)
    monkeypatch.setattr(phases_module, "perf_counter", lambda: next(ticks))


class Queue:
    """A device's queue: what it is told takes three milliseconds, and it stands still at first."""

    def __init__(self) -> None:
        self.told, self.passed, self.waited = 0, -1, 0

    def event(self) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, queue: Queue) -> None:
        self._queue, self.place = queue, -1

    def record(self) -> None:
        self.place, self._queue.told = self._queue.told, self._queue.told + 1

    def query(self) -> bool:
        return self.place <= self._queue.passed

    def elapsed_time(self, end: Any) -> float:
        assert end.query(), "read before the device has passed it"
        return 3.0 * (end.place - self.place)

    def synchronize(self) -> None:
        self._queue.waited += 1


@pytest.mark.usefixtures("ticking")
def test_sums_are_exact_and_pieces_are_counted() -> None:
    phases = Phases()
    for _ in range(3):
        with phases.measure("search"):
            pass
    with phases.measure("merge"), phases.measure("select"):
        pass
    assert (phases.seconds["search"], phases.seconds["select"], phases.seconds["merge"]) == (
        3,
        1,
        3,
    )
    assert phases.entered == 5
    phases.reset()
    assert not any(phases.seconds.values())


def test_a_piece_that_fails_counts() -> None:
    phases = Phases()
    with pytest.raises(RuntimeError, match="lost"), phases.measure("wait"):
        raise RuntimeError("lost")
    assert phases.seconds["wait"] > 0


@pytest.mark.usefixtures("ticking")
def test_spans_are_kept_while_somebody_observes() -> None:
    phases, recorder = Phases(), Recorder(keep_spans=True)
    with phases.measure("search"):
        pass
    phases.observe(recorder)
    phases.layer_idx = 7
    with phases.measure(ATTENTION), phases.measure("search"):
        pass
    phases.observe(None)
    with phases.measure("search"):
        pass
    assert recorder.spans == [
        TraceSpan(103, 104, "search", 7, HOST),
        TraceSpan(102, 105, ATTENTION, 7, HOST),
    ]
    assert phases.seconds["search"] == 3


def test_without_spans_only_sums_are_kept() -> None:
    phases, recorder = Phases(), Recorder(keep_spans=False)
    phases.observe(recorder)
    with phases.measure("merge"):
        pass
    recorder.step_ended()
    assert recorder.spans == []
    assert phases.seconds["merge"] > 0


def test_device_times_come_from_pairs_of_events_that_nobody_waits_for() -> None:
    queue, phases = Queue(), Phases()
    recorder = Recorder(keep_spans=True, clock=DeviceClock(queue.event, 50.0))
    assert recorder.clock is not None
    phases.observe(recorder)
    phases.layer_idx = 1
    with phases.measure("resident_attention"):
        pass
    with phases.measure("search"):  # the host's own: no events
        pass
    with phases.measure("merge"):
        pass
    assert queue.told == 5  # the anchor and two pairs
    recorder.step_ended()
    assert not any(recorder.clock.seconds.values())
    queue.passed = 3  # the pair of the merge is not complete
    recorder.step_ended()
    assert recorder.clock.seconds["resident_attention"] == pytest.approx(0.003)
    assert recorder.clock.seconds["merge"] == 0
    queue.passed = 4
    recorder.step_ended()
    recorder.step_ended()
    assert recorder.clock.seconds["merge"] == pytest.approx(0.003)
    assert queue.waited == 0
    device = [span for span in recorder.spans if span.lane == DEVICE]
    assert [span.phase for span in device] == ["resident_attention", "merge"]
    assert device[1].begin_s == pytest.approx(50.009)
    assert {span.layer_idx for span in device} == {1}


def test_the_host_has_no_device_clock() -> None:
    assert device_clock(torch.device("cpu"), lambda: 0.0) is None


@pytest.mark.usefixtures("ticking")
def test_the_cost_of_measuring_is_measured_and_leaves_no_trace() -> None:
    phases = Phases()
    with phases.measure("merge"):
        pass
    # Two looks at the clock around, and two in each of five rounds.
    assert cost_of_measuring(phases, rounds=5) == 11 / 5
    assert (phases.seconds["merge"], phases.entered) == (1, 1)
    assert phases.seconds[FORWARD] == 0
