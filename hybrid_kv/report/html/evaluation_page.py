"""An evaluation as a page: tables, score against bytes, scores by depth and length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from hybrid_kv.report.evaluation import (
    BudgetTable,
    DepthScore,
    EvalRow,
    ScoreLine,
    Sheet,
    budget_tables,
    sheets,
)
from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.canvas import Picture
from hybrid_kv.report.html.figures import Scale, Spot, fitted, spots_figure
from hybrid_kv.report.html.page_blocks import (
    WIDTH,
    Abreast,
    FactList,
    Figure,
    PageBlock,
    PagePart,
    Panel,
    Section,
    StyledCell,
    Table,
    Tabs,
    Words,
    loud,
    note,
    shell,
)
from hybrid_kv.report.html.page_entries import looks
from hybrid_kv.report.html.tables import machine, plain
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
    made: tuple[tuple[str, str, list[PageBlock]], ...] = (
        ("tables", "Results", _tables(found)),
        ("pareto", "Score against bytes", _pareto(found)),
        ("depths", "Where the answer stands", _depths(report.rows)),
        ("failures", "What failed or was refused", _failures(report.rows)),
        ("run", "The run", [_run(report)]),
    )
    sections = [Section(ident, title, blocks) for ident, title, blocks in made if blocks]
    title = f"{report.model}: methods compared"
    part = PagePart(title, [*_warnings(report), *_lead(found)], sections)
    return shell(f"{title} – hybrid-kv", "hybrid-kv eval", title, [part])


def _warnings(report: EvalReport) -> Iterator[PageBlock]:
    if report.interrupted:
        text = "The evaluation was ended early; rows are of the samples that were measured."
        yield loud("Interrupted.", text)


def _lead(found: Sequence[Sheet]) -> Iterator[PageBlock]:
    """Sentences on the method nearest to full attention on the longest context, question after the
    eviction; of equals on the one that reads least.
    """
    asked = [sheet for sheet in found if sheet.asking == "after"] or list(found)
    if not asked:
        return
    sheet = asked[-1]
    rivals = [line for line in sheet.lines if line.budget is not None and line.score is not None]
    if not rivals:
        return
    full = next((line.score for line in sheet.lines if line.method == "full"), None)
    best = max(rivals, key=lambda line: (line.score or 0.0, -(line.counters.read_bytes or inf)))
    equals = sum(line.score == best.score for line in rivals) - 1
    against = "" if full is None else f" (full attention {full:.2f})"
    methods, budgets = ({getattr(line, of) for line in rivals} for of in ("method", "budget"))
    others = f"; {equals} more score as much and read more" if equals else ""
    text = (
        f"{sheet.title}: {best.name} scores {best.score:.2f}{against}, the most of "
        f"{len(methods)} methods at {len(budgets)} budget{'s' * (len(budgets) > 1)}{others}."
    )
    yield Words((text,), "lead")


def _tables(found: Sequence[Sheet]) -> list[PageBlock]:
    by_budget = [_budget_table(one) for sheet in found for one in budget_tables(sheet)]
    return [*by_budget, *map(_table, found), note(_COLUMNS)]


def _budget_table(found: BudgetTable) -> Table:
    return Table(found.title, found.head, [[*map(_cell, row)] for row in found.rows])


def _table(sheet: Sheet) -> Table:
    rows = [[*map(_cell, sheet.cells(line))] for line in sheet.lines]
    return Table(sheet.title, sheet.head(), rows)


def _cell(text: str) -> str | StyledCell:
    if text in ("failed", "refused"):
        return StyledCell(text, kind="bad")
    return StyledCell(text, kind="parts") if " · " in text else text


def _pareto(found: Sequence[Sheet]) -> list[PageBlock]:
    panels = []
    for sheet in found:
        figures = [
            Figure(pareto_figure(f"pareto-{name}", axis, spots, WIDTH), f"pareto-{name}")
            for kind, axis in (("read", "bytes read in a step"), ("held", "bytes held"))
            if (spots := _spots(sheet.lines, kind))
            for name in (f"{kind}-{sheet.asking}-{sheet.context_tokens}",)
        ]
        if figures:
            panels.append(Panel(sheet.title, [Abreast(figures)]))
    return [Tabs("pareto-tabs", "Context", panels)] if panels else []


_MIB = 2**20
_MOST_NAMED = 12
"""With more methods than these only those that no other beats are named."""


def _spots(lines: Sequence[ScoreLine], kind: str) -> list[Spot]:
    """A method under a budget each: bytes above 0, and a score in [0, 1]."""
    look = looks(line.method for line in lines)
    spots = []
    for line in lines:
        found = line.counters
        held = (found.device_bytes or 0) + (found.host_bytes or 0)
        count = found.read_bytes if kind == "read" else held
        if count and line.score is not None:
            name = line.method if line.budget is None else f"{line.method} at {line.budget}"
            tip = f"{name}: {line.score:.3f}, {numbers.size(count)}"
            spots.append(Spot(line.method, look[line.method], count / _MIB, line.score, tip))
    return spots


def pareto_figure(name: str, axis: str, spots: Sequence[Spot], width: float) -> Picture:
    """Up and left is better; markers of a method are joined, the best of all by a thin line.

    Of many methods only those on that line have a name and a colour; a marker's tip names its own.
    """
    best, methods = frontier(spots), {spot.name for spot in spots}
    named = {spot.name for spot in best} if len(methods) > _MOST_NAMED else methods
    return spots_figure(
        name,
        f"Score against {axis}",
        (f"{axis}, MiB", "score"),
        spots,
        width,
        scales=(
            fitted((spot.x for spot in spots), log=True),
            Scale(0.0, 1.03, False, (0, 0.2, 0.4, 0.6, 0.8, 1)),
        ),
        best=best,
        named=named,
    )


def frontier(spots: Sequence[Spot]) -> list[Spot]:
    """Spots that no other beats in both, from the fewest bytes on."""
    found: list[Spot] = []
    for spot in sorted(spots, key=lambda spot: (spot.x, -spot.y)):
        if not found or spot.y > found[-1].y:
            found.append(spot)
    return found


def _depths(rows: Sequence[EvalRow]) -> list[PageBlock]:
    tables = []
    for task, asking in dict.fromkeys((row.task, row.asking) for row in rows if row.depths):
        own = [row for row in rows if (row.task, row.asking) == (task, asking) and row.depths]
        tables.append(depths_table(f"{task}, question {asking} the eviction", own))
    if not tables:
        return []
    text = "Score by where the answer stands: the beginning of the context is 0%. Dash: not asked."
    return [*tables, note(text)]


def depths_table(title: str, rows: Sequence[EvalRow]) -> Table:
    """Methods and contexts downwards, places in the context to the right; the darker the better."""
    places = sorted({(depth.low, depth.high) for row in rows for depth in row.depths})
    lines: list[list[str | StyledCell]] = []
    for method, budget in dict.fromkeys((row.method, row.budget) for row in rows):
        name = method if budget is None else f"{method} {budget}"
        own = [row for row in rows if (row.method, row.budget) == (method, budget)]
        for row in sorted(own, key=lambda row: row.context_tokens):
            found = {(depth.low, depth.high): depth for depth in row.depths}
            place = f"{name}, {numbers.tokens(row.context_tokens)}"
            lines.append([place, *(_depth_cell(found.get(one), place) for one in places)])
    head = ["method, context", *(f"{100 * low:.0f} to {100 * high:.0f}%" for low, high in places)]
    return Table(title, head, lines, heat=True)


def _depth_cell(score: DepthScore | None, place: str) -> StyledCell:
    if score is None:
        return StyledCell(numbers.NOTHING, kind="none", tip="was not asked")
    tip = (
        f"{place}, {100 * score.low:.0f} to {100 * score.high:.0f}%: {score.score:.2f} of "
        f"{score.questions} questions"
    )
    return StyledCell(f"{score.score:.2f}", kind=f"h{round(8 * score.score)}", tip=tip)


def _failures(rows: Sequence[EvalRow]) -> list[PageBlock]:
    lines = [[_title(row), row.error] for row in rows if row.error is not None]
    if not lines:
        return []
    return [Table("Samples without a result", ["method", "reason"], lines, words=True)]


def _title(row: EvalRow) -> str:
    budget = "" if row.budget is None else f" {row.budget}"
    return f"{row.method}{budget} on {row.task}, {row.context_tokens:,} tokens, {row.asking}"


def _run(report: EvalReport) -> FactList:
    asked = {
        key: plain(value) for key, value in report.arguments.items() if value not in (None, {})
    }
    return FactList({**asked, **machine(report.environment)})
