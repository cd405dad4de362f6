"""Schema 1 of the JSON that every verb writes: one document per verb."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, ValidationError

from hybrid_kv.config import first_sentence
from hybrid_kv.errors import ConfigError
from hybrid_kv.report.evaluation import EvalRow
from hybrid_kv.report.files import expand
from hybrid_kv.report.profile import ProfileRow
from hybrid_kv.report.run import Environment, Group, MachineGbps, Run

SCHEMA: Final = 1


class _Envelope(Group):
    schema_: Literal[1] = Field(default=1, alias="schema")
    command: str
    environment: Environment


class RunReport(Run, _Envelope):
    """`generate`: the run's keys stand beside schema, command and environment."""

    command: Literal["generate"] = "generate"


class ChatReport(_Envelope):
    """`chat`: one run per answer; in each, context_tokens counts all turns before."""

    command: Literal["chat"] = "chat"
    turns: tuple[Run, ...]


class AskReport(Run, _Envelope):
    """`context ask`: as `generate`; the prompt is the context and the question."""

    command: Literal["context ask"] = "context ask"


class ContextChatReport(_Envelope):
    """`context chat`: one run per answer."""

    command: Literal["context chat"] = "context chat"
    turns: tuple[Run, ...]


class ContextAudit(Group):
    """Findings of an audit by the time a context was saved, means over its looks.

    recall_at_k: null where no cold entries were searched. mass_error: null in contexts of before
    it was measured.
    """

    looks: int
    recall_at_k: float | None
    missed_mass: float
    missed_by_index: float
    output_error: float
    mass_error: float | None = None


class ContextReport(_Envelope):
    """`context info` and `context build`: what a saved context holds.

    source: where its model was loaded from; null where nobody said. prefill_s: what computing it
    took; null where nobody measured. num_bytes: of its files, by part: keys and values, indexes,
    the queries that they learn from again, what the method keeps of evicted tokens, all else.
    dropped_tokens: that a method keeps nothing of, in the layer with most. indexed_keys: of all
    layers, those that a saved index finds; unindexed_keys: those whose index is built when the
    context is opened, or that need none. index_heads: KV heads of all layers by what finds their
    keys in a saved index; check_recall, check_mass: shares that held-out queries found when the
    indexes were made, those of the worst head, null where none was checked. audit: null where none
    was made before it was saved. compress: null for keys and values as they were; k_error, v_error:
    relative, the worst layer's.
    """

    command: Literal["context info"] = "context info"
    path: str
    package: str
    source: str | None
    method: str
    config: dict[str, Any]
    dtype: str
    page_size: int
    num_layers: int
    num_tokens: int
    is_chat: bool
    prefill_s: float | None
    num_bytes: dict[str, int]
    dropped_tokens: int
    indexed_keys: int
    unindexed_keys: int
    index_heads: dict[str, int] = Field(default_factory=dict)
    check_recall: float | None = None
    check_mass: float | None = None
    audit: ContextAudit | None = None
    compress: Literal["int8"] | None
    k_error: float
    v_error: float


class LayerRun(Group):
    """Decode steps of one attention layer under a method.

    step_ms: median. mass: share of the softmax that was attended, mean over steps and query heads.
    device_kv_bytes: K and V on the device tier; host_bytes: cold K, V and their index.
    """

    config: dict[str, Any]
    method: str
    step_ms: float
    attended_ratio: float
    mass: float
    device_kv_bytes: int
    host_bytes: int


class LayerReport(Group):
    """A made-up decode of one attention layer, computed by the CPU: full attention, then a method.

    shape: whose layer it is; kv_bytes: its K and V in 16 bits. steps: measured of each.
    """

    shape: str
    context_tokens: int
    kv_bytes: int
    steps: int
    runs: tuple[LayerRun, LayerRun]


class DemoReport(_Envelope):
    """`demo`: one question answered by full attention and by the method, in this order.

    attended_ratio: entries that the method attended over those that full attention attends.
    agree: both wrote the same tokens. correct: both wrote the expected answer. read_s: computing
    the text, once for both, so that `ttft_s` of the runs begins with the question; null in reports
    whose runs have each read it. layer: null where it was left out.
    """

    command: Literal["demo"] = "demo"
    question: str
    expected: str
    agree: bool
    correct: bool
    attended_ratio: float | None
    device_kv_bytes: int
    read_s: float | None = None
    runs: tuple[Run, Run]
    layer: LayerReport | None = None


