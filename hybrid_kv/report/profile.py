"""One row of a profile, a method at a context length, and its quantities in tables.

The command line and the page draw the same quantities, each in its own notation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, Field

from hybrid_kv.report.run import (
    AuditReport,
    EstimateReport,
    Group,
    MemoryBytes,
    Percentiles,
    PhasesMs,
    Run,
    WorkReport,
)

CACHE_PHASES = (
    *("search", "cold_attention", "resident_attention", "select", "merge", "transfer", "wait"),
)
"""Phases of a step that are the cache's and not the model's."""


class BytesPerToken(Group):
    """Bytes that one decode step reads, by purpose; states: of a fixed size, read and written."""

    weights: int | None = None
    resident_attention: int | None = None
    states: int | None = None
    select: int | None = None
    search: int | None = None
    cold_attention: int | None = None
    estimate: int | None = None
    transfer: int | None = None


class ProfileRow(Group):
    """One method at one context length; filled while it is measured, each value checked when set.

    status: "ok", or why there is no result: "failed", "interrupted", "skipped"; `reason` says it in
    a sentence, also of a row that was measured shorter than asked. fill_s: putting synthetic KV in
    place, which is no TTFT. ttft_s, prefill_s: of a prompt that was computed, prefill_s without the
    index builds that were waited for. step_ms: each measured decode step, wall time; tpot_ms is
    their mean. audit: of a pass of its own. limit_ms: bytes_per_token at the machine's
    measured bandwidths; cache_limit_ms: those of the cache alone, without weights. predicted_ms: by
    tier, as `plan` says. recorder_ratio: share of a step that
    measuring took. device_phases_ms: the device's own time by phase, null without one.
    resident_kv_bytes: KV of the resident tier, which is host memory too where there is no device.
    config: the flat configuration. steps: by layer whether the last step was one call of the
    engine, and why not.
    """

    model_config = ConfigDict(frozen=False, validate_assignment=True)

    method: str
    context_tokens: int
    status: Literal["ok", "failed", "interrupted", "skipped"]
    reason: str | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    fill_s: float | None = None
    ttft_s: float | None = None
    prefill_s: float | None = None
    index_build_s: float | None = None
    tpot_ms: float | None = None
    step_ms: tuple[float, ...] = ()
    itl_ms: Percentiles | None = None
    phases_ms: PhasesMs = PhasesMs()
    device_phases_ms: PhasesMs = PhasesMs()
    recorder_ratio: float | None = None
    work: WorkReport = WorkReport()
    audit: AuditReport | None = None
    memory_bytes: MemoryBytes = MemoryBytes()
    resident_kv_bytes: int | None = None
    bytes_per_token: BytesPerToken = BytesPerToken()
    limit_ms: float | None = None
    cache_limit_ms: float | None = None
    predicted_ms: dict[str, float] = Field(default_factory=dict)
    backends: dict[str, str] = Field(default_factory=dict)
    index: tuple[dict[str, Any], ...] = ()
    steps: tuple[dict[str, Any], ...] = ()

    @property
    def cache_ms(self) -> float | None:
        """The cache's part of a step, all its phases; None where none was measured."""
        parts = [getattr(self.phases_ms, phase) for phase in CACHE_PHASES]
        known = [part for part in parts if part is not None]
        return sum(known) if known else None

    @property
    def planned_ms(self) -> float | None:
        """The sum over tiers, as `plan` adds them up; None without a prediction."""
        return sum(self.predicted_ms.values()) or None

    @property
    def read_bytes(self) -> int | None:
        """All that a step reads; None where nothing was counted."""
        known = [count for _, count in self.bytes_per_token if count is not None]
        return sum(known) if known else None


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
"""Quantities of what happens before the first token."""

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
