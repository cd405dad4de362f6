"""A folder of results: continued after a kill, locked while in use, refused where it is foreign."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.contest.folder import ResultsFolder, key_of
from hybrid_kv.errors import ConfigError
from hybrid_kv.report.evaluation import Cell, Counters
from tests import forked

SETTINGS = {"model": "needle", "seed": 0, "settings": {"page_size": 16}}


def cell(method: str = "quest", sample: int = 0, task: str = "key_value:records=3") -> Cell:
    return Cell(
        task=task,
        context_tokens=701,
        sample=sample,
        asking="after",
        method=method,
        budget="5%",
        config={"method": method},
        scores=(1.0, 0.5),
        depths=(0.25, None),
        answers=("3f", ""),
        counters=Counters(attended_tokens=37.5),
    )


def filled(path: Path) -> Path:
    with ResultsFolder(path, SETTINGS) as folder:
        for method in ("full", "quest"):
            for sample in (0, 1):
                folder.add(cell(method, sample))
    return path


def test_cells_come_back_as_they_were(tmp_path: Path) -> None:
    path = filled(tmp_path / "results")
    with ResultsFolder(path, SETTINGS) as folder:
        assert len(folder.cells) == 4
        assert folder.cells[key_of(cell("quest", 1))] == cell("quest", 1)


def test_a_run_that_is_refused_leaves_no_folder_that_refuses_the_next(tmp_path: Path) -> None:
    """Regression: its manifest stayed, and the corrected run was of other settings."""
    path, other = tmp_path / "results", {**SETTINGS, "model": "nedle"}
    with pytest.raises(ConfigError, match="no such model"), ResultsFolder(path, other):
        raise ConfigError("no such model")
    assert not path.exists()
    path.mkdir()
    with pytest.raises(ConfigError, match="no such model"), ResultsFolder(path, other):
        raise ConfigError("no such model")
    assert path.is_dir()
    filled(path)
    with pytest.raises(ConfigError, match="again"), ResultsFolder(path, SETTINGS):
        raise ConfigError("again")
    with ResultsFolder(path, SETTINGS) as folder:
        assert len(folder.cells) == 4, "results stay"


def test_a_run_that_breaks_off_keeps_its_first_cell(tmp_path: Path) -> None:
    def broken_off() -> None:
        with ResultsFolder(tmp_path / "results", SETTINGS) as folder:
            folder.add(cell())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    with ResultsFolder(tmp_path / "results", SETTINGS) as folder:
        assert len(folder.cells) == 1


def test_a_cell_that_is_measured_again_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = filled(tmp_path / "results")
    again = cell().model_copy(update={"error": "it broke"})
    with ResultsFolder(path, SETTINGS) as folder:
        folder.add(again)
    with ResultsFolder(path, SETTINGS) as folder:
        assert (len(folder.cells), folder.cells[key_of(again)].error) == (4, "it broke")


def test_tasks_whose_names_look_alike_have_files_of_their_own(tmp_path: Path) -> None:
    with ResultsFolder(tmp_path / "results", SETTINGS) as folder:
        folder.add(cell(task="a:b=1"))
        folder.add(cell(task="a=b:1"))
        assert len(list((folder.path / "cells").iterdir())) == 2


def test_a_killed_run_leaves_whole_cells_and_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "results"
    run = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.contest.test_folder import SETTINGS, cell, ResultsFolder\n"
        "folder = ResultsFolder(Path(sys.argv[1]), SETTINGS)\n"
        "folder.add(cell('full'))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = forked.run("-c", run, path, cwd=forked.ROOT)
    assert ended.returncode == -9
    with ResultsFolder(path, SETTINGS) as folder:
        assert [one.method for one in folder.cells.values()] == ["full"]


def test_a_second_run_is_kept_out(tmp_path: Path) -> None:
    path = filled(tmp_path / "results")
    with ResultsFolder(path, SETTINGS), pytest.raises(ConfigError) as refusal:
        ResultsFolder(path, SETTINGS)
    assert f"is in use by another run (process {os.getpid()}); wait until" in str(refusal.value)
    ResultsFolder(path, SETTINGS).close()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = filled(tmp_path / "results")
    victim = sorted((path / "cells").iterdir())[0]
    victim.write_text(victim.read_text()[:-20])
    for _ in range(2):  # nor is the lock left behind
        with pytest.raises(ConfigError, match=f"is damaged: cells/{victim.name}: .*delete that"):
            ResultsFolder(path, SETTINGS)


def test_results_of_another_version_are_refused(tmp_path: Path) -> None:
    path = filled(tmp_path / "results")
    manifest = json.loads((path / "manifest.json").read_text())
    for change in ({"version": 7}, {"package": "0.0.1"}):
        (path / "manifest.json").write_text(json.dumps({**manifest, **change}))
        with pytest.raises(ConfigError, match=r"must be of hybrid-kv .*, got .*another folder"):
            ResultsFolder(path, SETTINGS)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 1}, "differs in seed (there 0, now 1); give the same again"),
        ({"settings": {"page_size": 4}}, "settings.page_size (there 16, now 4)"),
    ],
)
def test_results_of_other_settings_are_refused(
    tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    path = filled(tmp_path / "results")
    with pytest.raises(ConfigError) as refusal:
        ResultsFolder(path, {**SETTINGS, **change})
    assert text in str(refusal.value)


def test_a_folder_of_other_things_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(ConfigError, match=r"got one with thesis.tex and no manifest.json"):
        ResultsFolder(tmp_path, SETTINGS)
    assert (tmp_path / "thesis.tex").read_text() == "years"


@pytest.mark.parametrize("place", ["no/such/folder", "file"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="must be one that can be written, or a new one"):
        ResultsFolder(tmp_path / place, SETTINGS)