class PluginReport(Group):
    """A registered plug-in; parameters by dotted name, with default, meaning and range.

    how: the formula in words. sections: what is kept and lost, and the deviations from the paper.
    """

    name: str
    summary: str
    paper: str
    how: str = ""
    sections: dict[str, str] = Field(default_factory=dict)
    parameters: dict[str, Any]


class MethodsReport(_Envelope):
    """`methods`: what can be chosen."""

    command: Literal["methods"] = "methods"
    methods: tuple[PluginReport, ...]
    indexes: tuple[PluginReport, ...]


class Check(Group):
    """One line of `doctor`: state is 'ok', 'absent' (optional) or 'missing' (needed)."""

    name: str
    state: Literal["ok", "absent", "missing"]
    detail: str


class DoctorReport(_Envelope):
    """`doctor`: what this machine can run.

    ram_free_bytes: within the limit that is met first; ram_limit: which one, null for the machine's
    own memory. model, context_tokens: what the lines on bandwidths speak of; null where none were
    measured.
    """

    command: Literal["doctor"] = "doctor"
    ram_free_bytes: int
    ram_limit: str | None = None
    devices: tuple[str, ...]
    model: str | None = None
    context_tokens: int | None = None
    bandwidth_gbps: MachineGbps | None = None
    checks: tuple[Check, ...]


class ListedModel(Group):
    """A model that can be used without a download.

    name: to load it by. num_bytes: on the disk. num_layers, kv_bytes_per_token: of all layers, and
    of those that keep every token; null where the configuration does not tell. why: the reason why
    it cannot be served, "" where it can.
    """

    name: str
    kind: Literal["hub", "folder", "gguf", "package", "random"]
    path: str | None
    num_bytes: int
    architecture: str | None
    num_layers: int | None
    kv_bytes_per_token: int | None
    served: bool
    why: str = ""


class ListReport(_Envelope):
    """`ls`: models on this machine."""

    command: Literal["ls"] = "ls"
    models: tuple[ListedModel, ...]


class PullReport(_Envelope):
    """`pull`: a download from the hub.

    files: bytes by name. downloaded_bytes: of those that were not in the cache. model: the name to
    load it by.
    """

    command: Literal["pull"] = "pull"
    name: str
    commit: str
    files: dict[str, int]
    downloaded_bytes: int
    model: str


class PlannedOption(Group):
    """One way of running a context: bytes by purpose, predicted milliseconds by tier.

    first_token_s: predicted seconds of the prompt by part, empty where the machine's arithmetic is
    not known; ttft_s: their sum. measured_tpot_ms, measured_ttft_s: of a profile that was set
    beside the plan. select: who finds cold entries, the host or the device, and why.
    """

    mode: Literal["dense", "dense_8bit", "hybrid"]
    fits: bool
    why: str
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    ms_per_token: dict[str, float]
    tpot_ms: float | None
    first_token_s: dict[str, float] = Field(default_factory=dict)
    ttft_s: float | None = None
    measured_tpot_ms: float | None = None
    measured_ttft_s: float | None = None
    settings: dict[str, int | str]
    max_context_tokens: int
    select: str = ""


class PlannedDesign(Group):
    """A decode step of one design on a card and a host: computed, but for `measured_parts`, whose
    costs were measured on one core.

    hidden_ms_per_token: what runs beside other parts. launches: kernels, copies or graphs that the
    host starts for a token. waits: of host and device for each other. host_core_ms: of all cores.
    why_not: a sentence where it cannot run.
    """

    design: str
    tpot_ms: float
    ms_per_token: dict[str, float]
    hidden_ms_per_token: dict[str, float]
    measured_parts: tuple[str, ...]
    launches: int
    waits: int
    host_core_ms: float
    device_read_bytes: int
    host_read_bytes: int
    bus_bytes: int
    device_bytes: int
    host_bytes: int
    why_not: str = ""


