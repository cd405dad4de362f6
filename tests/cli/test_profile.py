"""`hybrid-kv profile`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer.testing

from hybrid_kv.cli import profile_tables
from hybrid_kv.cli.profile_tables import agree, quartiles, short_count
from hybrid_kv.eval.profiling import bench
from hybrid_kv.planning.rates import Rates
from hybrid_kv.report import read_report
from hybrid_kv.report.schema import ProfileReport
from tests.cli.support import MAX_CONTEXT, call, refused, report_of

TINY = ("profile", "random:tiny", "--device", "cpu", "--dtype", "float32")
QUICK = (*TINY, "--context", "170,700", "--new-tokens", "4", "--warmup", "1")
ALL = "full,flat,ivf,hnsw,quest,graph,hybrid"


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure_rates", lambda _: Rates(50, 50, 20))


def profiled(*words: object) -> ProfileReport:
    report = report_of(call(*words, "--json", "-"))
    assert isinstance(report, ProfileReport)
    return report


def failing(monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException) -> None:
    fill = bench.RowMeasurement._fill

    def broken(self: Any, runtime: Any) -> Any:
        if self.row.method == method:
            raise error
        return fill(self, runtime)

    monkeypatch.setattr(bench.RowMeasurement, "_fill", broken)


@pytest.mark.parametrize("fill", ["prefill", "synthetic"])
def test_every_method_has_a_row_at_every_context(fill: str) -> None:
    report = profiled(*QUICK, "--methods", ALL, "--fill", fill, "--layers", 2)
    names = ALL.replace("graph", "retrieval_attention").split(",")
    assert [(r.context_tokens, r.method) for r in report.rows] == [
        (tokens, name) for tokens in (170, 700) for name in names
    ]
    assert {row.status for row in report.rows} == {"ok"}
    assert report.fill == fill
    for row in report.rows:
        assert len(row.step_ms) == 4
        assert row.tpot_ms == pytest.approx(sum(row.step_ms) / 4)
        assert row.itl_ms is not None
        assert row.itl_ms.p50 <= row.itl_ms.p90 <= row.itl_ms.p99 <= max(row.step_ms)
        phases = [ms for ms in row.phases_ms.model_dump().values() if ms is not None]
        assert sum(phases) == pytest.approx(row.tpot_ms)
        assert abs(row.phases_ms.other or 0) <= 0.03 * row.tpot_ms
        assert row.config["method"] == row.method
        assert row.recorder_ratio is not None
        assert row.limit_ms is not None
        assert row.bytes_per_token.weights
        assert row.audit is not None
        assert row.resident_kv_bytes


def test_a_model_cut_down_says_so_everywhere(tmp_path: Path) -> None:
    file, trace = tmp_path / "run.json", tmp_path / "trace.json"
    words = (*TINY, "--context", 100, "--methods", "full,quest", "--new-tokens", 3, "--layers", 1)
    result = call(*words, "--json", file, "--trace", trace)
    assert result.exit_code == 0, result.output
    report = read_report(file)
    assert isinstance(report, ProfileReport)
    assert (report.layers, report.shape_layers) == (1, 2)
    assert "random:tiny, 1 of 2 layers" in result.stdout
    assert "quest at 100: ok: measured with dense_layers=0" in result.stdout
    assert json.loads(trace.read_text())["otherData"]["model"] == "random:tiny, 1 of 2 layers"
    assert profiled(*words[:-2]).shape_layers is None


def test_people_see_latency_breakdown_memory_and_quality() -> None:
    result = call(*QUICK, "--methods", "full,flat", "--context", "1k", "--fill", "synthetic")
    assert result.exit_code == 0
    for part in (
        "ms per token (TPOT) by context",
        "ms per token at 1K, by phase",
        "fill, memory, traffic and quality at 1K",
        "cold attn",
        "Python",
        "plan says",
        "recorder",
        "missed mass",
        "mass error",
        "made-up KV put in place, no prefill",
    ):
        assert part in result.stdout, part
    assert "\x1b" not in result.output
    assert result.stderr == ""


def test_json_alone_is_on_stdout_when_asked_for() -> None:
    result = call(*TINY, "--context", "50", "--methods", "full", "--new-tokens", 2, "--json", "-")
    assert json.loads(result.stdout)["command"] == "profile"


def test_a_method_that_fails_is_exit_code_1_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failing(monkeypatch, "flat", RuntimeError("the scan broke"))
    file = tmp_path / "run.json"
    result = call(*QUICK, "--methods", "full,flat,quest", "--json", file)
    assert result.exit_code == 1
    assert "flat at 700: failed: RuntimeError: the scan broke" in result.stdout
    report = read_report(file)
    assert isinstance(report, ProfileReport)
    assert [row.status for row in report.rows] == ["ok", "failed", "ok"] * 2
    assert report.rows[1].tpot_ms is None
    assert not report.interrupted


def test_ctrl_c_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing(monkeypatch, "flat", KeyboardInterrupt())
    file, trace = tmp_path / "run.json", tmp_path / "trace.json"
    words = (*QUICK, "--methods", "full,flat,quest", "--json", file, "--trace", trace)
    result = call(*words)
    assert result.exit_code == 130
    report = read_report(file)
    assert isinstance(report, ProfileReport)
    assert [row.status for row in report.rows] == ["ok", "interrupted"]
    assert report.interrupted
    assert "flat at 170: interrupted: ended by the user" in result.stdout
    assert json.loads(trace.read_text())["traceEvents"]


def test_what_was_measured_is_written_before_anybody_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def gone(_: object) -> None:
        raise OSError("nobody reads the tables any more")

    monkeypatch.setattr(profile_tables, "print_profile", gone)
    file, trace = tmp_path / "run.json", tmp_path / "trace.json"
    words = (*TINY, "--context", "170", "--new-tokens", "2", "--methods", "full")
    assert call(*words, "--json", file, "--trace", trace).exit_code == 1
    run = read_report(file)
    assert isinstance(run, ProfileReport)
    assert run.rows[0].status == "ok"
    assert json.loads(trace.read_text())


def test_a_profile_can_be_repeated(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    words = ("--methods", "full,flat", "--set", "window_tokens=64", "--fill", "synthetic")
    assert call(*QUICK, *words, "--seed", 3, "--json", file).exit_code == 0
    result = call("profile", "--repeat", file)
    assert result.exit_code == 0, result.output
    assert "repeated; ms per step, median (quartiles)" in result.stdout
    first, again = read_report(file), profiled("profile", "--repeat", file)
    assert isinstance(first, ProfileReport)
    assert again.arguments == first.arguments
    assert again.arguments["settings"] == {"window_tokens": "64"}
    assert [row.config for row in again.rows] == [row.config for row in first.rows]
    work = [[row.work.attended_tokens for row in run.rows] for run in (first, again)]
    assert work[0] == work[1]


def test_runs_agree_where_their_quartiles_overlap() -> None:
    assert quartiles([3.0]) == (3.0, 3.0)
    assert quartiles([1, 2, 3, 4, 5]) == (2, 4)
    assert agree([1, 2, 3, 4, 5], [4, 4, 4])
    assert agree([4, 4, 4], [1, 2, 3, 4, 5])
    assert not agree([1, 2, 3, 4, 5], [4.5, 5, 6])


def test_what_two_runs_agree_on_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new = profiled(*TINY, "--context", "60", "--methods", "full,flat", "--new-tokens", 4)
    slow = new.rows[0].model_copy(update={"step_ms": tuple(9 * ms for ms in new.rows[0].step_ms)})
    old = new.model_copy(update={"rows": (slow, new.rows[1])})
    profile_tables.print_repetition(old, new)
    lines = [line for line in capsys.readouterr().out.splitlines() if " 60 " in f" {line}"]
    assert lines[0].endswith("no")
    assert lines[1].rstrip().endswith("yes")
    assert "1.00" in lines[1]


@pytest.mark.parametrize("text", ["{", '{"schema": 1}', '{"schema": 7, "command": "profile"}'])
def test_a_damaged_or_older_run_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    assert f"report '{file}'" in refused("profile", "--repeat", file)


def test_a_run_with_damaged_arguments_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    call(*TINY, "--context", "50", "--methods", "full", "--new-tokens", 2, "--json", file)
    data = json.loads(file.read_text())
    data["arguments"]["new_tokens"] = "many"
    file.write_text(json.dumps(data))
    assert f"arguments of report '{file}': new_tokens" in refused("profile", "--repeat", file)


def test_a_run_of_another_verb_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    call("doctor", "--json", file)
    assert "must be one of profile, got one of doctor" in refused("profile", "--repeat", file)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--methods", "grpah"), "unknown method 'grpah'; did you mean 'graph'?"),
        (("--methods", ","), "methods must name at least one"),
        (("--context", "4k,none"), "a count must be a whole number of at least 1"),
        (("--context", "4m"), "contexts must be at most"),
        (("--fill", "magic"), "fill"),
        (("--set", "top_q=3"), "unknown hybrid setting 'top_q'"),
        (("--json", "no/such/folder.json"), "--json must name a file in an existing folder"),
        (("--trace", "no/such/folder.json"), "--trace must name a file in an existing folder"),
        (("--layers", "7"), "layers must be 1..2 for tiny, got 7"),
        (("--repeat", "run.json"), "--repeat takes everything from its file, got MODEL as well"),
    ],
)
def test_mistakes_are_one_sentence_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.setattr(bench, "load_model", lambda *a, **k: pytest.fail("loaded"))
    assert sentence in refused("profile", "random:tiny", *words)


def test_repeat_names_the_option_that_is_too_much() -> None:
    sentence = refused("profile", "--repeat", "run.json", "--new-tokens", "3")
    assert "got --new-tokens as well" in sentence


def test_a_model_is_needed() -> None:
    assert "MODEL is missing" in refused("profile")


def test_a_context_beyond_the_model_is_refused(model: Path) -> None:
    sentence = refused("profile", model, "--context", MAX_CONTEXT, "--methods", "full")
    assert f"contexts must be at most {MAX_CONTEXT - 77} tokens for this model" in sentence


def test_a_context_beyond_memory_is_refused_with_the_arithmetic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = type("Memory", (), {"available": 10**9, "total": 10**10})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    monkeypatch.setattr(bench, "load_model", lambda *a, **k: pytest.fail("loaded"))
    words = ("random:llama-3-8b", "--layers", 2, "--context", "32k,1m", "--fill", "synthetic")
    sentence = refused("profile", *words)
    assert "context of 32,768 tokens" in sentence
    assert "weights" in sentence
    assert "GiB are free" in sentence


def test_progress_is_drawn_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = typer.testing._NamedTextIOWrapper
    words = (*TINY, "--context", "100", "--methods", "full", "--new-tokens", 3)
    assert call(*words).stderr == ""
    monkeypatch.setattr(stream, "isatty", lambda self: self.name == "<stderr>", raising=False)
    assert "full at 100: prefill" in call(*words).stderr
    assert call(*words, "--quiet").stderr == ""


def test_counts_are_short() -> None:
    assert [short_count(n) for n in (131072, 700, 1024)] == ["128K", "700", "1K"]
