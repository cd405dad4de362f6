"""The parts of a report: what one run was, and what it cost; units are in the key names.

A value that was not measured is null, never a guess.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Group(BaseModel):
    """Frozen, unknown keys refused, NaN and infinity refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Percentiles(Group):
    """Gaps between tokens, in ms."""

    p50: float
    p90: float
    p99: float


class PhasesMs(Group):
    """Mean time of one decode step by phase, in ms.

    other: what no phase accounts for. model, python: of that, the model's own products, and the
    rest; only `profile` tells them apart.
    """

    search: float | None = None
    cold_attention: float | None = None
    resident_attention: float | None = None
    select: float | None = None
    merge: float | None = None
    transfer: float | None = None
    wait: float | None = None
    other: float | None = None
    model: float | None = None
    python: float | None = None


class WorkReport(Group):
    """What decoding touched.

    scored_ratio: dot products spent on choosing over those of full attention. retrieved_tokens:
    mean number of cold entries attended per step, layer and query head; most_retrieved_tokens: the
    largest such number. attended_tokens: mean number of all entries attended, resident ones
    included. hot_ratio: entries that the device attended in hot pages over all that were found;
    promoted_pages: copied to become hot; fetched_bytes: of found entries that were attended on the
    device; these two are sums. recall_at_k, missed_mass, audited_steps: from the audit, null
    without one.
    """

    scored_ratio: float | None = None
    retrieved_tokens: float | None = None
    most_retrieved_tokens: int | None = None
    attended_tokens: float | None = None
    hot_ratio: float | None = None
    promoted_pages: int | None = None
    fetched_bytes: int | None = None
    recall_at_k: float | None = None
    missed_mass: float | None = None
    audited_steps: int | None = None


class EstimateReport(Group):
    """A mean and half the width of its 95% confidence interval, null from one look."""

    mean: float
    half_width: float | None = None


class AuditedHead(Group):
    """Means over the looks at one KV head; recall_at_k is null where nothing was searched."""

    layer: int
    kv_head: int
    looks: int
    recall_at_k: float | None
    missed_mass: float
    output_error: float
    missed_by_index: float | None = None


class AuditReport(Group):
    """What exact attention of single heads, in rotation, found to be missing.

    looks: heads that were looked at, one step each. recall_at_k: of the exact best cold entries, as
    many as the budget has. missed_mass: of the softmax over all stored entries; missed_by_index:
    the part of it that a perfect index would have found, the rest is the budget's. output_error:
    relative L2 distance of a head's output.
    """

    looks: int
    recall_at_k: EstimateReport | None = None
    missed_mass: EstimateReport | None = None
    missed_by_index: EstimateReport | None = None
    output_error: EstimateReport | None = None
    heads: tuple[AuditedHead, ...] = ()


class MemoryBytes(Group):
    """device_peak: of the accelerator's allocator; host_peak: resident set of the process."""

    device_peak: int | None = None
    host_kv: int | None = None
    host_index: int | None = None
    host_peak: int | None = None


class BandwidthGbps(Group):
    """Bytes moved over time, in 1e9 bytes per second."""

    dram: float | None = None
    h2d: float | None = None
    d2h: float | None = None


class Run(Group):
    """One generation: its settings, its text and what it cost.

    config: the flat configuration. context_tokens: of the prompt. prefill_s: ttft_s without the
    index builds that were waited for; index_build_s: all builds, wall time. tpot_ms: mean time per
    token after the first. interrupted: the user ended it early. backends: what computed each op of
    the cache at last. index: what served each layer and
    KV head of the cold tier at the end, and why, and how far its build is. audit: null without one.
    chat_template: the first digits of the SHA-256 of the template that rendered the prompt, "none"
    for raw text.
    """

    config: dict[str, Any]
    method: str
    model: str
    context_tokens: int
    new_tokens: int
    text: str
    token_ids: tuple[int, ...]
    ttft_s: float | None = None
    prefill_s: float | None = None
    index_build_s: float | None = None
    tpot_ms: float | None = None
    itl_ms: Percentiles | None = None
    phases_ms: PhasesMs = PhasesMs()
    work: WorkReport = WorkReport()
    memory_bytes: MemoryBytes = MemoryBytes()
    bandwidth_gbps: BandwidthGbps = BandwidthGbps()
    backends: dict[str, str] = {}
    index: tuple[dict[str, Any], ...] = ()
    audit: AuditReport | None = None
    chat_template: str = "none"
    interrupted: bool = False


class MachineGbps(BandwidthGbps):
    """What a plan rests on.

    device: reading the memory that holds the weights; dram: reading host memory in order; gather:
    the same in rows of 256 bytes at random places.
    """

    device: float
    gather: float
