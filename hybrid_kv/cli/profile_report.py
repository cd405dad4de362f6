"""A profile as the schema has it, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hybrid_kv.cli.documents import environment_on
from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.profiling import ProfileArguments
from hybrid_kv.ops.native import engine_state
from hybrid_kv.ops.native.workers import pool_here
from hybrid_kv.report import read_report
from hybrid_kv.report.profile import ProfileRow
from hybrid_kv.report.run import MachineGbps
from hybrid_kv.report.schema import ProfileReport
from hybrid_kv.watch.phases import Phases, cost_of_measuring

if TYPE_CHECKING:
    from hybrid_kv.eval.profiling import Bench


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
