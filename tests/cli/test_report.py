"""`report`: from run files to a page and figures; mistakes are said before anything is drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.report.schema import to_json
from tests.cli.support import TINY, call, refused, report_of
from tests.report import profiles


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return save(tmp_path / "run.json", profiles.profile((4096,)))


def save(path: Path, report: Any) -> Path:
    path.write_text(to_json(report), encoding="utf-8")
    return path


def test_a_page_is_written(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = call("report", run, "--html", page)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert f"{page}: " in result.stderr
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert f"hybrid-kv profile --repeat {run}" in text


def test_a_summary_of_an_evaluation_is_drawn_alone(run: Path, tmp_path: Path) -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    (kept, *_) = sorted(results.rglob("eval-smollm2-passkey.json"))
    page = tmp_path / "page.html"
    report = report_of(call("report", kept, "--html", page, "--json", "-"))
    assert (report.runs, report.ratios) == ((str(kept),), ())
    assert "methods compared" in page.read_text(encoding="utf-8")
    for more in ([run], ["--svg", tmp_path]):
        assert "is drawn alone" in refused("report", kept, *more, "--html", page)


def test_what_generate_wrote_can_be_drawn(tmp_path: Path) -> None:
    run, page = tmp_path / "run.json", tmp_path / "page.html"
    assert call("generate", *TINY, "--set", "audit_every=1", "--json", run).exit_code == 0
    assert call("report", run, "--html", page).exit_code == 0
    assert "random:tiny" in page.read_text(encoding="utf-8")


def test_figures_are_written(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "figures"
    result = call("report", run, "--svg", folder)
    assert result.exit_code == 0, result.output
    count = len(list(folder.glob("*.svg")))
    assert count > 8
    assert f"{folder}: {count} figures" in result.stderr


def test_figures_are_written_as_png(run: Path, tmp_path: Path) -> None:
    bare = profiles.profile(rows=(profiles.row("flat", 37, audit=None),))
    result = call("report", save(run, bare), "--png", tmp_path, "--quiet")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert {path.name for path in tmp_path.glob("*.png")} >= {"tpot.png", "phases-37.png"}


def test_json_has_the_ratios_and_the_files(run: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other.json", profiles.profile((4096,), slower=2.0))
    page = tmp_path / "page.html"
    report = report_of(call("report", run, other, "--html", page, "--json", "-"))
    assert report.command == "report"
    assert report.runs == (str(run), str(other))
    assert report.written == (str(page),)
    assert len(report.ratios) == 5  # of 7, one failed and one was skipped
    assert [one.tpot_ratio for one in report.ratios] == pytest.approx([2.0] * 5)


def test_the_page_is_the_same_each_time(run: Path, tmp_path: Path) -> None:
    pages = [tmp_path / "a.html", tmp_path / "b.html"]
    for page in pages:
        call("report", run, "--html", page)
    assert pages[0].read_bytes() == pages[1].read_bytes()


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if anything is drawn."""

    def draw(*_: object) -> str:
        raise AssertionError("drawn before the mistake was found")

    monkeypatch.setattr("hybrid_kv.report.html.page.render", draw)
    monkeypatch.setattr("hybrid_kv.report.html.page.export", draw)


@pytest.mark.usefixtures("untouched")
class TestMistakes:
    def test_nothing_to_write(self, run: Path) -> None:
        assert "none of --html FILE, --svg FOLDER and --png FOLDER" in refused("report", run)

    def test_no_run(self) -> None:
        assert "is missing" in refused("report", "--html", "x.html")

    def test_a_run_that_is_not_there(self, tmp_path: Path) -> None:
        words = ("report", tmp_path / "absent.json", "--html", tmp_path / "x.html")
        assert "cannot be read" in refused(*words)

    def test_a_damaged_run(self, run: Path, tmp_path: Path) -> None:
        data = json.loads(run.read_text(encoding="utf-8"))
        del data["rows"][2]["method"]
        run.write_text(json.dumps(data), encoding="utf-8")
        sentence = refused("report", run, "--html", tmp_path / "x.html")
        assert "is damaged: rows.2.method" in sentence

    def test_an_older_run(self, run: Path, tmp_path: Path) -> None:
        run.write_text('{"schema": 0}', encoding="utf-8")
        assert "schema 1, got 0" in refused("report", run, "--html", tmp_path / "x.html")

    def test_a_document_without_runs(self, tmp_path: Path) -> None:
        path = tmp_path / "methods.json"
        assert call("methods", "--json", path).exit_code == 0
        sentence = refused("report", path, "--html", tmp_path / "x.html")
        assert "of methods, which has nothing to draw" in sentence

    def test_a_run_given_twice(self, run: Path, tmp_path: Path) -> None:
        again = f"{run.parent}/../{run.parent.name}/{run.name}"
        assert "twice" in refused("report", run, again, "--html", tmp_path / "x.html")

    @pytest.mark.parametrize("name", ["", "absent/x.html"])
    def test_a_page_that_cannot_be_written(self, run: Path, tmp_path: Path, name: str) -> None:
        assert "--html must name a file" in refused("report", run, "--html", tmp_path / name)

    def test_a_page_in_place_of_a_run(self, run: Path) -> None:
        before = run.read_bytes()
        assert "must not overwrite" in refused("report", run, "--html", run)
        assert run.read_bytes() == before

    @pytest.mark.parametrize("option", ["--svg", "--png"])
    @pytest.mark.parametrize("name", ["run.json", "absent/deep"])
    def test_a_folder_that_cannot_be_made(
        self, run: Path, tmp_path: Path, option: str, name: str
    ) -> None:
        assert f"{option} must name a folder" in refused("report", run, option, tmp_path / name)


def test_profiles_that_share_nothing_leave_no_page(run: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other.json", profiles.profile((8192,)))
    page = tmp_path / "page.html"
    assert "nothing in common" in refused("report", run, other, "--html", page)
    assert not page.exists()
