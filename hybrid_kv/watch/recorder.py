"""Records of each piece of work in a profile: spans on the host's clock, and on the device's.

A device works later than it is told to, so that its time is taken by events in its own queue: one
before the work, one behind it. They are read when they have passed, and never waited for. Spans
become a trace that Perfetto and chrome://tracing show. The most memory held is recorded, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from hybrid_kv.watch.phases import ATTENTION, FORWARD

HOST, DEVICE = "host", "device"
"""Lanes."""

ON_DEVICE = frozenset({FORWARD, ATTENTION, "resident_attention", "select", "merge"})
"""Phases that are computed by a device; the others are the host's own."""


class TraceSpan(NamedTuple):
    """A piece of work: seconds on the clock of `perf_counter`, in a lane."""

    begin_s: float
    end_s: float
    phase: str
    layer_idx: int | None
    lane: str


class Event(Protocol):
    """A mark in the device's queue; a `torch.cuda.Event` is one."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this mark to a later one."""
        ...


class _Pair(NamedTuple):
    phase: str
    layer_idx: int | None
    begin: Event
    end: Event


class DeviceClock:
    """Device seconds per phase by pairs of events; nothing ever waits for one.

    Args:
        make_event: a new event that keeps the time.
        now_s: the host's clock at the moment when the device has nothing to do.
    """

    def __init__(self, make_event: Callable[[], Event], now_s: float) -> None:
        self._make_event, self._now_s = make_event, now_s
        self._anchor = self.mark()
        self._pending: deque[_Pair] = deque()
        self.seconds = dict.fromkeys(ON_DEVICE, 0.0)

    def mark(self) -> Event:
        """An event in the device's queue."""
        event = self._make_event()
        event.record()
        return event

    def end(self, phase: str, layer_idx: int | None, begin: Event) -> None:
        """The device has been told the last of a phase that began at the event `begin`."""
        self._pending.append(_Pair(phase, layer_idx, begin, self.mark()))

    def resolve(self) -> list[TraceSpan]:
        """Books the pairs that the device has passed and returns them; the others stay pending."""
        passed = []
        while self._pending and self._pending[0].end.query():
            pair = self._pending.popleft()
            begin_s = self._now_s + 1e-3 * self._anchor.elapsed_time(pair.begin)
            taken_s = 1e-3 * pair.begin.elapsed_time(pair.end)
            self.seconds[pair.phase] += taken_s
            passed.append(TraceSpan(begin_s, begin_s + taken_s, pair.phase, pair.layer_idx, DEVICE))
        return passed


class Recorder:
    """Observes `Phases`: keeps spans where they are wanted, and times of the device if it has one.

    Args:
        keep_spans: whether `spans` shall be filled.
        clock: of the device; None where the host computes.
    """

    def __init__(self, *, keep_spans: bool, clock: DeviceClock | None = None) -> None:
        self.spans: list[TraceSpan] = []
        self.clock, self.keeps_spans = clock, keep_spans

    def begin(self, phase: str | None) -> Event | None:
        """See `Observer`."""
        if self.clock is None or (phase is not None and phase not in ON_DEVICE):
            return None
        return self.clock.mark()

    def end(
        self, phase: str, layer_idx: int | None, begin_s: float, end_s: float, mark: Any
    ) -> None:
        """See `Observer`."""
        if self.clock is not None and mark is not None and phase in ON_DEVICE:
            self.clock.end(phase, layer_idx, mark)
        if self.keeps_spans:
            self.spans.append(TraceSpan(begin_s, end_s, phase, layer_idx, HOST))

    def step_ended(self) -> None:
        """Reads what the device has passed; called between two steps."""
        if self.clock is not None:
            passed = self.clock.resolve()
            if self.keeps_spans:
                self.spans += passed


def device_clock(device: torch.device, now_s: Callable[[], float]) -> DeviceClock | None:
    """The clock of a CUDA device, which is waited for once, here; None for the host."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    return DeviceClock(lambda: torch.cuda.Event(enable_timing=True), now_s())


_LANES = (HOST, DEVICE)


def chrome_trace(
    parts: Sequence[tuple[str, Sequence[TraceSpan]]], about: Mapping[str, Any]
) -> dict[str, Any]:
    """The trace as JSON-ready data: a process per part, a thread per lane, times in microseconds.

    Spans of a lane that lie inside each other are shown nested: step, forward, layer, attention,
    phase. Each part begins at 0, so that they can be compared.

    Args:
        parts: a title with its spans; those without spans are left out.
        about: what else is worth knowing, as it is.

    Source: the Trace Event Format (complete events, "ph": "X").
    """
    events: list[dict[str, Any]] = []
    for number, (title, spans) in enumerate(part for part in parts if part[1]):
        start = min(span.begin_s for span in spans)
        events.append(_name("process_name", number, 0, title))
        for lane in _LANES:
            own = sorted(
                (span for span in spans if span.lane == lane),
                key=lambda span: (span.begin_s, -span.end_s),
            )
            if own:
                events.append(_name("thread_name", number, _LANES.index(lane), lane))
            events += [_event(span, number, start) for span in own]
    return {"displayTimeUnit": "ms", "otherData": dict(about), "traceEvents": events}


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _event(span: TraceSpan, process: int, start: float) -> dict[str, Any]:
    layer = {} if span.layer_idx is None else {"layer": span.layer_idx}
    named = span.layer_idx is not None and span.phase in ("layer", "attention")
    return {
        "ph": "X",
        "name": f"{span.phase} {span.layer_idx}" if named else span.phase,
        "cat": span.phase,
        "pid": process,
        "tid": _LANES.index(span.lane),
        "ts": 1e6 * (span.begin_s - start),
        "dur": 1e6 * (span.end_s - span.begin_s),
        "args": layer,
    }


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """The peak of the resident set since this object was made, where the system can tell."""

    def __init__(self) -> None:
        try:
            _CLEAR.write_text("5")  # Linux: the peak begins anew
            self._known = True
        except OSError:
            self._known = False

    def bytes(self) -> int | None:
        """None where the system counts since the process began, or not at all."""
        if not self._known:
            return None
        lines = _STATUS.read_text().splitlines()
        peak = next((line for line in lines if line.startswith("VmHWM:")), None)
        return None if peak is None else 1024 * int(peak.split()[1])
