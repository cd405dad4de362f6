"""The documents of a page, and which of them are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybrid_kv.errors import ConfigError
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
