"""An evaluation as a page: tables, score against bytes, scores by depth and length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import inf

from hybrid_kv.report.evaluation import EvalRow
from hybrid_kv.report.evaluation_tables import (
    BudgetTable,
    ScoreLine,
    Sheet,
    budget_tables,
    sheets,
)
from hybrid_kv.report.html.elements import Child, Html, el, join
from hybrid_kv.report.html.figures.depths import DepthMap, depths_figure
from hybrid_kv.report.html.figures.pareto import ParetoMark, pareto_figure
from hybrid_kv.report.html.head import machine
from hybrid_kv.report.html.page import article, shell
from hybrid_kv.report.html.palette import looks
from hybrid_kv.report.html.scene import Scene
from hybrid_kv.report.html.widgets import (
    WIDE,
    Section,
    StyledCell,
    facts,
    figure,
    note,
    table,
    tabs,
)
from hybrid_kv.report.schema import EvalReport

_COLUMNS = (
    "attended: entries that a query head attends in a step, counted by the runtime, as a mean and "
    "as a share of full attention's. read/step: bytes of keys, values, digests and index rows that "
    "a step reads. device, host: bytes held at the end, indexes included. missed: share of the "
    "softmax over the whole context that no exact attention read, dropped entries included; mass "
    "error: of that softmax's mass, what was estimated too much, or is missing below 0; error: "
    "relative distance of a head's output from exact attention's. recall: of the exact best cold "
    "entries, those that a search ranked. A method without a budget attends what it always does."
)


def render_evaluation(report: EvalReport) -> str:
    """The page of one evaluation."""
    found = [*sheets(report.rows)]
    sections = [
        Section("tables", "Results", _tables(found)),
        *_optional("pareto", "Score against bytes", _pareto(found)),
        *_optional("depths", "Where the answer stands", _depths(report.rows)),
        *_optional("failures", "What failed or was refused", _failures(report.rows)),
        Section("run", "The run", _run(report)),
    ]
    title = f"{report.model}: methods compared"
    head = el("header", el("p", "hybrid-kv eval", class_="kicker"), el("h1", title))
    part = article(title, join(*_warnings(report), _lead(found)), sections)
    return shell(f"{title} – hybrid-kv", join(head, part.body), [part])


def _optional(ident: str, title: str, body: Html | None) -> list[Section]:
    return [] if body is None else [Section(ident, title, body)]


def _warnings(report: EvalReport) -> Iterator[Html]:
    if report.interrupted:
        yield el(
            "p",
            el("b", "Interrupted."),
            " The evaluation was ended early; rows are of the samples that were measured.",
            class_="loud",
            role="note",
        )


def _lead(found: Sequence[Sheet]) -> Html | None:
    """Who is nearest to full attention on the longest context, question after the eviction; of
    equals who reads least.
    """
    asked = [sheet for sheet in found if sheet.asking == "after"] or list(found)
    if not asked:
        return None
    sheet = asked[-1]
    rivals = [line for line in sheet.lines if line.budget is not None and line.score is not None]
    if not rivals:
        return None
    full = next((line.score for line in sheet.lines if line.method == "full"), None)
    best = max(rivals, key=lambda line: (line.score or 0.0, -(line.counters.read_bytes or inf)))
    equals = sum(line.score == best.score for line in rivals) - 1
    against = "" if full is None else f" (full attention {full:.2f})"
    methods, budgets = ({getattr(line, of) for line in rivals} for of in ("method", "budget"))
    others = f"; {equals} more score as much and read more" if equals else ""
    return el(
        "p",
        f"{sheet.title}: {best.name} scores {best.score:.2f}{against}, the most of "
        f"{len(methods)} methods at {len(budgets)} budget{'s' * (len(budgets) > 1)}{others}.",
        class_="lead",
    )


def _tables(found: Sequence[Sheet]) -> Html:
    by_budget = (_budget_table(one) for sheet in found for one in budget_tables(sheet))
    return join(*by_budget, *(_table(sheet) for sheet in found), note(_COLUMNS))


def _budget_table(found: BudgetTable) -> Html:
    return table(found.title, found.head, [[*map(_cell, row)] for row in found.rows])


def _table(sheet: Sheet) -> Html:
    rows = [[*map(_cell, sheet.cells(line))] for line in sheet.lines]
    return table(sheet.title, sheet.head(), rows)


def _cell(text: str) -> Child | StyledCell:
    return StyledCell(text, "bad") if text in ("failed", "refused") else text


def _pareto(found: Sequence[Sheet]) -> Html | None:
    panels = []
    for sheet in found:
        drawn = [
            (f"{kind}-{sheet.asking}-{sheet.context_tokens}", axis, marks)
            for kind, axis in (("read", "bytes read in a step"), ("held", "bytes held"))
            if (marks := _marks(sheet.lines, kind))
        ]
        figures = (
            figure(partial(_pareto_scene, name, axis, marks), f"pareto-{name}", None, WIDE)
            for name, axis, marks in drawn
        )
        if drawn:
            panels.append((sheet.title, join(*figures)))
    return tabs("pareto-tabs", "Context", panels) if panels else None


def _pareto_scene(name: str, axis: str, marks: Sequence[ParetoMark], width: float) -> Scene:
    return pareto_figure(f"pareto-{name}", f"Score against {axis}", axis, marks, width)


def _marks(lines: Sequence[ScoreLine], kind: str) -> list[ParetoMark]:
    look = looks(line.method for line in lines)
    marks = []
    for line in lines:
        found = line.counters
        held = (found.device_bytes or 0) + (found.host_bytes or 0)
        count = found.read_bytes if kind == "read" else held
        if count and line.score is not None:
            marks.append(ParetoMark(line.method, line.budget, look[line.method], count, line.score))
    return marks


def _depths(rows: Sequence[EvalRow]) -> Html | None:
    figures = []
    for task, asking in dict.fromkeys((row.task, row.asking) for row in rows if row.depths):
        own = [row for row in rows if (row.task, row.asking) == (task, asking) and row.depths]
        maps = []
        for method, budget in dict.fromkeys((row.method, row.budget) for row in own):
            columns = sorted(
                (row.context_tokens, row.depths)
                for row in own
                if (row.method, row.budget) == (method, budget)
            )
            maps.append(DepthMap(method if budget is None else f"{method} {budget}", (*columns,)))
        name = f"depths-{task}-{asking}".replace(":", "-").replace("=", "-")
        title = f"{task}, question {asking} the eviction"
        figures.append(figure(partial(depths_figure, name, title, maps), name, None, WIDE))
    return join(*figures) if figures else None


def _failures(rows: Sequence[EvalRow]) -> Html | None:
    failed = [row for row in rows if row.error is not None]
    if not failed:
        return None
    lines = ([_title(row), row.error] for row in failed)
    return table("Samples without a result", ["method", "reason"], lines, words=True)


def _title(row: EvalRow) -> str:
    budget = "" if row.budget is None else f" {row.budget}"
    return f"{row.method}{budget} on {row.task}, {row.context_tokens:,} tokens, {row.asking}"


def _run(report: EvalReport) -> Html:
    asked = {
        key: _said(value) for key, value in report.arguments.items() if value not in (None, {})
    }
    return facts({**asked, **machine(report.environment)})


def _said(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
