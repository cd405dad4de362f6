"""The compact form: what it keeps, what it is read as, and the summaries that are kept in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.summary import read, summary
from hybrid_kv.report.files import compact, expand
from hybrid_kv.report.schema import EvalReport, ProfileReport, parse_report, read_report, to_json
from tests.report import profiles

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MOST_BYTES = 300_000
KEPT = sorted(RESULTS.rglob("*.*"))
REPORTS = [path for path in KEPT if path.stem.startswith(("eval", "profile"))]


@pytest.mark.parametrize(
    "document",
    [
        {"a": 1, "rows": [{"b": 2, "c": {"d": [3], "e": None}}, {"b": 2, "f": True}]},
        {"rows": [{"b": 1}, {"b": True}]},
        {"rows": [{"b": "-"}, {"b": 2}]},
        {"rows": [{"b/c": 1}, {"b/c": 2}]},
        {"rows": [{"b": {"c/d": 1}}, {"b": {}}]},
        {"rows": [{"b": {}}, {"b": {"c": 1}}]},
        {"rows": [{"b": [{"c": 1}, {"c": 2}]}, {"b": []}]},
        {"rows": [{}, {"b": 1}], "more": [{"a": 1}], "numbers": [1.5, 2]},
        {"same": 1, "columns": 2},
    ],
)
def test_what_is_written_is_read(document: dict[str, Any]) -> None:
    assert expand(json.loads(compact(document))) == document


def test_rows_take_a_line_each_and_say_once_what_they_share() -> None:
    rows = [{"kind": "flat", "ms": 1.23456}, {"kind": "flat", "ms": 20_000.4}]
    assert compact({"rows": rows}).splitlines() == [
        "{",
        ' "rows":{',
        '  "same":{"kind":"flat"},',
        '  "columns":["ms"],',
        '  "rows":[',
        "  [1.235],",
        "  [20000]]}}",
    ]


def test_a_report_is_read_in_the_compact_form_too() -> None:
    report = profiles.profile((4096,))
    found = parse_report(compact(json.loads(to_json(report))))
    assert isinstance(found, ProfileReport)
    assert [row.method for row in found.rows] == [row.method for row in report.rows]
    assert found.rows[0].tpot_ms == pytest.approx(report.rows[0].tpot_ms, rel=1e-3)


def test_a_summary_of_a_report_has_no_settings_and_no_heads() -> None:
    report = profiles.profile((4096,))
    found = parse_report(summary(json.loads(to_json(report))))
    assert isinstance(found, ProfileReport)
    for row, whole in zip(found.rows, report.rows, strict=True):
        assert row.config == {}
        assert row.audit is None or row.audit.heads == ()
        assert (row.status, row.reason) == (whole.status, whole.reason)
        assert (row.audit is None) == (whole.audit is None)


def test_many_repeats_become_their_median_and_ends() -> None:
    found = summary({"rows": [{"ms": [float(n) for n in range(9)]}, {"ms": [1.0, 2.0]}]})
    first, second = expand(json.loads(found))["rows"]
    assert first["ms"] == {"median": 4, "low": 0, "high": 8, "of": 9}
    assert second["ms"] == [1, 2]


def test_the_results_are_summaries_and_few() -> None:
    assert {path.suffix for path in KEPT} <= {".json", ".csv"}
    assert sum(path.stat().st_size for path in KEPT) <= MOST_BYTES


@pytest.mark.parametrize("path", KEPT, ids=lambda path: "-".join(path.parts[-2:]))
def test_a_summary_is_in_the_compact_form(path: Path) -> None:
    document, text = read(path), path.read_text(encoding="utf-8")
    assert expand(json.loads(compact(document))) == document
    assert len(text) == pytest.approx(len(compact(document)), rel=0.01)


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_a_summary_of_a_report_can_be_drawn(path: Path) -> None:
    report = read_report(path)
    assert isinstance(report, EvalReport | ProfileReport)
    assert report.rows
