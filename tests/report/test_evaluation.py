"""An evaluation's tables and page: complete, well-formed, and no name becomes markup."""

from __future__ import annotations

import csv

import pytest

from hybrid_kv.report.evaluation import (
    Counters,
    DepthScore,
    EvalRow,
    Interval,
    budget_tables,
    sheets,
    short_bytes,
    to_csv,
)
from hybrid_kv.report.html.canvas import to_inline
from hybrid_kv.report.html.evaluation_page import (
    depths_table,
    frontier,
    pareto_figure,
    render_evaluation,
)
from hybrid_kv.report.html.figures import Spot
from hybrid_kv.report.html.page_entries import looks
from hybrid_kv.report.schema import EvalReport, parse_report, to_json
from tests.report.profiles import HOSTILE, environment
from tests.report.test_html_page import Page


def row(method: str, budget: str | None, score: float | None, task: str = "key_value") -> EvalRow:
    reads = task == "perplexity"
    found = None if score is None else Interval(mean=score, low=score - 0.1, high=score + 0.1)
    return EvalRow(
        task=task,
        context_tokens=4096,
        asking="none" if reads else "after",
        method=method,
        budget=budget,
        samples=3,
        questions=12,
        score=found,
        nats_beyond=found if reads else None,
        kl=found if reads else None,
        counters=Counters(attended_tokens=205.5, read_bytes=3e6, device_bytes=2e6, host_bytes=1e6),
        depths=(DepthScore(low=0.2, high=0.4, score=score or 0, questions=4),) if found else (),
        error="it broke" if score is None else None,
    )


ROWS = tuple(
    row(method, budget, score, task)
    for task in ("key_value", "qa_1", "perplexity")
    for method, budget, score in (
        ("full", None, 1.0),
        ("quest", "5%", 0.25),
        ("quest", "10%", 0.5),
        ("hybrid", "5%", 0.75),
        (HOSTILE, "5%", None),
    )
)


def report(rows: tuple[EvalRow, ...] = ROWS) -> EvalReport:
    return EvalReport(
        environment=environment(), arguments={"model": HOSTILE}, model=HOSTILE, rows=rows
    )


def test_what_was_refused_is_not_said_to_have_failed() -> None:
    refusal = row("quest", "1%", None).model_copy(update={"refused": True})
    (sheet,) = sheets((row("full", None, 1.0), refusal))
    assert sheet.cells(sheet.lines[1])[2] == "refused"
    assert "it broke" in render_evaluation(report((refusal,)))


def test_nothing_is_a_little_less_than_zero() -> None:
    small = Interval(mean=-1e-8, low=-1e-7, high=1e-7)
    read = row("full", None, 1.0, "perplexity").model_copy(
        update={"nats_beyond": small, "kl": small}
    )
    read = read.model_copy(update={"counters": Counters(mass_error=-1e-6)})
    (sheet,) = sheets((read,))
    cells = dict(zip(sheet.head(), sheet.cells(sheet.lines[0]), strict=True))
    assert (cells["nats beyond"], cells["KL"]) == ("+0.0000", "0.0000")
    assert cells["mass error"] == "+0.000"


def test_budgets_stand_side_by_side() -> None:
    asked, reading = (next(iter(budget_tables(sheet))) for sheet in sheets(ROWS))
    assert asked.title == "4K tokens, key_value: score, question after the eviction"
    assert asked.head == reading.head == ("method", "5%", "10%", "no budget")
    assert asked.rows == (
        ("full", "-", "-", "1.000"),
        ("quest", "0.250", "0.500", "-"),
        ("hybrid", "0.750", "-", "-"),
        (HOSTILE, "failed", "-", "-"),
    )
    assert reading.rows[1] == (
        "quest",
        "+0.2500 · 0.2500 · 0.250",
        "+0.5000 · 0.5000 · 0.500",
        "-",
    )
    assert asked.title in render_evaluation(report())
    assert not [*budget_tables(next(sheets([one for one in ROWS if one.budget != "10%"])))]


def test_a_sheet_has_methods_down_by_budget_and_tasks_across() -> None:
    first, second = sheets(ROWS)
    assert (first.title, second.title) == (
        "4K tokens, question after the eviction",
        "4K tokens, reading on",
    )
    assert first.head()[:5] == ["method", "budget", "key_value", "qa_1", "mean"]
    assert [first.cells(line)[:5] for line in first.lines if line.method != HOSTILE] == [
        ["full", "-", "1.000", "1.000", "1.000"],
        ["quest", "5%", "0.250", "0.250", "0.250"],
        ["hybrid", "5%", "0.750", "0.750", "0.750"],
        ["quest", "10%", "0.500", "0.500", "0.500"],
    ]
    assert first.cells(first.lines[3])[2:5] == ["failed", "failed", "-"]
    assert second.head()[2:5] == ["nats beyond", "KL", "top-1"]
    assert second.cells(second.lines[1])[2:5] == ["+0.2500", "0.2500", "0.250"]


