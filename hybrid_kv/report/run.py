"""The parts of a report: what one run was, and what it cost; units are in the key names.

A value that was not measured is null, never a guess. The machine and the packages that it used are
its environment.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from pydantic import BaseModel, ConfigDict, model_validator

if TYPE_CHECKING:
    import torch

    from hybrid_kv.models.exact_steps import ExactWork
    from hybrid_kv.runtime.sparse_prefill import PrefillLoss
    from hybrid_kv.types import Work
    from hybrid_kv.watch.audit import Audit, Estimate
    from hybrid_kv.watch.token_errors import TokenError

PACKAGES = ("hybrid-kv", "torch", "transformers", "faiss-cpu", "numba", "triton", "flashinfer")
"""Packages whose version can change a result; flashinfer and triton may be absent."""

_DISTRIBUTIONS = {
    "faiss-cpu": ("faiss-cpu", "faiss-gpu", "faiss"),
    "flashinfer": ("flashinfer-python", "flashinfer"),
}
_FEATURES = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16"),
    *("asimd", "sve", "bf16"),
)
_CPUINFO = Path("/proc/cpuinfo")


class Cpu(BaseModel):
    """A processor: its name, physical cores, hardware threads, and vector instruction sets."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    cores: int
    threads: int
    features: tuple[str, ...]


class Environment(BaseModel):
    """Facts that a result may depend on beside the run's own settings.

    versions: of Python and the packages, null where one is not installed. device: what the model
    ran on, null where no model was run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    versions: dict[str, str | None]
    platform: str
    cpu: Cpu
    ram_bytes: int
    device: str | None = None


def probe_environment(device: str | None = None) -> Environment:
    """The environment of this process; imports none of the packages it names."""
    versions = {name: installed_version(name) for name in PACKAGES}
    return Environment(
        versions={"python": platform.python_version(), **versions},
        platform=f"{platform.system()} {platform.machine()}",
        cpu=probe_cpu(),
        ram_bytes=psutil.virtual_memory().total,
        device=device,
    )


def environment_on(device: torch.device) -> Environment:
    """The environment with a device by its name."""
    import torch

    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return probe_environment(f"{device}{name}")


def installed_version(package: str) -> str | None:
    """The version of a package, or None where it is not installed."""
    for name in _DISTRIBUTIONS.get(package, (package,)):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def probe_cpu() -> Cpu:
    """The processor as the operating system describes it."""
    facts = _cpuinfo()
    flags = facts.get("flags", facts.get("Features", "")).split()
    threads = psutil.cpu_count() or 1
    return Cpu(
        model=facts.get("model name") or platform.processor() or platform.machine(),
        cores=psutil.cpu_count(logical=False) or threads,
        threads=threads,
        features=tuple(name for name in _FEATURES if name in flags),
    )


def _cpuinfo() -> dict[str, str]:
    """Keys of Linux's description of the first processor; empty elsewhere."""
    if not _CPUINFO.is_file():
        return {}
    first = _CPUINFO.read_text(errors="replace").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


class Group(BaseModel):
    """Frozen, unknown keys refused, NaN and infinity refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Percentiles(Group):
    """Gaps between tokens, in ms."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, gaps_ms: Sequence[float]) -> Percentiles | None:
        """None of no gaps."""
        if not gaps_ms:
            return None
        p50, p90, p99 = np.percentile(gaps_ms, [50, 90, 99]).tolist()
        return cls(p50=p50, p90=p90, p99=p99)


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

    @classmethod
    def of(cls, seconds: Mapping[str, float]) -> PhasesMs:
        """From seconds of a step by phase."""
        return cls(**{phase: 1e3 * taken for phase, taken in seconds.items()})


class WorkReport(Group):
    """Counts of what decoding touched.

    scored_ratio: dot products spent on choosing over those of full attention. retrieved_tokens:
    mean number of cold entries attended per step, layer and query head; most_retrieved_tokens: the
    largest such number. attended_tokens: mean number of all entries attended, resident ones
    included. recall_at_k, missed_mass, mass_error, audited_steps: from the audit, null without one.
    """

    scored_ratio: float | None = None
    retrieved_tokens: float | None = None
    most_retrieved_tokens: int | None = None
    attended_tokens: float | None = None
    recall_at_k: float | None = None
    missed_mass: float | None = None
    mass_error: float | None = None
    audited_steps: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_removed_counters(cls, data: Any) -> Any:
        """Reports that were written before these were removed stay readable."""
        if not isinstance(data, dict):
            return data
        removed = {"hot_ratio", "promoted_pages", "fetched_bytes"}
        return {name: value for name, value in data.items() if name not in removed}

    @classmethod
    def of(cls, work: Work, audit: Audit | None) -> WorkReport:
        """All null where nothing was decoded."""
        if not work.steps:
            return cls()
        found = None if audit is None else AuditReport.of(audit)
        recall, missed, error = (
            (None, None, None)
            if found is None
            else (found.recall_at_k, found.missed_mass, found.mass_error)
        )
        return cls(
            scored_ratio=work.scored / work.visible,
            retrieved_tokens=work.retrieved / work.steps,
            most_retrieved_tokens=work.most_retrieved,
            attended_tokens=work.attended / work.steps,
            recall_at_k=None if recall is None else recall.mean,
            missed_mass=None if missed is None else missed.mean,
            mass_error=None if error is None else error.mean,
            audited_steps=None if audit is None else len(audit.findings),
        )


