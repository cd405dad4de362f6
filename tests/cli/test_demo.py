"""`hybrid-kv demo`, with a random model in the place of the shipped one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_kv.cli import comparison
from hybrid_kv.models import load
from hybrid_kv.report.schema import DemoReport, parse_report
from tests.cli.support import call

WORDS = ("demo", "--context", 700, "--records", 8)


@pytest.fixture
def _untrained(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "NEEDLE_PATH", model)


@pytest.mark.usefixtures("_untrained")
def test_wrong_answers_are_a_failure() -> None:
    result = call(*WORDS, "--set", "top_k=9")
    assert result.exit_code == 1, result.output
    for text in ("question", "expected", "full attention", "hybrid", "KV on host", "KV on device"):
        assert text in result.stdout


@pytest.mark.usefixtures("_untrained")
def test_right_and_equal_answers_are_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "is_correct", lambda *_: True)
    result = call(*WORDS, "--set", "top_k=all", "--dtype", "float32", "--json", "-")
    assert result.exit_code == 0, result.output
    report = parse_report(result.stdout)
    assert isinstance(report, DemoReport)
    assert report.agree
    assert report.attended_ratio == 1.0
    assert [run.method for run in report.runs] == ["full", "hybrid"]
    assert report.runs[0].memory_bytes.host_kv == 0 < (report.runs[1].memory_bytes.host_kv or 0)


@pytest.mark.usefixtures("_untrained")
def test_answers_that_differ_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "is_correct", lambda *_: True)
    monkeypatch.setattr(comparison.Comparison, "agree", False)
    result = call(*WORDS)
    assert result.exit_code == 1
    assert "The answers differ" in result.stdout


def test_missing_model_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "NEEDLE_PATH", tmp_path / "absent")
    result = call(*WORDS)
    assert result.exit_code == 2
    assert "does not exist" in result.stderr