def test_a_method_that_lacks_a_task_leaves_a_gap() -> None:
    (sheet,) = sheets((row("full", None, 1.0), row("quest", "5%", 0.5, "qa_1")))
    assert [sheet.cells(line)[2:4] for line in sheet.lines] == [["1.000", "-"], ["-", "0.500"]]


def test_every_row_is_in_the_csv() -> None:
    lines = list(csv.DictReader(to_csv(ROWS).splitlines()))
    assert len(lines) == len(ROWS)
    assert lines[1]["score"] == "0.25"
    assert lines[1]["score_low"] == "0.15"
    assert (lines[0]["budget"], lines[4]["score"], lines[4]["error"]) == ("", "", "it broke")


def test_the_page_is_well_formed_and_no_name_is_markup() -> None:
    page = Page(render_evaluation(report()))
    assert page.count["script"] == 1  # the page's own
    assert page.count["table"] >= 3
    assert page.count["svg"] >= 4
    words = " ".join(page.words)
    assert "hybrid 5% scores 0.75 (full attention 1.00)" in words
    assert "it broke" in words


def test_a_page_of_nothing_but_full_attention_can_be_made() -> None:
    Page(render_evaluation(report((row("full", None, 1.0),))))
    Page(render_evaluation(report(())))


def test_a_report_comes_back_from_its_json() -> None:
    assert parse_report(to_json(report())) == report()


def test_the_frontier_is_what_nobody_beats() -> None:
    look = looks(["a"])["a"]
    marks = [Spot("a", look, b, s, "") for b, s in ((1, 0.1), (2, 0.5), (3, 0.4), (4, 0.5))]
    assert frontier(marks) == marks[:2]


@pytest.mark.parametrize(("count", "named"), [(12, 12), (13, 1)])
def test_of_many_methods_only_those_that_nobody_beats_are_named(count: int, named: int) -> None:
    names = [f"m{number}" for number in range(count)]
    look = looks(names)
    marks = [Spot(name, look[name], 9 + i, 0.5, f"tip {name}") for i, name in enumerate(names)]
    text = to_inline(pareto_figure("p", "bytes", marks, 640.0), "p")
    assert [name for name in names if f">{name}</text>" in text] == names[:named]
    assert text.count("<title>tip ") == count


@pytest.mark.parametrize(
    ("count", "text"), [(None, "-"), (0, "0"), (999, "999"), (1536, "1.5K"), (5 * 2**30, "5G")]
)
def test_bytes_are_short(count: float | None, text: str) -> None:
    assert short_bytes(count) == text


def test_of_equal_scores_the_page_names_who_reads_least() -> None:
    thrifty = row("flat", "5%", 0.75).model_copy(
        update={"counters": Counters(attended_tokens=205.5, read_bytes=2e6)}
    )
    lone = ROWS[:4]
    words = " ".join(Page(render_evaluation(report((*lone, thrifty)))).words)
    assert "flat 5% scores 0.75 (full attention 1.00), the most of 3 methods at 2 budgets" in words
    assert "; 1 more score as much and read more" in words


def test_maps_of_depths_name_their_rows_and_empty_is_not_zero() -> None:
    asked = row("h2o", "5%", 0.0).model_copy(update={"context_tokens": 2048})
    parts = (*asked.depths, DepthScore(low=0.0, high=0.2, score=0.5, questions=1))
    table = depths_table(
        "passkey",
        [row("full", None, 1.0), row("h2o", "5%", 0.9), asked.model_copy(update={"depths": parts})],
    )
    assert list(table.head) == ["method, context", "0 to 20%", "20 to 40%"]
    assert [one[0] for one in table.rows] == ["full, 4K", "h2o 5%, 2K", "h2o 5%, 4K"]
    cells = [[(cell.text, cell.kind) for cell in one[1:]] for one in table.rows]  # type: ignore[union-attr]
    assert cells == [
        [("–", "none"), ("1.00", "h8")],
        [("0.50", "h4"), ("0.00", "h0")],
        [("–", "none"), ("0.90", "h7")],
    ]
    assert "4 questions" in table.rows[0][2].tip  # type: ignore[union-attr]
