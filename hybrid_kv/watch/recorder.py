"""Records of each piece of work in a profile: spans on the host's clock, and on the device's.

A device works later than it is told to, so that its time is taken by events in its own queue: one
before the work, one behind it. They are read when they have passed, and never waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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
