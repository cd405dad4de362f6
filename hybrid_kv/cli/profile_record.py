"""A profile while it grows: written after every row, and taken up again where it ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybrid_kv.cli.display import note
from hybrid_kv.cli.files import write_report
from hybrid_kv.cli.options import OutputOptions
from hybrid_kv.cli.profile_tables import (
    describe_profile,
    read_profile,
    threads_here,
)
from hybrid_kv.errors import ConfigError, WriteError
from hybrid_kv.eval.profiling import Bench, ProfileArguments
from hybrid_kv.models.load import resolve_device
from hybrid_kv.report.environment import environment_on
from hybrid_kv.report.files import STDOUT, is_replaced
from hybrid_kv.report.profile import ProfileRow
from hybrid_kv.report.schema import ProfileReport

RowPlace = tuple[str, int]
"""A method and a context."""

_MOST_TOLD = 5


def find_earlier(asked: ProfileArguments, output: OutputOptions) -> ProfileReport | None:
    """Report that --json holds of the same profile, to be continued; None where there is no file
    yet.

    Raises:
        ConfigError: there is no file to continue, or one of other settings or another environment.
    """
    if output.json is None or output.json == STDOUT or not is_replaced(output.json):
        raise ConfigError(
            f"--resume needs --json FILE, the report to continue, got {output.json or 'none'}"
        )
    path = Path(output.json)
    if not path.exists():
        return None
    report, before = read_profile(path)
    found = list(_differences(asked, before, report))
    if found:
        more = f" and {len(found) - _MOST_TOLD} more" if len(found) > _MOST_TOLD else ""
        raise ConfigError(
            f"--resume needs a report of the same settings and environment, '{path}' differs in "
            f"{'; '.join(found[:_MOST_TOLD])}{more}; give the same again, or choose another file"
        )
    return report


def rows_of(report: ProfileReport | None) -> dict[RowPlace, ProfileRow]:
    """The rows that need not be measured again."""
    rows = () if report is None else report.rows
    return {_place(row): row for row in rows if row.status == "ok"}


def lacking(asked: ProfileArguments, known: Mapping[RowPlace, ProfileRow]) -> int:
    """Number of rows that are still to be measured."""
    return sum(place not in known for place in _places(asked))


class Record:
    """All rows so far, and the file that has them.

    A file that cannot be written ends no measurement: the next row tries again.
    """

    def __init__(
        self, bench: Bench, output: OutputOptions, known: Mapping[RowPlace, ProfileRow]
    ) -> None:
        self._bench, self._output = bench, output
        self._rows = dict(known)
        self._warned = False
        for row in known.values():
            bench.note_build(row)

    def add(self, row: ProfileRow) -> None:
        """Takes one more row and writes all of them."""
        self._rows[_place(row)] = row
        if self._output.json is None or not is_replaced(self._output.json):
            return
        try:
            write_report(self.report(interrupted=True), self._output)
        except WriteError as error:
            if not self._warned:
                note(f"{error}; measuring goes on", self._output)
            self._warned = True

    def report(self, *, interrupted: bool) -> ProfileReport:
        """The report of all rows, in the order in which they are asked for."""
        rows = [self._rows[place] for place in _places(self._bench.asked) if place in self._rows]
        return describe_profile(self._bench, rows, interrupted=interrupted)


def _place(row: ProfileRow) -> RowPlace:
    return row.method, row.context_tokens


def _places(asked: ProfileArguments) -> Iterator[RowPlace]:
    return ((method, tokens) for tokens in asked.contexts for method in asked.methods)


def _differences(
    asked: ProfileArguments, before: ProfileArguments, report: ProfileReport
) -> Iterator[str]:
    """Settings that the report has otherwise; further methods and contexts may be asked for."""
    here, there = asked.model_dump(mode="json"), before.model_dump(mode="json")
    yield from _unequal("", there, here, {"contexts", "methods"})
    for row in report.rows:
        if _place(row) not in set(_places(asked)):
            yield f"a row of {row.method} at {row.context_tokens}, which is not asked for"
    environment = environment_on(resolve_device(asked.device))
    yield from _unequal("", report.environment.model_dump(), environment.model_dump(), set())
    yield from _unequal("threads of ", report.threads, threads_here(), set())
    configs = asked.configs()
    for row in rows_of(report).values():
        if row.method in configs:
            now = configs[row.method].flat()
            yield from _unequal(f"{row.method}'s ", row.config, now, set())
            del configs[row.method]  # at all contexts the same


def _unequal(
    prefix: str, there: Mapping[str, Any], here: Mapping[str, Any], free: set[str]
) -> Iterator[str]:
    for key in dict.fromkeys((*there, *here)):
        old, new = there.get(key), here.get(key)
        if key in free or old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _unequal(f"{prefix}{key}.", old, new, set())
        else:
            yield f"{prefix}{key} (there {old}, now {new})"
