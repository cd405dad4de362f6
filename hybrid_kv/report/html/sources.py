"""The documents of a page, which of them are compared, and how each is shown.

Generations, conversations and demos: what was written, what it cost, where it went.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybrid_kv.errors import ConfigError
from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.page_blocks import (
    WIDTH,
    Abreast,
    Details,
    FactList,
    Figure,
    PageBlock,
    Pre,
    Section,
    Table,
    note,
)
from hybrid_kv.report.html.page_entries import Entry, entries_of, tiers
from hybrid_kv.report.html.pictures import memory_figure, phases_figure
from hybrid_kv.report.html.profile_page import heads_blocks
from hybrid_kv.report.html.tables import (
    machine,
    memory_table,
    phases_tables,
    quality_table,
    settings_table,
)
from hybrid_kv.report.run import Run
from hybrid_kv.report.schema import ChatReport, DemoReport, ProfileReport, Report, RunReport

RunDocument = RunReport | ChatReport | DemoReport
Drawable = ProfileReport | RunDocument

_SETTINGS = {"config", "index", "backends", "token_ids", "text"}
_POSITIVE = {"tpot_ms", "step_ms", "context_tokens", "looks"}
_RATIOS = {"audit", "work"}
_SHARES = {"recall_at_k", "missed_mass"}
_DIFFERENCES = {
    "phases_ms",
    "recorder_ratio",
    "mass_error",
}  # what is left of a subtraction may be below zero
_HEADS = {"layer", "kv_head"}
_LEAST, _MOST, _ROUNDING, _MOST_HEADS = 1e-9, 1e18, 1e-3, 1e4


@dataclass(frozen=True, slots=True)
class Source:
    """A document and the name of its file."""

    report: Drawable
    name: str


@dataclass(frozen=True, slots=True)
class ComparedProfiles:
    """Two profiles; `number` is the second one's among all profiles, from 2."""

    number: int
    first: ProfileReport
    second: ProfileReport
    names: tuple[str, str]


def drawable(report: Report, name: str) -> Source:
    """The document, where it holds something to draw.

    Raises:
        ConfigError: a document of another verb, one without any run, or with numbers that no run
            can have.
    """
    if not isinstance(report, ProfileReport | RunReport | ChatReport | DemoReport):
        raise ConfigError(
            f"a report is made of runs (profile, generate, chat, demo), got '{name}' of "
            f"{report.command}, which has nothing to draw; read it as it is"
        )
    runs = report.rows if isinstance(report, ProfileReport) else runs_of(report)
    if not runs:
        raise ConfigError(
            f"a report needs at least one run, got '{name}' with none; run {report.command} again"
        )
    for number, run in enumerate(runs):
        for place, value in _numbers(run.model_dump(exclude=_SETTINGS), f"{number}"):
            if not _possible(place.split("."), value):
                raise ConfigError(
                    f"report '{name}' is damaged: {place}: {value:g} is no number that a run can "
                    "have; run the command again"
                )
    return Source(report, name)


