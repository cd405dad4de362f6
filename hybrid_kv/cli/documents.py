"""From what the API returns to reports, and where they go."""

from __future__ import annotations

import sys
from math import isnan
from typing import TYPE_CHECKING, Any

from hybrid_kv.cli.options import OutputOptions
from hybrid_kv.report import Environment, probe_environment
from hybrid_kv.report.files import check_files, write_file
from hybrid_kv.report.run import (
    AuditedHead,
    AuditReport,
    EstimateReport,
    MemoryBytes,
    Percentiles,
    PhasesMs,
    Run,
    WorkReport,
)
from hybrid_kv.report.schema import to_json

if TYPE_CHECKING:
    import torch

    from hybrid_kv.api import LLM, Generation
    from hybrid_kv.cli.running import Outcome
    from hybrid_kv.config import HybridConfig
    from hybrid_kv.types import Work
    from hybrid_kv.watch.audit import Audit, Estimate


def check_target(output: OutputOptions) -> None:
    """Raises ConfigError if the report could not be written; said before the work begins."""
    check_files({"--json": output.json})


def write_report(report: Any, output: OutputOptions) -> None:
    """Puts a report where --json says, if it says anything.

    Raises:
        WriteError: it cannot be written; an older one is still there.
    """
    if output.json is not None:
        write_file(output.json, to_json(report) + "\n", "report")


def environment_of(llm: LLM) -> Environment:
    """The environment with the device that the model is on."""
    return environment_on(llm.model.device)


def environment_on(device: torch.device) -> Environment:
    """The environment with a device by its name."""
    import torch

    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return probe_environment(f"{device}{name}")


def describe_run(llm: LLM, model: str, outcome: Outcome, config: HybridConfig | None = None) -> Run:
    """The run as schema 1 has it; what nobody measured is null.

    Args:
        config: of the run, where it is not the model's.
    """
    got, config = outcome.generation, config or llm.config
    return Run(
        config=config.flat(),
        method=config.method,
        model=model,
        context_tokens=got.prompt_tokens,
        new_tokens=len(got.token_ids),
        text=got.text,
        token_ids=tuple(got.token_ids),
        ttft_s=got.ttft_s if got.token_ids else None,
        prefill_s=got.prefill_s if got.token_ids else None,
        index_build_s=got.index_build_s,
        tpot_ms=got.tpot_ms if len(got.token_times_s) > 1 else None,
        itl_ms=_gaps(got.token_times_s),
        phases_ms=_phases(got),
        work=describe_work(got.work, got.audit),
        memory_bytes=_memory(llm, got),
        backends=got.backends,
        index=tuple(got.index),
        audit=None if got.audit is None else describe_audit(got.audit),
        chat_template=got.chat_template,
        interrupted=outcome.interrupted,
    )


def _gaps(times: list[float]) -> Percentiles | None:
    import numpy as np

    if len(times) < 2:
        return None
    p50, p90, p99 = np.percentile(1e3 * np.diff(times), [50, 90, 99]).tolist()
    return Percentiles(p50=p50, p90=p90, p99=p99)


def _phases(got: Generation) -> PhasesMs:
    steps = len(got.token_times_s) - 1
    if steps < 1:
        return PhasesMs()
    phases = {name: 1e3 * seconds / steps for name, seconds in got.phases_s.items()}
    return PhasesMs(**phases, other=max(0.0, got.tpot_ms - sum(phases.values())))


def describe_audit(audit: Audit) -> AuditReport:
    """What the looks at single heads found."""
    looks = audit.looks()
    return AuditReport(
        looks=len(audit.findings),
        recall_at_k=_estimate(audit.recall()),
        missed_mass=_estimate(audit.missed_mass()),
        missed_by_index=_estimate(audit.missed_by_index()),
        output_error=_estimate(audit.output_error()),
        heads=tuple(
            AuditedHead(
                layer=head.target.layer_idx,
                kv_head=head.target.kv_head,
                looks=looks[head.target],
                recall_at_k=head.recall,
                missed_mass=head.missed_mass,
                missed_by_index=head.missed_by_index,
                output_error=head.output_error,
            )
            for head in audit.heads()
        ),
    )


def _estimate(estimate: Estimate | None) -> EstimateReport | None:
    if estimate is None:
        return None
    width = estimate.half_width
    return EstimateReport(mean=estimate.mean, half_width=None if isnan(width) else width)


def describe_work(work: Work, audit: Audit | None) -> WorkReport:
    """What decoding touched; all null where it did not decode."""
    if not work.steps:
        return WorkReport()
    recall, missed = (None, None) if audit is None else (audit.recall(), audit.missed_mass())
    return WorkReport(
        scored_ratio=work.scored / work.visible,
        retrieved_tokens=work.retrieved / work.steps,
        most_retrieved_tokens=work.most_retrieved,
        attended_tokens=work.attended / work.steps,
        hot_ratio=work.hot_ratio,
        promoted_pages=work.promoted_pages,
        fetched_bytes=work.fetched_bytes,
        recall_at_k=None if recall is None else recall.mean,
        missed_mass=None if missed is None else missed.mean,
        audited_steps=None if audit is None else len(audit.findings),
    )


def _memory(llm: LLM, got: Generation) -> MemoryBytes:
    import torch

    device = llm.model.device
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return MemoryBytes(
        device_peak=peak,
        host_kv=got.host_kv_bytes,
        host_index=got.host_index_bytes,
        host_peak=_peak_resident_set(),
    )


def _peak_resident_set() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
