"""The documents of a page, and which of them are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybrid_kv.errors import ConfigError
from hybrid_kv.report.html.runs import RunDocument, runs_of
from hybrid_kv.report.schema import ChatReport, DemoReport, ProfileReport, Report, RunReport

Drawable = ProfileReport | RunDocument


@dataclass(frozen=True, slots=True)
class Source:
    """A document and the name of its file."""

    report: Drawable
    name: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two profiles; `number` is the second one's among all profiles, from 2."""

    number: int
    first: ProfileReport
    second: ProfileReport
    names: tuple[str, str]


def drawable(report: Report, name: str) -> Source:
    """The document, where it holds something to draw.

    Raises:
        ConfigError: a document of another verb, or one without any run.
    """
    if not isinstance(report, ProfileReport | RunReport | ChatReport | DemoReport):
        raise ConfigError(
            f"a report is made of runs (profile, generate, chat, demo), got '{name}' of "
            f"{report.command}, which has nothing to draw; read it as it is"
        )
    if not (report.rows if isinstance(report, ProfileReport) else runs_of(report)):
        raise ConfigError(
            f"a report needs at least one run, got '{name}' with none; run {report.command} again"
        )
    return Source(report, name)


def comparisons(sources: Sequence[Source]) -> Iterator[Comparison]:
    """Each further profile with the first one."""
    profiles = [(s.report, s.name) for s in sources if isinstance(s.report, ProfileReport)]
    for number, (report, name) in enumerate(profiles[1:], 2):
        first, first_name = profiles[0]
        yield Comparison(number, first, report, (first_name, name))
