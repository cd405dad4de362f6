"""`methods --describe NAME`, and the pages of methods in Markdown, which are the same text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybrid_kv.cli.method_pages import LABELS, page_of, parameters_of, write_pages
from hybrid_kv.plugins import INDEXES, METHODS
from tests.cli.support import call, report_of

FLAT = re.compile(r"\s+")


def flat(text: str) -> str:
    return FLAT.sub(" ", text)


def built_in() -> list[str]:
    return [name for name in METHODS if METHODS[name].factory.__module__.startswith("hybrid_kv.")]


@pytest.mark.parametrize("name", built_in())
def test_a_method_says_all_that_a_page_has(name: str) -> None:
    page = page_of(METHODS[name])
    assert page.how, "the formula"
    assert list(page.sections) == list(LABELS)
    assert re.search(r"arXiv:\d{4}\.\d{4,5}", page.paper)
    assert all(parameter.range for parameter in page.parameters)


@pytest.mark.parametrize("name", ["ada_snapkv", "kivi", "graph"])
def test_describe_shows_the_page(name: str) -> None:
    output = flat(call("methods", "--describe", name).output)
    page = page_of(METHODS[name] if name in METHODS else INDEXES[name])
    for text in (page.summary, page.paper, page.how, *page.sections.values()):
        assert flat(text) in output
    for parameter in page.parameters:
        assert f"{parameter.name} {parameter.shown}" in output
    assert output == flat(call("methods", name).output)


def test_one_page_as_json() -> None:
    (method,) = report_of(call("methods", "--describe", "snapkv", "--json", "-")).methods
    assert method.sections == page_of(METHODS["snapkv"]).sections
    assert method.parameters["sure_ratio"]["range"] == "a number from 0, to 1"


@pytest.mark.parametrize(
    ("method", "name", "expected"),
    [
        ("snapkv", "demote", "drop or offload"),
        ("snapkv", "budget_tokens", "a whole number from 1 or all"),
        ("snapkv", "min_share", "a number from 0, below 1 or null"),
        ("kivi", "bits", "2 or 4 or all"),
        ("tidal_decode", "selection_layers", "a list, each a whole number from 0"),
        ("lm_infinite", "limit_distance", "true or false"),
        ("headkv", "heads", "a text or a list, each a list, each a number"),
    ],
)
def test_a_range_is_what_the_types_say(method: str, name: str, expected: str) -> None:
    ranges = {one.name: one.range for one in parameters_of(METHODS[method].params)}
    assert ranges[name] == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("snapkv", "--describe", "h2o"), "must be the one method that is shown, got 'h2o' beside"),
        (("--describe", "snapkw"), "did you mean 'snapkv'"),
        (("graph", "--pages", "there"), "got an index kind"),
    ],
)
def test_a_page_that_cannot_be_shown(arguments: tuple[str, ...], text: str) -> None:
    result = call("methods", *arguments)
    assert result.exit_code == 2
    assert text in flat(result.stderr)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = call("methods", "snapkv", "--pages", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert "--pages must be a folder that can be written" in flat(result.stderr)


def test_pages_of_some(tmp_path: Path) -> None:
    assert call("methods", "h2o", "--pages", str(tmp_path / "new")).exit_code == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["h2o.md"]
    assert write_pages(tmp_path, ["h2o", "tova"])[1].read_text().startswith("# tova\n")
