"""Quantities of a measured row in tables: each has its title, its unit and its way there.

The command line and the page draw the same quantities, each in its own notation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from hybrid_kv.report.profile import ProfileRow
from hybrid_kv.report.run import EstimateReport, Run

MeasuredRun = ProfileRow | Run
Unit = Literal["ms", "seconds", "bytes", "share", "count", "estimate"]
"""Of a number; an estimate is a share with half the width of its interval."""


class Quantity(NamedTuple):
    """A column or a line of a table; `of` gives None for what was not measured."""

    title: str
    unit: Unit
    of: Callable[[MeasuredRun], Any]


def _own(title: str, unit: Unit, name: str) -> Quantity:
    """A value of the row itself; a run lacks what only a profile measures."""
    return Quantity(title, unit, lambda row: getattr(row, name, None))


def _part(title: str, unit: Unit, group: str, name: str) -> Quantity:
    """A value of one of the row's groups, which may be missing as a whole."""

    def of(row: MeasuredRun) -> float | EstimateReport | None:
        return getattr(getattr(row, group, None), name, None)

    return Quantity(title, unit, of)


TPOT = _own("TPOT", "ms", "tpot_ms")
GAPS = tuple(_part(name, "ms", "itl_ms", name) for name in ("p50", "p90", "p99"))
LIMIT = _own("limit", "ms", "limit_ms")
PLANNED = _own("plan says", "ms", "planned_ms")
RECORDER = _own("recorder", "share", "recorder_ratio")

TTFT = _own("TTFT", "seconds", "ttft_s")
PREFILL = _own("prefill", "seconds", "prefill_s")
FILL = _own("fill", "seconds", "fill_s")
INDEX_BUILD = _own("index build", "seconds", "index_build_s")
START = (TTFT, PREFILL, INDEX_BUILD, FILL)
"""What happens before the first token."""

RESIDENT_KV = _own("resident KV", "bytes", "resident_kv_bytes")
DEVICE_PEAK = _part("device peak", "bytes", "memory_bytes", "device_peak")
HOST_KV = _part("host KV", "bytes", "memory_bytes", "host_kv")
HOST_INDEX = _part("host index", "bytes", "memory_bytes", "host_index")
PROCESS_PEAK = _part("process peak", "bytes", "memory_bytes", "host_peak")
READ = _own("read per token", "bytes", "read_bytes")

SCORED = _part("keys scored", "share", "work", "scored_ratio")
ATTENDED = _part("tokens attended", "count", "work", "attended_tokens")
RECALL = _part("recall@k", "estimate", "audit", "recall_at_k")
MISSED = _part("missed mass", "estimate", "audit", "missed_mass")
MASS_ERROR = _part("mass error", "estimate", "audit", "mass_error")
OUTPUT_ERROR = _part("output error", "estimate", "audit", "output_error")
LOOKS = _part("looks", "count", "audit", "looks")
