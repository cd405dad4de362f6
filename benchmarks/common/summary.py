"""Summaries of what was measured: the form in which results are printed and kept.

    python benchmarks/common/summary.py REPORT.json > SUMMARY.json   # of `profile` or `eval`
    hybrid-kv report SUMMARY.json --html PAGE.html                   # the page of a summary

A summary has a line for each row, floats of four digits, a machine in two lines, and of a long
list of repeats the median, both ends and their number. That of a report leaves out settings, single
heads and what each layer was served by.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # a script: the project's root is not on the path
    sys.path.insert(0, str(Path(__file__).parents[2]))

from hybrid_kv.report.files import compact, expand

REPEATS = 8
"""Lists of more floats than this hold repeats of one measurement."""
_LEFT_OUT = frozenset(("config", "index", "steps", "depths", "heads", "device_phases_ms"))
"""Of the rows of a report."""


def summary(document: Mapping[str, Any]) -> str:
    """The summary of a benchmark's document, or of a report of ours, as text."""
    if "schema" in document and document.get("command") in ("eval", "profile"):
        rows = [_kept(row) for row in document["rows"]]
        return compact({**document, "rows": rows})
    return compact(_short({**document}))


def read(path: Path) -> Any:
    """The document in a summary, its rows as lists again."""
    return expand(json.loads(path.read_text(encoding="utf-8")))


def _kept(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a summary has of a report's row, nothing that was not measured."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        inner = _kept(value) if isinstance(value, Mapping) else value
        if name == "budget" or not (name in _LEFT_OUT or inner is None or inner == {}):
            found[name] = inner
    return found


def _short(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            str(name): machine(one) if name == "environment" else _short(one)
            for name, one in value.items()
        }
    if not isinstance(value, list | tuple):
        return value if isinstance(value, int | float | str | None) else str(value)
    if len(value) > REPEATS and all(isinstance(one, float) for one in value):
        return {"median": median(value), "low": min(value), "high": max(value), "of": len(value)}
    return [_short(one) for one in value]


def machine(environment: Mapping[str, Any]) -> dict[str, Any]:
    """An environment in few words: processor, memory, versions, and whatever else it tells."""
    cpu, versions = environment.get("cpu"), environment.get("versions")
    if not isinstance(cpu, Mapping) or not isinstance(versions, Mapping):
        return dict(environment)
    known = {"cpu", "versions", "ram_bytes", "platform", "device"}
    return {
        "cpu": f"{cpu['model']}, {cpu['cores']} cores, {' '.join(cpu['features'])}",
        "ram_gb": round(environment["ram_bytes"] / 1e9, 1),
        "versions": ", ".join(f"{name} {one}" for name, one in versions.items() if one),
        **{name: one for name, one in environment.items() if name not in known and one},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    print(summary(read(parser.parse_args().report)), end="")


if __name__ == "__main__":
    main()
