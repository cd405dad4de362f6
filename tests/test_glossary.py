"""The glossary: few terms, all of them used, and none of the words that it retires."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))

import words  # noqa: E402

PAGE = ROOT / "docs" / "glossary.md"
RIDDLES = 3
"""Docstrings that begin with a question word; there may only be fewer."""
QUESTION = re.compile(r"(What|Who|Whose|Those|That|How|Which)\b")


def table(heading: str, text: str) -> list[str]:
    """First cells of the first table behind a heading, its commas and brackets taken apart."""
    rows = text.partition(heading)[2].partition("|---|---|\n")[2].partition("\n\n")[0].splitlines()
    cells = (re.sub(r"\(.*?\)|`", "", row.split("|")[1]) for row in rows)
    return [word.strip() for cell in cells for word in cell.split(",")]


def terms() -> list[str]:
    return table("# Glossary", PAGE.read_text())


def retired() -> list[str]:
    return table("## Not used", PAGE.read_text())


def uses(word: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(word)}(s|es)?\b", text, re.IGNORECASE) is not None


def documents() -> Iterator[tuple[str, str]]:
    for path in words.documents():
        if (path != PAGE and path.is_relative_to(ROOT / "docs")) or path.parent == ROOT:
            yield path.name, path.read_text()


def docstrings(root: Path) -> Iterator[tuple[str, str]]:
    """Where a docstring stands, and its text."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield f"{path}:{getattr(node, 'lineno', 1)}", text


def test_there_are_few_terms_and_each_is_used() -> None:
    rows = PAGE.read_text().partition("\n## ")[0].count("\n| ") - 1
    assert 30 <= rows <= 50
    code = "\n".join(path.read_text() for path in (ROOT / "hybrid_kv").rglob("*.py"))
    written = "\n".join(text for _, text in documents())
    unused = [term for term in terms() if not (uses(term, code) or uses(term, written))]
    assert unused == [], "nobody says it: leave it out"


def test_no_document_uses_a_retired_word() -> None:
    assert len(retired()) >= 8
    found = [
        f"{name}: {word}" for name, text in documents() for word in retired() if uses(word, text)
    ]
    assert found == []


def test_docstrings_that_begin_with_a_riddle_get_fewer() -> None:
    found = [where for where, text in docstrings(ROOT / "hybrid_kv") if QUESTION.match(text)]
    assert len(found) <= RIDDLES, found[:5]


def test_words_are_found_whole_and_in_the_plural() -> None:
    assert uses("lane", "two Lanes")
    assert not uses("lane", "a plane")
    assert table(
        "## Not", "## Not\n\n| a | b |\n|---|---|\n| x (of), `y` | z |\n\n| no | no |"
    ) == [
        "x",
        "y",
    ]