def _numbers(value: object, place: str) -> Iterator[tuple[str, float]]:
    """Every number inside, with the dotted name of where it stands; numbers of a list share one."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _numbers(part, f"{place}.{key}")
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _numbers(part, place)
    elif isinstance(value, int | float):
        yield place, value


def _possible(place: list[str], value: float) -> bool:
    name = place[-1]
    if name in _HEADS:
        return 0 <= value <= _MOST_HEADS
    if value == 0:
        return name not in _POSITIVE
    if not _DIFFERENCES.isdisjoint(place):
        return abs(value) <= _MOST
    if not _RATIOS.isdisjoint(place):
        share = not _SHARES.isdisjoint(place) and name != "half_width"
        return -_ROUNDING <= value <= (1 + _ROUNDING if share else _MOST)
    return _LEAST <= value <= _MOST


def comparisons(sources: Sequence[Source]) -> Iterator[ComparedProfiles]:
    """Each further profile with the first one."""
    profiles = [(s.report, s.name) for s in sources if isinstance(s.report, ProfileReport)]
    for number, (report, name) in enumerate(profiles[1:], 2):
        first, first_name = profiles[0]
        yield ComparedProfiles(number, first, report, (first_name, name))


def runs_of(report: RunDocument) -> tuple[Run, ...]:
    """The runs in a document, in order."""
    match report:
        case RunReport():
            return (report,)
        case ChatReport():
            return report.turns
        case DemoReport():
            return report.runs


def run_entries(report: RunDocument) -> list[Entry]:
    """A run is named by its method; an answer of a conversation by its number."""
    runs = runs_of(report)
    if isinstance(report, ChatReport):
        return entries_of(runs, [f"answer {number}" for number in range(1, len(runs) + 1)])
    return entries_of(runs)


def run_head(report: RunDocument, source: str) -> list[PageBlock]:
    """Head of a run: what ran, where, and how a demo ended."""
    runs = runs_of(report)
    pairs: dict[str, str | None] = {
        "Model": ", ".join(dict.fromkeys(run.model for run in runs)) or None,
        "Method": ", ".join(dict.fromkeys(run.method for run in runs)) or None,
    }
    if isinstance(report, DemoReport):
        pairs |= {
            "Question": report.question,
            "Expected": report.expected,
            "Answers": "the same tokens" if report.agree else "different tokens",
            "Correct": "yes" if report.correct else "no",
            "Tokens attended": numbers.percent(report.attended_ratio),
            "KV on the device": numbers.size(report.device_kv_bytes),
        }
        if (layer := report.layer) is not None:
            steps = ", ".join(f"{numbers.short(run.step_ms)} ms {run.method}" for run in layer.runs)
            name = f"One layer of {layer.shape} at {layer.context_tokens:,} tokens, a step"
            pairs[name] = f"{steps}, {numbers.percent(layer.runs[1].mass)} of the mass"
    return [FactList({**pairs, **machine(report.environment), "File": source})]


def run_sections(report: RunDocument, prefix: str) -> list[Section]:
    """All sections of a generation, a conversation or a demo."""
    entries = run_entries(report)
    timed = [e for e in entries if any(value is not None for _, value in e.row.phases_ms)]
    stored = [entry for entry in entries if tiers(entry.row.memory_bytes)]
    audited = [entry for entry in entries if entry.row.audit]
    parts: list[tuple[str, str, list[PageBlock]]] = [
        ("numbers", "What it cost", [_cost(entries)]),
        ("phases", "Where a step goes", _phases(timed, prefix) if timed else []),
        ("quality", "What was missed", [quality_table("Audit", audited)] if audited else []),
        ("heads", "Missed mass by layer and head", heads_blocks(audited, prefix)),
        ("memory", "Memory by tier", _memory(stored, prefix) if stored else []),
        ("text", "What was written", _texts(entries)),
        ("settings", "Settings", _settings(entries)),
    ]
    return [Section(f"{prefix}{name}", title, blocks) for name, title, blocks in parts if blocks]


def _phases(timed: Sequence[Entry], prefix: str) -> list[PageBlock]:
    drawn = Figure(phases_figure(timed, "per token", WIDTH), f"{prefix}phases")
    return [Abreast([drawn, *phases_tables("Phases, ms and share of the sum", timed)])]


def _memory(stored: Sequence[Entry], prefix: str) -> list[PageBlock]:
    drawn = Figure(memory_figure(stored, "at the end", WIDTH), f"{prefix}memory")
    return [Abreast([drawn, memory_table("Bytes by tier", stored)])]


def _cost(entries: Sequence[Entry]) -> PageBlock:
    if not entries:
        return note("No answer was written.")
    rows = []
    for entry in entries:
        run = entry.row
        assert isinstance(run, Run)
        gaps = run.itl_ms
        spread = [None] * 3 if gaps is None else [gaps.p50, gaps.p90, gaps.p99]
        mark = " (interrupted)" if run.interrupted else ""
        rows.append(
            [
                f"{entry.name}{mark}",
                f"{run.context_tokens:,}",
                f"{run.new_tokens:,}",
                numbers.seconds(run.ttft_s),
                numbers.seconds(run.prefill_s),
                numbers.seconds(run.index_build_s),
                *(numbers.short(value) for value in (run.tpot_ms, *spread)),
            ]
        )
    head = ["run", "context", "new tokens", "TTFT", "prefill", "index build", "TPOT, ms"]
    return Table("Time and tokens", [*head, "p50", "p90", "p99"], rows)


def _texts(entries: Sequence[Entry]) -> list[PageBlock]:
    texts = [(entry.name, entry.row.text) for entry in entries if isinstance(entry.row, Run)]
    return [Details(name, [Pre(text)]) for name, text in texts if text]


def _settings(entries: Sequence[Entry]) -> list[PageBlock]:
    return [
        Details(entry.name, [settings_table(f"Settings of {entry.name}", entry.row.config)])
        for entry in entries
    ]
