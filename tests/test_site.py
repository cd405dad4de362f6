"""The documents: what is generated, what may be long, which examples run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import matplotlib
import pytest
import typer
from matplotlib import pyplot

from hybrid_kv.cli.main import app
from hybrid_kv.cli.method_pages import common_parameters
from hybrid_kv.plugins import INDEXES, METHODS
from tests.contracts.architectures import build
from tests.contracts.edges.calls import prompt
from tests.test_layering import LEVELS

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))  # scripts of the site, which no package holds

import generated  # noqa: E402
import words  # noqa: E402

PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    generated.write_reference(folder)
    return folder


@pytest.mark.parametrize(("registry", "home"), [(METHODS, "methods"), (INDEXES, "indexes")])
def test_every_plug_in_has_a_page_and_a_line(registry, home: str, reference: Path) -> None:
    listed = (reference / f"{home}.md").read_text()
    for name in registry:
        summary = registry[name].summary.replace("|", "\\|")
        assert f"[`{name}`]({home}/{name}.md) | {summary}" in listed
        assert (reference / home / f"{name}.md").read_text().startswith(f"# {name}\n")


def test_every_verb_and_every_option_is_listed(reference: Path) -> None:
    page = (reference / "cli.md").read_text()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert "profile" in commands
    for name, command in commands.items():
        if hasattr(command, "commands"):
            continue
        own = page.partition(f"## hybrid-kv {name}\n")[2].partition("\n## ")[0]
        options = [one.opts[0] for one in command.params if one.param_type_name == "option"]
        assert [option for option in options if f"`{option}`" not in own] == []


def test_every_common_setting_is_listed(reference: Path) -> None:
    page = (reference / "settings.md").read_text()
    assert [one.name for one in common_parameters() if f"| `{one.name}` |" not in page] == []


def test_a_page_of_what_is_gone_goes_and_others_are_left(tmp_path: Path) -> None:
    generated.write_reference(tmp_path)
    gone = tmp_path / "methods" / "gone.md"
    gone.write_text("# gone\n")
    before = (tmp_path / "cli.md").stat().st_mtime_ns
    generated.write_reference(tmp_path)
    assert not gone.exists()
    assert (tmp_path / "cli.md").stat().st_mtime_ns == before


def test_the_documents_are_as_short_as_they_have_to_be() -> None:
    assert words.excess(words.words()) == []


def test_a_long_document_is_named() -> None:
    counts = {**words.LIMITS, "README.md": 901, "docs/x.md": words.ALL}
    said = words.excess(counts)
    assert said[0].startswith("README.md: expected at most 900 words, got 901")
    assert said[1].startswith("all documents: ")
    assert len(said) == 2


@pytest.mark.parametrize("page", ["tutorial-128k", "tutorial-book", "save", "plan"])
def test_the_examples_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = PYTHON.findall((ROOT / "docs" / f"{page}.md").read_text())
    assert blocks
    exec("\n".join(blocks), {})


@pytest.mark.slow
def test_the_notebook_runs_and_prints_what_it_shows() -> None:
    matplotlib.use("agg")
    cells = json.loads((ROOT / "docs" / "budgets.ipynb").read_text())["cells"]
    names: dict[str, object] = {}
    drawn = 0
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        exec("".join(cell["source"]), names)
        shown = sum("image/png" in one.get("data", {}) for one in cell["outputs"])
        assert len(pyplot.get_fignums()) == shown
        drawn += shown
        pyplot.close("all")
    assert drawn == 2
    results = names["results"]
    said = "".join(cells[3]["outputs"][0]["text"])
    for name, rows in results.items():  # type: ignore[attr-defined]
        for budget, (right, _, _) in zip(names["BUDGETS"], rows, strict=True):  # type: ignore[call-overload]
            assert f"{name:14} {budget:>3}  right {right} of 8" in said


def test_the_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = PYTHON.findall((ROOT / "README.md").read_text())
    text = "the river. " * 40 + "key 3f a0: 11 5c 9e 07. " + "the hill. " * 40
    block = block.replace('"path-or-hub-id"', '"needle"').replace('"Who did it?"', '"? key 3f a0"')
    block = block.replace('generate("..."', 'generate("the river. ? key 3f a0"')
    assert '"..."' not in block
    names = {"long_text": text, "model": build("llama"), "inputs": {"input_ids": prompt()}}
    exec(block, names)
    assert (tmp_path / "book.hkv").is_dir()


def test_the_map_of_packages_names_each_of_them() -> None:
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    packages = {path.parent.name for path in (ROOT / "hybrid_kv").glob("*/__init__.py")}
    assert [name for name in sorted(packages) if f"`{name}`" not in page] == []


def test_the_levels_of_imports_are_those_that_the_decisions_tell() -> None:
    page = " ".join((ROOT / "docs" / "decisions.md").read_text().split())
    told = page.partition("Packages have levels: ")[2].partition(" < the public names")[0]
    levels = [set(level.strip(" `").split()) for level in told.split("<")]
    assert levels == LEVELS[: len(levels)]
    assert len(levels) == LEVELS.index({"__init__"})
