"""A profile's file: there after every row, continued by --resume, and no reason to lose a table."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.cli import profile_tables
from hybrid_kv.eval.profiling import bench
from hybrid_kv.planning.rates import Rates
from hybrid_kv.report import read_report
from hybrid_kv.report.schema import ProfileReport, to_json
from tests.cli.support import call, refused

QUICK = (
    *("profile", "random:tiny", "--device", "cpu", "--layers", "1"),
    *("--new-tokens", "3", "--warmup", "1", "--audit-every", "0"),
)
TWO = (*QUICK, "--context", "37,170", "--methods", "full,flat")


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The rows that are really measured, in order."""
    monkeypatch.setattr(bench, "measure_rates", lambda _: Rates(50, 50, 20))
    run, seen = bench.RowMeasurement.run, []

    def counted(self: Any) -> None:
        seen.append((self.row.method, self.row.context_tokens))
        run(self)

    monkeypatch.setattr(bench.RowMeasurement, "run", counted)
    return seen


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a whole profile has written."""
    file = tmp_path_factory.mktemp("profile") / "run.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "measure_rates", lambda _: Rates(50, 50, 20))
        assert call(*TWO, "--json", file).exit_code == 0
    return file.read_text()


@pytest.fixture
def file(tmp_path: Path, finished: str) -> Path:
    path = tmp_path / "run.json"
    path.write_text(finished)
    return path


def read(file: Path) -> ProfileReport:
    report = read_report(file)
    assert isinstance(report, ProfileReport)
    return report


def rewrite(file: Path, **changes: Any) -> None:
    file.write_text(to_json(read(file).model_copy(update=changes)))


def test_the_file_has_each_row_as_soon_as_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen = tmp_path / "run.json", []
    add = profile_tables.Record.add

    def looking(self: Any, row: Any) -> None:
        add(self, row)
        seen.append((len(read(file).rows), read(file).interrupted))

    monkeypatch.setattr(profile_tables.Record, "add", looking)
    assert call(*TWO, "--json", file, "--resume").exit_code == 0  # there is nothing yet
    assert seen == [(1, True), (2, True), (3, True), (4, True)]
    assert not read(file).interrupted


def test_a_sweep_goes_on_where_it_ended(file: Path, measured: list[tuple[str, int]]) -> None:
    whole = read(file)
    rates = whole.bandwidth_gbps.model_copy(update={"dram": 7.0})
    rewrite(file, rows=whole.rows[1:3], interrupted=True, bandwidth_gbps=rates)
    measured.clear()
    result = call(*TWO, "--json", file, "--resume")
    assert result.exit_code == 0, result.output
    assert measured == [("full", 37), ("flat", 170)]
    again = read(file)
    assert [(r.method, r.context_tokens) for r in again.rows] == [
        (r.method, r.context_tokens) for r in whole.rows
    ]
    assert again.rows[1:3] == whole.rows[1:3]
    assert again.rows[0] != whole.rows[0]
    assert not again.interrupted
    assert again.bandwidth_gbps == rates  # one machine, measured once


def test_what_is_complete_is_shown_again_and_nothing_is_loaded(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = file.read_text()
    monkeypatch.setattr(bench, "load_model", lambda *a, **k: pytest.fail("loaded"))
    result = call(*TWO, "--json", file, "--resume")
    assert result.exit_code == 0, result.output
    assert "ms per token (TPOT) by context" in result.stdout
    assert file.read_text() == text


def test_failed_and_interrupted_rows_are_measured_again(
    file: Path, measured: list[tuple[str, int]]
) -> None:
    states = ("ok", "failed", "skipped", "interrupted")
    rows = zip(read(file).rows, states, strict=True)
    rewrite(file, rows=tuple(row.model_copy(update={"status": state}) for row, state in rows))
    measured.clear()
    assert call(*TWO, "--json", file, "--resume").exit_code == 0
    assert measured == [("flat", 37), ("full", 170), ("flat", 170)]
    assert {row.status for row in read(file).rows} == {"ok"}


def test_further_methods_and_contexts_may_be_asked_for(
    tmp_path: Path, measured: list[tuple[str, int]]
) -> None:
    file = tmp_path / "run.json"
    assert call(*QUICK, "--context", 37, "--methods", "flat", "--json", file).exit_code == 0
    measured.clear()
    assert call(*TWO, "--json", file, "--resume").exit_code == 0
    assert measured == [("full", 37), ("full", 170), ("flat", 170)]
    assert read(file).arguments["contexts"] == [37, 170]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--new-tokens", "5"), "new_tokens (there 3, now 5)"),
        (("--seed", "1"), "seed (there 0, now 1)"),
        (("--set", "top_k=5"), "settings.top_k (there None, now 5)"),
        (("--context", "37"), "a row of full at 170, which is not asked for"),
    ],
)
def test_a_report_of_other_settings_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, str], text: str
) -> None:
    before = file.read_text()
    monkeypatch.setattr(bench, "load_model", lambda *a, **k: pytest.fail("loaded"))
    assert text in refused(*TWO, *words, "--json", file, "--resume")
    assert file.read_text() == before


def test_a_report_of_another_machine_or_version_is_refused(file: Path) -> None:
    report = read(file)
    versions = {**report.environment.versions, "torch": "1.0"}
    environment = report.environment.model_copy(update={"versions": versions})
    rewrite(file, environment=environment, threads={**report.threads, "torch": 97})
    error = refused(*TWO, "--json", file, "--resume")
    assert "versions.torch (there 1.0, now " in error
    assert "threads of torch (there 97, now " in error


def test_a_default_that_has_changed_since_is_refused(file: Path) -> None:
    rows = [
        row.model_copy(update={"config": {**row.config, "page_size": 37}})
        for row in read(file).rows
    ]
    rewrite(file, rows=tuple(rows))
    assert "full's page_size (there 37, now 16)" in refused(*TWO, "--json", file, "--resume")


def test_resume_needs_a_file() -> None:
    assert "--resume needs --json FILE" in refused(*TWO, "--resume")
    assert "got -" in refused(*TWO, "--resume", "--json", "-")


def test_spans_of_earlier_rows_are_not_invented(tmp_path: Path, file: Path) -> None:
    trace = tmp_path / "trace.json"
    assert "--trace needs spans" in refused(*TWO, "--json", file, "--resume", "--trace", trace)
    assert "--trace must name a file" in refused(*TWO, "--trace", "-")


def test_tables_are_printed_whatever_becomes_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes of measuring were lost because a file could not be written."""
    replace = os.replace

    def full(source: Any, target: Any) -> None:
        if str(target).endswith("run.json"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    file, trace = tmp_path / "run.json", tmp_path / "trace.json"
    file.write_text("old")
    result = call(*TWO, "--json", file, "--trace", trace)
    assert result.exit_code == 1
    assert "ms per token (TPOT) by context" in result.stdout
    first, last = result.stderr.strip().splitlines()
    assert first.endswith("measuring goes on")
    assert last.startswith(f"error: report '{file}' cannot be written: No space left on device;")
    assert file.read_text() == "old"
    assert json.loads(trace.read_text())["traceEvents"]


def test_ctrl_c_between_two_rows_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.gc, "collect", interrupt)
    file = tmp_path / "run.json"
    result = call(*TWO, "--json", file)
    assert result.exit_code == 130
    assert "ms per token (TPOT) by context" in result.stdout
    assert [row.status for row in read(file).rows] == ["ok"]
    assert read(file).interrupted


def test_a_stream_gets_one_document() -> None:
    result = call(*TWO, "--json", "-")
    assert json.loads(result.stdout)["command"] == "profile"
