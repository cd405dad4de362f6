"""From cells to rows: means over samples, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from hybrid_kv.report.evaluation import Cell, Counters, DepthScore, EvalRow, Interval

_RESAMPLES = 2000
_BLOCK = 16
"""Tokens in a row that are drawn together: neighbours are alike."""
_DEPTHS = 5


def rows_of(cells: Iterable[Cell]) -> Iterator[EvalRow]:
    """One row for each task, context, way of asking, method and budget, in the cells' order."""
    place: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        key = (cell.task, cell.context_tokens, cell.asking, cell.method, cell.budget)
        place.setdefault(key, []).append(cell)
    return (_row(sorted(group, key=lambda cell: cell.sample)) for group in place.values())


def interval(groups: Sequence[Sequence[float]], seed: int = 0) -> Interval | None:
    """The mean of all values and its 95% interval by resampling whole groups; None of no values.

    Values of a group are alike (questions on one context, tokens in a row), so that drawing them
    one by one would promise too much.
    """
    groups = [group for group in groups if group]
    if not groups:
        return None
    sums = np.array([sum(group) for group in groups])
    sizes = np.array([len(group) for group in groups])
    draw = np.random.default_rng(seed).integers(len(groups), size=(_RESAMPLES, len(groups)))
    means = sums[draw].sum(1) / sizes[draw].sum(1)
    low, high = np.percentile(means, [2.5, 97.5]).tolist()
    return Interval(mean=float(sums.sum() / sizes.sum()), low=low, high=high)


def _row(cells: Sequence[Cell]) -> EvalRow:
    first, done = cells[0], [cell for cell in cells if cell.error is None]
    reads = first.asking == "none"
    errors = [cell.error for cell in cells if cell.error is not None]
    beyond = [_difference(cell.nats, cell.full_nats) for cell in done]
    scores = [list(map(float, cell.agrees)) if reads else list(cell.scores) for cell in done]
    groups: Callable[[list[list[float]]], list[list[float]]] = _blocks if reads else _as_they_are
    return EvalRow(
        task=first.task,
        context_tokens=first.context_tokens,
        asking=first.asking,
        method=first.method,
        budget=first.budget,
        samples=len(done),
        questions=sum(map(len, scores)),
        score=interval(groups(scores)),
        nats=fmean(value for cell in done for value in cell.nats) if reads and done else None,
        nats_beyond=interval(_blocks(beyond)) if reads else None,
        kl=interval(_blocks([list(cell.kl) for cell in done])) if reads else None,
        counters=_mean_counters([cell.counters for cell in done]),
        depths=tuple(_depths(done)),
        config=first.config,
        error=errors[0] if errors else None,
    )


def _difference(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [value - other for value, other in zip(values, others, strict=True)]


def _as_they_are(samples: list[list[float]]) -> list[list[float]]:
    """Questions on one context are drawn together; those of a single context one by one."""
    return samples if len(samples) > 1 else [[value] for sample in samples for value in sample]


def _blocks(samples: list[list[float]]) -> list[list[float]]:
    return [s[i : i + _BLOCK] for s in samples for i in range(0, len(s), _BLOCK)]


def _mean_counters(found: Sequence[Counters]) -> Counters:
    means: dict[str, float | None] = {}
    for name in Counters.model_fields:
        values = [value for one in found if (value := getattr(one, name)) is not None]
        means[name] = fmean(values) if values else None
    return Counters(**means)


def _depths(cells: Sequence[Cell]) -> Iterator[DepthScore]:
    """Mean scores by fifths of the context; nothing where places do not matter."""
    pairs = [
        (min(_DEPTHS - 1, int(depth * _DEPTHS)), score)
        for cell in cells
        for depth, score in zip(cell.depths, cell.scores, strict=True)
        if depth is not None
    ]
    for part, group in groupby(sorted(pairs), key=lambda pair: pair[0]):
        scores: NDArray[np.float64] = np.array([score for _, score in group])
        yield DepthScore(
            low=part / _DEPTHS,
            high=(part + 1) / _DEPTHS,
            score=float(scores.mean()),
            questions=len(scores),
        )
