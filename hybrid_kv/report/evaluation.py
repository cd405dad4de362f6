"""Report of an evaluation: cells as measured, rows over their samples, and tables of the rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from pydantic import Field

from hybrid_kv.report.run import Group

Asking = Literal["after", "before", "none"]
"""When the question came: after the eviction, before it, or never (the model read on)."""


class Counters(Group):
    """Costs of decoding, as the runtime counted them.

    attended_tokens: entries that a query head attended in a step, on average; attended_ratio: over
    those of full attention. read_bytes: that a step of one token reads, see `Work`: keys, values,
    codes, digests, what indexes scan and moments.
    device_bytes, host_bytes: keys and values held at the end, and indexes on the host.
    ms_per_token: median of the steps of one token. missed_mass: share of the softmax over all of
    the context and what followed it that no exact attention read, dropped entries included;
    mass_error: of the mass of that softmax, what was estimated too much, or is missing below 0;
    output_error: relative distance of a head's output from exact attention's; all by looking at all
    heads in a few steps. recall: of the exact best cold entries, those that a search ranked.
    """

    attended_tokens: float | None = None
    attended_ratio: float | None = None
    read_bytes: float | None = None
    device_bytes: float | None = None
    host_bytes: float | None = None
    ms_per_token: float | None = None
    missed_mass: float | None = None
    mass_error: float | None = None
    output_error: float | None = None
    recall: float | None = None


class Cell(Group):
    """One method under one budget on one context.

    method: as it was asked for, with settings; budget: as it was asked for, None where the method
    has none. scores: one per question, 0 to 1; depths: where in the context each answer stands, 0
    to 1, None where it stands in many places; answers: what the model wrote. nats: of every token
    that was read, by the method's predictions; full_nats: by full attention's; kl: of the method's
    from these; agrees: whether the likeliest token is the same. error: why there is no result.
    """

    task: str
    context_tokens: int
    sample: int
    asking: Asking
    method: str
    budget: str | None
    config: dict[str, Any]
    scores: tuple[float, ...] = ()
    depths: tuple[float | None, ...] = ()
    answers: tuple[str, ...] = ()
    nats: tuple[float, ...] = ()
    full_nats: tuple[float, ...] = ()
    kl: tuple[float, ...] = ()
    agrees: tuple[bool, ...] = ()
    counters: Counters = Counters()
    seconds: float = 0.0
    error: str | None = None


class Interval(Group):
    """A mean with its 95% bootstrap interval; null in summaries that left the interval out."""

    mean: float
    low: float | None = None
    high: float | None = None


class DepthScore(Group):
    """The mean score of questions whose answers stand in one part of their contexts."""

    low: float
    high: float
    score: float
    questions: int


class EvalRow(Group):
    """One method under one budget on one task: all samples together.

    samples: contexts; questions: answered, or tokens read. score: of answers, 0 to 1; of reading,
    the share of tokens whose likeliest prediction is full attention's. nats_beyond: nats per token
    beyond full attention's. depths: where the score depends on one place. error: why samples are
    missing. refused: the method cannot be given so small a budget, and nothing was run.
    """

    task: str
    context_tokens: int
    asking: Asking
    method: str
    budget: str | None
    samples: int
    questions: int
    score: Interval | None = None
    nats: float | None = None
    nats_beyond: Interval | None = None
    kl: Interval | None = None
    counters: Counters = Counters()
    depths: tuple[DepthScore, ...] = ()
    config: dict[str, Any] = Field(default_factory=dict)
    error: str | None = None
    refused: bool = False


# Tables: methods downwards, tasks to the right, as papers print them ------------------------------

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
    return [f"{row.nats_beyond.mean:+z.4f}", f"{row.kl.mean:z.4f}", _share(_mean(row))]


def _cost_cells(found: Counters) -> list[str]:
    return [
        NOTHING if found.attended_tokens is None else f"{found.attended_tokens:,.0f}",
        NOTHING if found.attended_ratio is None else f"{100 * found.attended_ratio:.1f}%",
        short_bytes(found.read_bytes),
        short_bytes(found.device_bytes),
        short_bytes(found.host_bytes),
        NOTHING if found.ms_per_token is None else f"{found.ms_per_token:.3g}",
        _share(found.missed_mass),
        NOTHING if found.mass_error is None else f"{found.mass_error:+z.3f}",
        _share(found.output_error),
        _share(found.recall),
    ]


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def _number(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value
