"""Schema 1 of the JSON that every verb writes; units are in the key names.

A value that was not measured is null, never a guess.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hybrid_kv.errors import ConfigError
from hybrid_kv.report.environment import Environment

SCHEMA: Final = 1


class _Group(BaseModel):
    """Frozen, unknown keys refused, NaN and infinity refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Percentiles(_Group):
    """Gaps between tokens, in ms."""

    p50: float
    p90: float
    p99: float


class PhasesMs(_Group):
    """Mean time of one decode step by phase, in ms; `other` is what no phase accounts for."""

    search: float | None = None
    cold_attention: float | None = None
    resident_attention: float | None = None
    select: float | None = None
    merge: float | None = None
    transfer: float | None = None
    wait: float | None = None
    other: float | None = None


class WorkReport(_Group):
    """What decoding touched.

    scored_ratio: dot products spent on choosing over those of full attention. retrieved_tokens:
    mean number of cold entries attended per step, layer and query head; most_retrieved_tokens: the
    largest such number. attended_tokens: mean number of all entries attended, resident ones
    included. recall_at_k, missed_mass, audited_steps: from the audit, null without one.
    """

    scored_ratio: float | None = None
    retrieved_tokens: float | None = None
    most_retrieved_tokens: int | None = None
    attended_tokens: float | None = None
    recall_at_k: float | None = None
    missed_mass: float | None = None
    audited_steps: int | None = None


class EstimateReport(_Group):
    """A mean and half the width of its 95% confidence interval, null from one look."""

    mean: float
    half_width: float | None = None


class AuditedHead(_Group):
    """Means over the looks at one KV head; recall_at_k is null where nothing was searched."""

    layer: int
    kv_head: int
    looks: int
    recall_at_k: float | None
    missed_mass: float
    output_error: float


class AuditReport(_Group):
    """What exact attention of single heads, in rotation, found to be missing.

    looks: heads that were looked at, one step each. recall_at_k: of the exact best cold entries, as
    many as the budget has. missed_mass: of the softmax over all stored entries. output_error:
    relative L2 distance of a head's output.
    """

    looks: int
    recall_at_k: EstimateReport | None = None
    missed_mass: EstimateReport | None = None
    output_error: EstimateReport | None = None
    heads: tuple[AuditedHead, ...] = ()


class MemoryBytes(_Group):
    """device_peak: of the accelerator's allocator; host_peak: resident set of the process."""

    device_peak: int | None = None
    host_kv: int | None = None
    host_index: int | None = None
    host_peak: int | None = None


class BandwidthGbps(_Group):
    """Bytes moved over time, in 1e9 bytes per second."""

    dram: float | None = None
    h2d: float | None = None
    d2h: float | None = None


class Run(_Group):
    """One generation: its settings, its text and what it cost.

    config: the flat configuration. context_tokens: of the prompt. prefill_s: ttft_s without the
    index builds that were waited for; index_build_s: all builds, wall time. tpot_ms: mean time per
    token after the first. interrupted: the user ended it early. backends: what computed each op of
    the cache at last. index: what served each layer and
    KV head of the cold tier at the end, and why, and how far its build is. audit: null without one.
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
    interrupted: bool = False


class _Head(_Group):
    schema_: Literal[1] = Field(default=1, alias="schema")
    command: str
    environment: Environment


class RunReport(Run, _Head):
    """`generate`: the run's keys stand beside schema, command and environment."""

    command: Literal["generate"] = "generate"


class ChatReport(_Head):
    """`chat`: one run per answer; in each, context_tokens counts all turns before."""

    command: Literal["chat"] = "chat"
    turns: tuple[Run, ...]


class DemoReport(_Head):
    """`demo`: one question answered by full attention and by the method, in this order.

    attended_ratio: entries that the method attended over those that full attention attends.
    agree: both wrote the same tokens. correct: both wrote the expected answer.
    """

    command: Literal["demo"] = "demo"
    question: str
    expected: str
    agree: bool
    correct: bool
    attended_ratio: float | None
    device_kv_bytes: int
    runs: tuple[Run, Run]


class PluginReport(_Group):
    """A registered plug-in; parameters by dotted name, with default and meaning."""

    name: str
    summary: str
    paper: str
    parameters: dict[str, Any]


class MethodsReport(_Head):
    """`methods`: what can be chosen."""

    command: Literal["methods"] = "methods"
    methods: tuple[PluginReport, ...]
    indexes: tuple[PluginReport, ...]


class Check(_Group):
    """One line of `doctor`: state is 'ok', 'absent' (optional) or 'missing' (needed)."""

    name: str
    state: Literal["ok", "absent", "missing"]
    detail: str


class DoctorReport(_Head):
    """`doctor`: what this machine can run."""

    command: Literal["doctor"] = "doctor"
    ram_free_bytes: int
    devices: tuple[str, ...]
    checks: tuple[Check, ...]


class MachineGbps(BandwidthGbps):
    """What a plan rests on.

    device: reading the memory that holds the weights; dram: reading host memory in order; gather:
    the same in rows of 256 bytes at random places.
    """

    device: float
    gather: float


class PlannedOption(_Group):
    """One way of running a context: bytes by purpose, predicted milliseconds by tier."""

    mode: Literal["dense", "dense_8bit", "hybrid"]
    fits: bool
    why: str
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    ms_per_token: dict[str, float]
    tpot_ms: float | None
    settings: dict[str, int | str]
    max_context_tokens: int


class PlanReport(_Head):
    """`plan`: predictions, none of them measured but the bandwidths.

    rates_assumed: the device's bandwidths are a card's specification. recommended: the first option
    that fits, null where none does.
    """

    command: Literal["plan"] = "plan"
    config: dict[str, Any]
    model: str
    context_tokens: int
    device_bytes: int | None
    host_bytes: int
    weight_bytes: int
    kv_bytes_per_token: int
    bandwidth_gbps: MachineGbps
    rates_assumed: bool
    options: tuple[PlannedOption, ...]
    recommended: Literal["dense", "dense_8bit", "hybrid"] | None
    advice: str


Report = Annotated[
    RunReport | ChatReport | DemoReport | MethodsReport | DoctorReport | PlanReport,
    Field(discriminator="command"),
]


class _Any(BaseModel):
    report: Report


def to_json(report: _Head) -> str:
    """The report as one JSON document of one line per key."""
    return report.model_dump_json(by_alias=True, indent=2)


def parse_report(text: str, source: str = "report") -> Report:
    """The report in a JSON text; `source` is what errors call it.

    Raises:
        ConfigError: the text is no JSON, has another schema number, or does not fit the schema.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{source} must be a JSON document, got a syntax error in line {error.lineno}; "
            "write it again with --json"
        ) from None
    number = data.get("schema") if isinstance(data, dict) else None
    if number != SCHEMA:
        raise ConfigError(
            f"{source} must be of schema {SCHEMA}, got {number!r}; read it with the version of "
            "hybrid_kv that wrote it, or run the command again"
        )
    try:
        return _Any.model_validate({"report": data}).report
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"][2:]) or "command"
        raise ConfigError(
            f"{source} is damaged: {place}: {problem['msg']}; run the command again"
        ) from None


def read_report(path: Path) -> Report:
    """The report in a file.

    Raises:
        ConfigError: the file cannot be read or is not a report of schema 1.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"report '{path}' cannot be read: {error}; check the path") from None
    return parse_report(text, f"report '{path}'")
