"""Spans as a trace that Perfetto and chrome://tracing show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_kv.watch.recorder import DEVICE, HOST, TraceSpan

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
