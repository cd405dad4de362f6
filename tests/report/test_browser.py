"""Pages in a real browser: nothing is cut on a small screen or a large one, in light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.report.html.evaluation_page import render_evaluation
from hybrid_kv.report.html.page import render
from hybrid_kv.report.html.sources import Source
from hybrid_kv.report.schema import EvalReport, read_report
from tests.report import profiles
from tests.serve.browsing import browsing

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHOW_ALL = """() => {
  document.querySelectorAll("details").forEach((one) => { one.open = true; });
  const style = document.createElement("style");
  style.textContent = ".panel{display:block!important}";
  document.head.append(style);
}"""
CUT = """() => {
  const found = [];
  const wide = document.documentElement;
  if (wide.scrollWidth > innerWidth) found.push(["page", wide.scrollWidth]);
  for (const table of document.querySelectorAll(".table"))
    if (table.scrollWidth > table.clientWidth + 1)
      found.push([table.textContent.slice(0, 60), table.scrollWidth, table.clientWidth]);
  for (const one of document.querySelectorAll("td, th, svg text")) {
    const box = one.getBoundingClientRect();
    if (box.width && (box.right > innerWidth + 1 || box.left < -1))
      found.push([one.textContent, box.left, box.right]);
  }
  return found;
}"""


def evaluation(name: str) -> str:
    (path,) = RESULTS.rglob(f"{name}.json")
    report = read_report(path)
    assert isinstance(report, EvalReport)
    return render_evaluation(report)


def profiled() -> str:
    return render([Source(profiles.profile((4096, 32768)), "a.json")])


def compared() -> str:
    two = [profiles.profile((4096,), slower=slower, seed=1) for slower in (1.0, 1.3)]
    return render([Source(one, f"{i}.json") for i, one in enumerate(two)])


PAGES = {
    "profile": profiled,
    "comparison": compared,
    "demo": lambda: render([Source(profiles.demo(), "d.json")]),
    "answers": lambda: evaluation("eval-needle-32k"),
    "reading": lambda: evaluation("eval-smollm2-4k"),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as browser:
        yield browser


def shown(browser: Any, path: Path, width: int, scheme: str) -> Any:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda message: said.append(message.text))
    page.goto(path.as_uri())
    assert said == []
    return page


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_cut(browser: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / "page.html"
    path.write_text(PAGES[name](), encoding="utf-8")
    for width in (400, 800, 1400):
        page = shown(browser, path, width, "light")
        page.evaluate(SHOW_ALL)
        assert page.evaluate(CUT) == [], width
        page.close()


def test_a_page_is_light_or_dark_with_its_figures(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(profiled(), encoding="utf-8")
    colours = []
    for scheme in ("light", "dark"):
        page = shown(browser, path, 1400, scheme)
        colours.append(
            page.evaluate(
                """() => [getComputedStyle(document.body).backgroundColor,
                getComputedStyle(document.querySelector("svg text")).fill]"""
            )
        )
        page.close()
    assert colours[0] == ["rgb(255, 255, 255)", "rgb(85, 92, 102)"]
    assert colours[1] == ["rgb(20, 23, 27)", "rgb(169, 177, 187)"]


def test_one_panel_is_shown_and_marks_have_tips(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(profiled(), encoding="utf-8")
    page = shown(browser, path, 1400, "light")
    section = page.locator("#r1-phases")
    assert section.locator(".panel:visible").count() == 1
    assert section.get_by_text("Where a decode step goes, 32K").is_visible()
    section.get_by_label("4K", exact=True).check()
    assert section.get_by_text("Where a decode step goes, 4K").is_visible()
    assert not section.get_by_text("Where a decode step goes, 32K").is_visible()
    page.locator("#r1-latency svg [data-tip^='full, 32K']").first.hover()
    assert page.locator("#tip").inner_text().startswith("full, 32K: ")
    page.close()
