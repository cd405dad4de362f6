"""What stands in a table on a terminal: every number whole, every text as it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from hybrid_kv.api import planning
from hybrid_kv.cli import display, examination
from hybrid_kv.cli.display import Column, human_bytes, human_seconds, print_columns, waiting
from hybrid_kv.cli.method_pages import common_parameters, parameters_of
from hybrid_kv.cli.options import OutputOptions
from hybrid_kv.cli.profile_tables import print_profile, print_repetition, quartiles
from hybrid_kv.planning.rates import Rates
from hybrid_kv.plugins import INDEXES, METHODS
from hybrid_kv.report.profile import BytesPerToken, ProfileRow
from hybrid_kv.report.schema import ProfileReport
from tests.cli.support import call, report_of
from tests.report import profiles

HOSTILE = "./[bold]llama[/bold] :smile: [/] 'x[triton]'"


@pytest.fixture(params=[60, 80, 120])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("LINES", "40")
    return int(request.param)


@pytest.mark.parametrize("columns", [10, 24, 40, 79, 120])
def test_nothing_of_a_table_is_cut_however_narrow_it_is(columns: int) -> None:
    cells = ["random:llama-3-8b, a\nrow of two lines", "x" * 70]
    texts = [("the method", cells), ("milliseconds", ["1234.56 ± 0.78", "-"])]
    table = [Column(title, rows, left=not at) for at, (title, rows) in enumerate(texts)]
    out = Console(file=StringIO(), width=columns)
    print_columns(out, table[:1], table[1:])
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) <= columns
    whole = "".join(title + "".join(rows) for title, rows in texts)
    assert sorted("".join(shown.split())) == sorted("".join(whole.split()))


def cells_of(text: str) -> set[str]:
    return {cell for line in text.splitlines() for cell in re.split(r"\s{2,}", line.strip())}


def wide_profile() -> ProfileReport:
    """All contexts and methods, with long numbers and every column."""
    report = profiles.profile()
    rows = []
    for row in report.rows:
        memory = row.memory_bytes.model_copy(update={"device_peak": 23 << 30})
        read = BytesPerToken(weights=15 << 30, search=1 << 20)
        more = {"memory_bytes": memory, "bytes_per_token": read, "resident_kv_bytes": 1 << 29}
        slow = 1e4 * (row.tpot_ms or 0) if row.method == "full" else row.tpot_ms
        rows.append(row.model_copy(update={**more, "tpot_ms": slow, "fill_s": 1234.5}))
    return report.model_copy(update={"rows": tuple(rows)})


def shown_numbers(row: ProfileRow) -> Iterator[str]:
    assert row.tpot_ms is not None
    assert row.itl_ms is not None
    phases = row.phases_ms.model_dump().values()
    times = (row.tpot_ms, *row.itl_ms.model_dump().values(), row.limit_ms, *phases)
    yield f"{row.tpot_ms:.1f}"
    yield from (f"{ms:.2f}" for ms in times if ms)
    yield f"{sum(row.predicted_ms.values()):.2f}" if row.predicted_ms else "-"
    yield f"{row.recorder_ratio:.2%}"
    for seconds in (row.ttft_s, row.fill_s, row.index_build_s):
        yield human_seconds(seconds or 0)
    memory = row.memory_bytes
    counts = (memory.device_peak, memory.host_kv, memory.host_index, memory.host_peak)
    read = sum(row.bytes_per_token.model_dump(exclude_none=True).values())
    yield from (human_bytes(count or 0) for count in (*counts, row.resident_kv_bytes, read))
    if row.audit is not None and row.audit.missed_mass is not None:
        missed = row.audit.missed_mass
        yield f"{missed.mean:.3f} ± {missed.half_width:.3f}"


def test_no_number_of_a_profile_is_cut(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    """At 80 columns the tables by phase and cost had none of their numbers whole."""
    report = wide_profile()
    print_profile(report)
    text = capsys.readouterr().out
    cells = cells_of(text)
    for row in report.rows:
        if row.status == "ok":
            lacking = set(shown_numbers(row)) - cells
            assert not lacking, (row.method, row.context_tokens, lacking)
    assert "…" not in text
    tables = [line for line in text.splitlines() if line.startswith(profiles.METHODS)]
    assert max(len(line.rstrip()) for line in tables if ": " not in line) <= width


@pytest.mark.usefixtures("width")
def test_no_number_of_a_repetition_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    report = wide_profile()
    print_repetition(report, report)
    text = capsys.readouterr().out
    cells = cells_of(text)
    for row in report.rows:
        if row.itl_ms is not None:
            first, third = quartiles(row.step_ms)
            assert f"{row.itl_ms.p50:.2f} ({first:.2f} to {third:.2f})" in cells
    assert "…" not in text


@pytest.mark.usefixtures("width")
def test_no_number_of_a_plan_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "measure_rates", lambda _: Rates(50, 50, 20))
    words = ("plan", "random:llama-3-8b", "--card", "rtx-4090", "--host-memory", "64GiB")
    report: Any = report_of(call(*words, "--json", "-"))
    text = call(*words).output
    cells = cells_of(text)
    for option in report.options:
        for counts in (option.device_bytes, option.host_bytes):
            kept = {name: count for name, count in counts.items() if count}
            assert {f"{human_bytes(count)} {name}" for name, count in kept.items()} <= cells
        assert {f"{ms:.1f} {name}" for name, ms in option.ms_per_token.items() if ms} <= cells
        assert f"{option.max_context_tokens // 1024:,}k" in cells
    assert "…" not in text


@pytest.mark.usefixtures("width")
def test_no_default_of_a_parameter_is_cut() -> None:
    text = call("methods", "--verbose").output
    lines = " ".join(text.split())
    words = set(text.split())
    for registry in (METHODS, INDEXES):
        for name in registry:
            for parameter in parameters_of(registry[name].params):
                assert parameter.name in words
                assert parameter.shown in lines  # of several words for combinators
    for parameter in common_parameters():
        assert {parameter.name, parameter.shown} <= words
    assert "…" not in text


@pytest.mark.usefixtures("width")
def test_no_figure_of_doctor_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "installed_version", lambda name: None)
    monkeypatch.setattr(examination, "measure_rates", lambda _: Rates(1234.5, 10.25, 5.75))
    text = call("doctor").output
    assert "…" not in text
    words = " ".join(text.split())
    assert "else pip install 'hybrid-kv[triton]'" in words  # markup ate the brackets
    assert "pip install 'hybrid-kv[flashinfer]'" in words
    monkeypatch.setattr(examination, "installed_version", lambda name: "1.2.3")
    report: Any = report_of(call("doctor", "--json", "-"))
    words = " ".join(call("doctor").output.split())
    for check in report.checks:
        if "GB/s" in check.detail:
            assert check.detail in words


def test_a_model_is_called_as_the_user_wrote_it(capsys: pytest.CaptureFixture[str]) -> None:
    report = profiles.profile((4096,)).model_copy(update={"model": HOSTILE})
    row = report.rows[0].model_copy(update={"status": "failed", "reason": HOSTILE})
    print_profile(report.model_copy(update={"rows": (row,)}))
    text = " ".join(capsys.readouterr().out.split())
    assert text.count(HOSTILE) == 2


def test_the_spinner_takes_no_name_for_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "shows_progress", lambda _: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with waiting(f"loading {HOSTILE}", OutputOptions()):
        pass
    assert HOSTILE in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)


def test_columns_that_fit_stay_in_one_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    report = profiles.profile((4096,))
    print_profile(report)  # nobody looks at a terminal: 160 columns
    text = capsys.readouterr().out
    assert len(re.findall(r"^method", text, re.MULTILINE)) == 3
    ends = {
        len(line.rstrip()) for line in text.splitlines() if re.match("(full|flat|quest)  ", line)
    }
    assert len(ends) == 3  # numbers stand at the right, in each of the three tables
