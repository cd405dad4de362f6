"""The tests that need a GPU, run by pytest; a row for the whole and one for each that failed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu_check.record import NotHere, Recorder
from benchmarks.gpu_check.sizes import Sizes

_WORKERS = 4
_WHY_CHARS = 300


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    failures: list[tuple[str, str]] = []
    record.measure("tests marked gpu", partial(run, sizes, settings, failures))
    for name, why in failures:
        record.write(name, "failed", why, {}, {})


def run(sizes: Sizes, settings: dict[str, Any], failures: list[tuple[str, str]]) -> dict[str, Any]:
    """Counts of outcomes and reasons of skips.

    Raises:
        NotHere: there is no pytest.
        RuntimeError: pytest ended before it had run anything.
    """
    if find_spec("pytest") is None:
        raise NotHere("pytest is not installed")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
        command += ["--continue-on-collection-errors", f"--junitxml={report}", *sizes.tests]
        if find_spec("xdist") is not None and settings["sizes"] == "full":
            command += ["-n", str(_WORKERS), "--dist", "worksteal"]
        environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
        ended = subprocess.run(command, stdout=sys.stderr, env=environment, check=False)
        if not report.is_file():
            raise RuntimeError(f"pytest ended with code {ended.returncode} and no report")
        return read_report(report, failures)


def read_report(path: Path, failures: list[tuple[str, str]]) -> dict[str, Any]:
    """What pytest's XML says; the tests that failed are added to `failures`."""
    outcomes: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for case in ElementTree.parse(path).iter("testcase"):
        kinds = {child.tag: child for child in case}
        broken = kinds.get("failure", kinds.get("error"))
        if broken is not None:
            outcomes["failed"] += 1
            name = f"{case.get('classname', '')}::{case.get('name', '')}"
            failures.append((name, (broken.get("message") or "no message")[:_WHY_CHARS]))
        elif "skipped" in kinds:
            outcomes["skipped"] += 1
            reasons[kinds["skipped"].get("message") or "no reason"] += 1
        else:
            outcomes["passed"] += 1
    counts = {name: outcomes[name] for name in ("passed", "failed", "skipped")}
    return {**counts, "skip_reasons": dict(reasons)}
