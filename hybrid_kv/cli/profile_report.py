"""A profile as the schema has it, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from hybrid_kv.cli.documents import describe_audit, describe_work, environment_on
from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.profiling import ProfileArguments
from hybrid_kv.ops.native import engine_state
from hybrid_kv.ops.native.pool import pool_here
from hybrid_kv.report import read_report
from hybrid_kv.report.profile import BytesPerToken, ProfileRow
from hybrid_kv.report.run import MachineGbps, MemoryBytes, Percentiles, PhasesMs, WorkReport
from hybrid_kv.report.schema import ProfileReport
from hybrid_kv.watch.phases import Phases, cost_of_measuring

if TYPE_CHECKING:
    from hybrid_kv.eval.profiling import Bench, Row


def describe_profile(
    bench: Bench, rows: Sequence[ProfileRow], *, interrupted: bool
) -> ProfileReport:
    """The report of the rows so far."""
    asked = bench.asked
    return ProfileReport(
        environment=environment_on(bench.model.device),
        arguments=asked.model_dump(mode="json"),
        model=asked.model,
        layers=bench.num_layers,
        shape_layers=bench.shape_layers,
        fill=asked.fill,
        new_tokens=asked.new_tokens,
        warmup_tokens=asked.warmup_tokens,
        threads=threads_here(),
        bandwidth_gbps=MachineGbps(**dataclasses.asdict(bench.rates)),
        recorder_us=1e6 * cost_of_measuring(Phases()),
        rows=tuple(rows),
        interrupted=interrupted,
    )


def read_profile(path: Path) -> tuple[ProfileReport, ProfileArguments]:
    """A profile that was written before, with what it takes to repeat it.

    Raises:
        ConfigError: the file is damaged, of another schema, or of another verb.
    """
    report = read_report(path)
    if not isinstance(report, ProfileReport):
        raise ConfigError(
            f"report '{path}' must be one of profile, got one of {report.command}; give a file "
            "that `hybrid-kv profile --json` wrote"
        )
    return report, ProfileArguments.of(report.arguments, f"report '{path}'")


def threads_here() -> dict[str, int]:
    """Threads of torch and of the engine."""
    pool = pool_here() if engine_state().isa is not None else None
    return {"torch": torch.get_num_threads(), "engine": 1 if pool is None else pool.threads}


def describe_row(row: Row) -> ProfileRow:
    """A row as the schema has it."""
    taken = [] if row.steps is None else [1e3 * seconds for seconds in row.steps.step_s]
    phases = {} if row.steps is None else row.steps.phases_s()
    on_device = {} if row.steps is None else row.steps.device_phases_s()
    return ProfileRow(
        method=row.method,
        context_tokens=row.context_tokens,
        status=row.status,
        reason=row.reason,
        config=row.config.flat(),
        fill_s=row.fill_s,
        ttft_s=row.ttft_s,
        prefill_s=row.prefill_s,
        index_build_s=row.index_build_s,
        tpot_ms=row.tpot_ms,
        step_ms=tuple(taken),
        itl_ms=percentiles(taken),
        phases_ms=_in_ms(phases),
        device_phases_ms=_in_ms(on_device),
        recorder_ratio=row.recorder_ratio,
        work=WorkReport() if row.work is None else describe_work(row.work, row.audit),
        audit=None if row.audit is None else describe_audit(row.audit),
        memory_bytes=MemoryBytes(
            device_peak=row.device_peak,
            host_kv=row.host_kv_bytes,
            host_index=row.host_index_bytes,
            host_peak=row.peak_bytes,
        ),
        resident_kv_bytes=row.device_kv_bytes,
        bytes_per_token=BytesPerToken(**row.bytes_per_step),
        limit_ms=row.limit_ms,
        predicted_ms=row.predicted_ms,
        backends=row.backends,
        index=tuple(row.index),
    )


def _in_ms(phases: Mapping[str, float]) -> PhasesMs:
    return PhasesMs(**{name: 1e3 * seconds for name, seconds in phases.items()})


def percentiles(taken: Sequence[float]) -> Percentiles | None:
    """Of steps in ms; None of none."""
    if not taken:
        return None
    p50, p90, p99 = np.percentile(taken, [50, 90, 99]).tolist()
    return Percentiles(p50=p50, p90=p90, p99=p99)