class PlannedExact(Group):
    """A token of an exact answer by a design: computed.

    accepted: share of drafted tokens that full attention chooses too. drafts: of a pass, at best.
    beside_drafts, beside_tpot_ms: the same were a pass to run beside the drafts of the next one,
    which is not built.
    """

    design: str
    accepted: float
    drafts: int
    tpot_ms: float
    beside_drafts: int
    beside_tpot_ms: float


class PromptGflops(Group):
    """Rates on which the time to the first token rests, in 1e9 operations per second.

    assumed: they are shares of a card's specification.
    """

    products: float
    attention: float
    assumed: bool


class PlanReport(_Envelope):
    """`plan`: predictions, none of them measured but the bandwidths.

    weights: bytes by layout. rates_assumed: the device's bandwidths are a card's specification.
    recommended: the first option that fits, null where none does.
    """

    command: Literal["plan"] = "plan"
    config: dict[str, Any]
    model: str
    context_tokens: int
    device_bytes: int | None
    host_bytes: int
    weight_bytes: int
    weights: dict[str, int] = Field(default_factory=dict)
    kv_bytes_per_token: int
    bandwidth_gbps: MachineGbps
    rates_assumed: bool
    prompt_rates: PromptGflops | None = None
    options: tuple[PlannedOption, ...]
    recommended: Literal["dense", "dense_8bit", "hybrid"] | None
    advice: str
    designs: tuple[PlannedDesign, ...] = ()
    exact: tuple[PlannedExact, ...] = ()


class ProfileReport(_Envelope):
    """`profile`: each method at each context, on one machine.

    arguments: of the verb, all that it takes to repeat the run. layers: of the model that was run;
    shape_layers: of the shape it stands for, null where it is whole. fill: "prefill", or
    "synthetic" for attention-like KV that was put in place; its tokens mean nothing. recorder_us:
    what measuring one phase costs. interrupted: the user ended it; the rows are those that were
    measured.
    """

    command: Literal["profile"] = "profile"
    arguments: dict[str, Any]
    model: str
    layers: int
    shape_layers: int | None = None
    fill: Literal["prefill", "synthetic"]
    new_tokens: int
    warmup_tokens: int
    threads: dict[str, int]
    bandwidth_gbps: MachineGbps
    recorder_us: float
    rows: tuple[ProfileRow, ...]
    interrupted: bool = False


class RatioReport(Group):
    """Time per token of a method at a context, second run over first.

    low, high: 95% interval of the ratio of medians, null where the steps are too few.
    """

    method: str
    context_tokens: int
    first: str
    second: str
    tpot_ratio: float
    low: float | None = None
    high: float | None = None


class EvalReport(_Envelope):
    """`eval`: methods compared on tasks, one row for each task, context, asking, method and budget.

    arguments: of the verb, all that it takes to repeat the run. interrupted: the user ended it;
    rows are of the samples that were measured.
    """

    command: Literal["eval"] = "eval"
    arguments: dict[str, Any]
    model: str
    rows: tuple[EvalRow, ...]
    interrupted: bool = False


class PageReport(_Envelope):
    """`report`: which runs were drawn, which files that made, and the ratios of profiles."""

    command: Literal["report"] = "report"
    runs: tuple[str, ...]
    written: tuple[str, ...]
    ratios: tuple[RatioReport, ...]


Report = Annotated[
    RunReport
    | ChatReport
    | AskReport
    | ContextChatReport
    | ContextReport
    | DemoReport
    | MethodsReport
    | DoctorReport
    | ListReport
    | PullReport
    | PlanReport
    | ProfileReport
    | EvalReport
    | PageReport,
    Field(discriminator="command"),
]


class _Any(BaseModel):
    report: Report


def to_json(report: _Envelope) -> str:
    """The report as one JSON document of one line per key."""
    return report.model_dump_json(by_alias=True, indent=2)


def parse_report(text: str, source: str = "report") -> Report:
    """The report in a JSON text, whole or compact; `source` is what errors call it.

    Raises:
        ConfigError: the text is no JSON, has another schema number, or does not fit the schema.
    """
    try:
        data = expand(json.loads(text))
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
        raise ConfigError(
            f"{source} is damaged: {first_sentence(error, depth=2)}; run the command again"
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