class EstimateReport(Group):
    """A mean and half the width of its 95% confidence interval, null from one look."""

    mean: float
    half_width: float | None = None

    @classmethod
    def of(cls, estimate: Estimate | None) -> EstimateReport | None:
        """None of none."""
        if estimate is None:
            return None
        width = estimate.half_width
        return cls(mean=estimate.mean, half_width=None if isnan(width) else width)


class AuditedHead(Group):
    """Means over the looks at one KV head; recall_at_k is null where nothing was searched."""

    layer: int
    kv_head: int
    looks: int
    recall_at_k: float | None
    missed_mass: float
    output_error: float
    missed_by_index: float | None = None
    mass_error: float | None = None


class AuditReport(Group):
    """Findings of exact attention of single heads, in rotation: what was missing.

    looks: heads that were looked at, one step each. recall_at_k: of the exact best cold entries, as
    many as the budget has. missed_mass: of the softmax over all stored entries, what no exact
    attention read; missed_by_index: the part of it that a perfect index would have found, the rest
    is the budget's. mass_error: of the mass of all what was estimated too much; below 0 what is
    missing, estimates included. output_error: relative L2 distance of a head's output.
    """

    looks: int
    recall_at_k: EstimateReport | None = None
    missed_mass: EstimateReport | None = None
    missed_by_index: EstimateReport | None = None
    mass_error: EstimateReport | None = None
    output_error: EstimateReport | None = None
    heads: tuple[AuditedHead, ...] = ()

    @classmethod
    def of(cls, audit: Audit) -> AuditReport:
        """Report of the looks at single heads."""
        looks = audit.looks()
        return cls(
            looks=len(audit.findings),
            recall_at_k=EstimateReport.of(audit.recall()),
            missed_mass=EstimateReport.of(audit.missed_mass()),
            missed_by_index=EstimateReport.of(audit.missed_by_index()),
            mass_error=EstimateReport.of(audit.mass_error()),
            output_error=EstimateReport.of(audit.output_error()),
            heads=tuple(
                AuditedHead(
                    layer=head.target.layer_idx,
                    kv_head=head.target.kv_head,
                    looks=looks[head.target],
                    recall_at_k=head.recall,
                    missed_mass=head.missed_mass,
                    missed_by_index=head.missed_by_index,
                    mass_error=head.mass_error,
                    output_error=head.output_error,
                )
                for head in audit.heads()
            ),
        )


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


class PrefillReport(Group):
    """Block-sparse prefill of a prompt; see `PrefillLoss`."""

    density: float
    error: float
    worst_error: float
    worst_layer: int
    queries: int

    @classmethod
    def of(cls, lost: PrefillLoss) -> PrefillReport:
        return cls(**asdict(lost))


class ExactReport(Group):
    """Exact decoding; see `ExactWork`."""

    passes: int
    drafted: int
    accepted: int
    steps: int
    unverified: int
    trusted: int = 0
    ties: int

    @classmethod
    def of(cls, work: ExactWork) -> ExactReport:
        return cls(**asdict(work))


class TokenErrorReport(Group):
    """Estimated distance of one token's distribution from full attention's; see `TokenError`."""

    kl: float
    kl_bar: float
    flip: float
    half: float
    entropy: float
    margin: float

    @classmethod
    def of(cls, error: TokenError) -> TokenErrorReport:
        return cls(**asdict(error))


class Run(Group):
    """One generation: its settings, its text and what it cost.

    config: the flat configuration. context_tokens: of the prompt. prefill_s: ttft_s without the
    index builds that were waited for; index_build_s: all builds, wall time. tpot_ms: mean time per
    token after the first. interrupted: the user ended it early. backends: what computed each op of
    the cache at last. index: what served each layer and
    KV head of the cold tier at the end, and why, and how far its build is. audit: null without one.
    prefill: what a block-sparse prefill read and lost, null where it was exact.
    exact: what exact decoding took, null without it. token_errors: of each of token_ids, null where
    they were not asked for.
    look_ahead: whether each layer is searched ahead, and why not; empty for methods that never do.
    steps: by layer whether the last decode step was one call of the engine, and why not.
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
    prefill: PrefillReport | None = None
    exact: ExactReport | None = None
    token_errors: tuple[TokenErrorReport, ...] | None = None
    look_ahead: tuple[dict[str, Any], ...] = ()
    steps: tuple[dict[str, Any], ...] = ()
    chat_template: str = "none"
    interrupted: bool = False


class MachineGbps(BandwidthGbps):
    """Bandwidths on which a plan rests.

    device: reading the memory that holds the weights; dram: reading host memory in order; gather:
    the same in rows of 256 bytes at random places.
    """

    device: float
    gather: float
