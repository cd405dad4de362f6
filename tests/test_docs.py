"""Documents exist, link to what exists, and hold no path of one machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:home|Users|root|work)/\w")


def tracked() -> list[Path]:
    run = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if run.returncode:
        pytest.skip("not a git checkout: which files belong to the project is unknown")
    paths = [ROOT / name for name in run.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""  # binary


def headings(path: Path) -> set[str]:
    """The anchors that a rendered document offers."""
    titles = re.findall(r"^#+ +(.+)$", text_of(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path: Path) -> list[str]:
    broken = []
    for link in LINK.findall(FENCE.sub("", text_of(path))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(f"{path.name}: {link}")
    return broken


@pytest.mark.parametrize(
    "name",
    ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "docs/decisions.md", "docs/lab.md"],
)
def test_the_document_exists(name: str) -> None:
    assert text_of(ROOT / name).strip()


def test_every_relative_link_leads_somewhere() -> None:
    documents = [path for path in tracked() if path.suffix == ".md"]
    assert [link for path in documents for link in broken_links(path)] == []


def test_no_file_holds_a_path_of_one_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in tracked()
        for match in MACHINE_PATH.finditer(text_of(path))
    ]
    assert found == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A title: here\n[a](page.md) [b](#a-title-here) [c](https://example.org) `[d](e)`\n"
        "[x](gone.md) [y](#gone) ![z](gone.png)\n"
    )
    assert broken_links(page) == ["page.md: gone.md", "page.md: #gone", "page.md: gone.png"]


@pytest.mark.parametrize("folder", ["home", "Users", "root"])
@pytest.mark.parametrize("before", ["", "cd ", "'", "="])
def test_a_machine_path_is_found(folder: str, before: str) -> None:
    assert MACHINE_PATH.search(f"{before}/{folder}/ada")


@pytest.mark.parametrize("text", ["docs/home/x", "https://example.org/home/x", "~/work/x", "/work"])
def test_other_paths_are_let_through(text: str) -> None:
    assert not MACHINE_PATH.search(text)


def test_no_merge_was_left_unfinished() -> None:
    mark = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
    assert [path.name for path in tracked() if mark.search(text_of(path))] == []
