"""Measurements in processes of their own: one that crashes, hangs or fills the memory ends alone.

A job's process prints a line for every row as it is measured, and it is handed on at once; where
the job ends badly one more row says how.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO, TypeAlias

from benchmarks.gpu_check.requirements import ROOT, last_line

Row: TypeAlias = dict[str, Any]
"""part, job, name, status, why (None where status is "ok"), settings, values; job_s: seconds of the
job until the row came."""

STATUSES = ("ok", "skipped", "failed", "timed out", "not run")
MARK = "@row "
"""Begins a line of a job's stdout that is a row; all other lines are chatter of libraries."""

_TAIL_CHARS = 2000
_LOOK_S = 0.2
"""Between two looks at what a job has printed."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one process measures.

    part: the part of the check that it belongs to. kind: a name of `child.KINDS`. limit_s: after
    that it is ended. least_s: with less time left it is not begun. environment: beside ours.
    """

    part: str
    name: str
    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    limit_s: float = 60
    least_s: float = 10
    environment: dict[str, str] = field(default_factory=dict)

    def row(self, status: str, why: str, **values: Any) -> Row:
        """A row about the job itself."""
        return make_row(self.part, self.name, self.name, status, why, self.settings, values)


def make_row(
    part: str,
    job: str,
    name: str,
    status: str,
    why: str | None,
    settings: dict[str, Any],
    values: dict[str, Any],
) -> Row:
    return {
        **{"part": part, "job": job, "name": name, "status": status, "why": why},
        **{"settings": settings, "values": values},
    }


class Budget:
    """Seconds that are left, of a part and of the whole run."""

    def __init__(self, total_s: float, parts_s: dict[str, float]) -> None:
        self.total_s, self._parts_s = total_s, dict(parts_s)
        self._begin = monotonic()

    @property
    def spent_s(self) -> float:
        return monotonic() - self._begin

    def left_s(self, part: str) -> float:
        return min(self.total_s - self.spent_s, self._parts_s.get(part, self.total_s))

    def charge(self, part: str, seconds: float) -> None:
        """What a job of a part with a share of its own has taken."""
        if part in self._parts_s:
            self._parts_s[part] -= seconds


def run_jobs(jobs: Sequence[Job], budget: Budget) -> Iterator[Row]:
    """The rows of all jobs as they are measured; what no time is left for is listed as not run."""
    for job in jobs:
        left = budget.left_s(job.part)
        if left < job.least_s:
            why = f"time: {max(0.0, left):.0f} s are left, this needs {job.least_s:.0f} s or more"
            yield job.row("not run", why)
            continue
        begin = monotonic()
        yield from run_job(job, min(job.limit_s, left), cut=left < job.limit_s)
        budget.charge(job.part, monotonic() - begin)


def child_command(job: Job) -> list[str]:
    request = {"kind": job.kind, "settings": job.settings}
    return [sys.executable, "-m", "benchmarks.gpu_check.child", json.dumps(request)]


def run_job(
    job: Job, limit_s: float, *, cut: bool = False, command: Sequence[str] | None = None
) -> Iterator[Row]:
    """Runs a job to its end, or to its time limit; its rows as they come.

    Args:
        cut: the limit is what the run has left, rather than the job's own.
        command: in place of our own child, for tests.
    """
    begin, count = monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        with out.open("wb") as stdout, err.open("wb") as stderr, out.open("rb") as lines:
            process = subprocess.Popen(
                command or child_command(job),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": _python_path(), **job.environment},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,  # so that its own children end with it
            )
            try:
                for row in _rows_until_the_end(job, process, lines, begin + limit_s):
                    count += 1
                    yield {**row, "job_s": round(monotonic() - begin, 1)}
                code = process.poll()
            finally:
                _end(process)
        said = _text(err)
    if code == 0 and count:
        return
    tail = {"job_s": round(monotonic() - begin, 1), "stderr": said[-_TAIL_CHARS:]}
    if code is None:
        why = f"did not end within {limit_s:.0f} s" + (", all that was left" if cut else "")
        yield {**job.row("timed out", why), **tail}
    else:
        yield {**job.row("failed", _how_it_ended(code, said)), **tail}


def _rows_until_the_end(
    job: Job, process: subprocess.Popen[bytes], lines: BinaryIO, deadline: float
) -> Iterator[Row]:
    """Rows of a process until it has ended or its time is over, and all that it left."""
    kept = b""
    while True:
        is_over = process.poll() is not None or monotonic() > deadline
        *whole, kept = (kept + lines.read()).split(b"\n")
        for line in whole:
            if line.startswith(MARK.encode()):
                yield _row_of(job, line.decode(errors="replace"))
        if is_over:
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.01, min(_LOOK_S, deadline - monotonic())))


def _python_path() -> str:
    before = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(ROOT), *([before] if before else [])])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a job: the process and those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _row_of(job: Job, line: str) -> Row:
    measured = json.loads(line.removeprefix(MARK))
    settings = {**job.settings, **measured.pop("settings")}
    return {"part": job.part, "job": job.name, **measured, "settings": settings}


def _how_it_ended(code: int, said: str) -> str:
    if code == 0:
        return "ended without a row"
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", perhaps for memory" if name == "SIGKILL" else ""
        return f"crashed: {name}{hint}"
    return f"ended with code {code}: {last_line(said) or 'it said nothing'}"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
