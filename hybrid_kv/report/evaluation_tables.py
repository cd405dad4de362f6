"""An evaluation as tables: methods downwards, tasks to the right, as papers print them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from hybrid_kv.report.evaluation import Asking, Counters, EvalRow

NOTHING = "-"
_SAID: dict[Asking, str] = {
    "after": "question after the eviction",
    "before": "question before the eviction",
    "none": "reading on",
}


@dataclass(frozen=True, slots=True)
class ScoreLine:
    """A method under a budget in one table: its rows by task, None where there is none."""

    method: str
    budget: str | None
    rows: tuple[EvalRow | None, ...]

    @property
    def name(self) -> str:
        return self.method if self.budget is None else f"{self.method} {self.budget}"

    @property
    def score(self) -> float | None:
        """The mean over the tasks."""
        found = [row.score.mean for row in self.rows if row is not None and row.score is not None]
        return fmean(found) if found else None

    @property
    def counters(self) -> Counters:
        """Means over the tasks."""
        found = [row.counters for row in self.rows if row is not None]
        means: dict[str, float | None] = {}
        for name in Counters.model_fields:
            values = [value for one in found if (value := getattr(one, name)) is not None]
            means[name] = fmean(values) if values else None
        return Counters(**means)


@dataclass(frozen=True, slots=True)
class Sheet:
    """All methods at one context and one way of asking."""

    context_tokens: int
    asking: Asking
    tasks: tuple[str, ...]
    lines: tuple[ScoreLine, ...]

    @property
    def title(self) -> str:
        return f"{short_count(self.context_tokens)} tokens, {_SAID[self.asking]}"

    def head(self) -> list[str]:
        """Titles of the columns."""
        if self.asking == "none":
            quality = [title for task in self.tasks for title in self._reading(task)]
        else:
            quality = [*self.tasks, *(["mean"] if len(self.tasks) > 1 else [])]
        costs = ["attended", "of all", "read/step", "device", "host", "ms/token"]
        costs += ["missed", "mass error", "error"]
        return ["method", "budget", *quality, *costs, "recall"]

    def cells(self, line: ScoreLine) -> list[str]:
        """One line of the table."""
        quality: list[str] = []
        for row in line.rows:
            if self.asking == "none":
                quality += _reading_cells(row)
            else:
                quality.append(failed(row) or _share(None if row is None else _mean(row)))
        if self.asking != "none" and len(self.tasks) > 1:
            quality.append(_share(line.score))
        return [line.method, line.budget or NOTHING, *quality, *_cost_cells(line.counters)]

    def _reading(self, task: str) -> list[str]:
        name = "" if len(self.tasks) == 1 else f"{task} "
        return [f"{name}nats beyond", "KL", "top-1"]


@dataclass(frozen=True, slots=True)
class BudgetTable:
    """Losses of one task by budget: methods downwards, budgets to the right."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def budget_tables(sheet: Sheet) -> Iterator[BudgetTable]:
    """One for each task of a sheet with several budgets; the last column is of what has none."""
    budgets = [*dict.fromkeys(line.budget for line in sheet.lines if line.budget is not None)]
    if len(budgets) < 2:
        return
    own = [None] if any(line.budget is None for line in sheet.lines) else []
    shown = "nats beyond · KL · top-1" if sheet.asking == "none" else "score"
    for number, task in enumerate(sheet.tasks):
        found = {(line.method, line.budget): line.rows[number] for line in sheet.lines}
        rows = tuple(
            (name, *(_budget_cell(found.get((name, budget))) for budget in (*budgets, *own)))
            for name in dict.fromkeys(line.method for line in sheet.lines)
        )
        yield BudgetTable(
            f"{short_count(sheet.context_tokens)} tokens, {task}: {shown}, {_SAID[sheet.asking]}",
            ("method", *budgets, *("no budget" for _ in own)),
            rows,
        )


def sheets(rows: Sequence[EvalRow]) -> Iterator[Sheet]:
    """A table for each context and way of asking; methods in the rows' order, by budget."""
    for asking in ("after", "before", "none"):
        for context in sorted({row.context_tokens for row in rows if row.asking == asking}):
            own = [r for r in rows if (r.asking, r.context_tokens) == (asking, context)]
            tasks = tuple(dict.fromkeys(row.task for row in own))
            found = {(row.method, row.budget, row.task): row for row in own}
            budgets = [None, *dict.fromkeys(r.budget for r in own if r.budget is not None)]
            keys = dict.fromkeys((row.method, row.budget) for row in own)
            ordered = sorted(keys, key=lambda key: budgets.index(key[1]))
            lines = (
                ScoreLine(m, b, tuple(found.get((m, b, t)) for t in tasks)) for m, b in ordered
            )
            yield Sheet(context, asking, tasks, tuple(lines))


def to_csv(rows: Sequence[EvalRow]) -> str:
    """One line for each row; intervals in columns of their own, what is not known empty."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    plain = ("task", "context_tokens", "asking", "method", "budget", "samples", "questions", "nats")
    ranges = ("score", "nats_beyond", "kl")
    counted = tuple(Counters.model_fields)
    spread = [f"{name}{end}" for name in ranges for end in ("", "_low", "_high")]
    out.writerow([*plain, *spread, *counted, "error"])
    for row in rows:
        cells: list[object] = [getattr(row, name) for name in plain]
        for name in ranges:
            found = getattr(row, name)
            cells += ["", "", ""] if found is None else [found.mean, found.low, found.high]
        cells += [getattr(row.counters, name) for name in counted]
        out.writerow(["" if cell is None else _number(cell) for cell in [*cells, row.error]])
    return text.getvalue()


def failed(row: EvalRow | None) -> str | None:
    """Mark in the place of a score that could not be had."""
    if row is None or row.score is not None or not row.error:
        return None
    return "refused" if row.refused else "failed"


def short_count(tokens: int) -> str:
    """4096 -> '4K'."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"


def short_bytes(count: float | None) -> str:
    """1536 -> '1.5K'."""
    if count is None:
        return NOTHING
    for unit, size in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if count >= size:
            return (
                f"{count / size:.3g}{unit}" if count < 999.5 * size else f"{count / size:.0f}{unit}"
            )
    return f"{count:.0f}"


def _mean(row: EvalRow) -> float | None:
    return None if row.score is None else row.score.mean


def _budget_cell(row: EvalRow | None) -> str:
    if row is None or row.score is None:
        return failed(row) or NOTHING
    return _share(row.score.mean) if row.nats_beyond is None else " · ".join(_reading_cells(row))


def _reading_cells(row: EvalRow | None) -> list[str]:
    if row is None or row.nats_beyond is None or row.kl is None:
        return [failed(row) or NOTHING, NOTHING, NOTHING]
    return [f"{row.nats_beyond.mean:+.4f}", f"{row.kl.mean:.4f}", _share(_mean(row))]


def _cost_cells(found: Counters) -> list[str]:
    return [
        NOTHING if found.attended_tokens is None else f"{found.attended_tokens:,.0f}",
        NOTHING if found.attended_ratio is None else f"{100 * found.attended_ratio:.1f}%",
        short_bytes(found.read_bytes),
        short_bytes(found.device_bytes),
        short_bytes(found.host_bytes),
        NOTHING if found.ms_per_token is None else f"{found.ms_per_token:.3g}",
        _share(found.missed_mass),
        NOTHING if found.mass_error is None else f"{found.mass_error:+.3f}",
        _share(found.output_error),
        _share(found.recall),
    ]


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def _number(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value
