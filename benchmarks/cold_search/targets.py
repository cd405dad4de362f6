"""The least work that reaches a goal: one setting of a search, found on calibration queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.cold_search.quality import Quality

STEP = 1.06
"""Neighbouring values of a ladder differ by about this factor."""


@dataclass(frozen=True)
class Target:
    """A goal: `metric` (of `Quality`) at least `value`."""

    metric: str
    value: float


@dataclass(frozen=True)
class Point:
    """A value of the knob for a goal; `calibrated` is what the calibration queries had there.

    reached: false where even the largest value missed the goal; value is then that of the best.
    """

    target: Target
    value: int
    calibrated: float
    reached: bool


def parse_targets(text: str) -> list[Target]:
    """From `recall=.95,mass=.994`; mass is over the oracle's.

    Raises:
        ValueError: another metric, or no number in 0..1.
    """
    names = {"recall": "recall", "mass": "mass_over_oracle"}
    targets = []
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in names or not 0 < float(value or "nan") <= 1:
            raise ValueError(f"a target is recall=VALUE or mass=VALUE in 0..1, got '{item}'")
        targets.append(Target(names[name], float(value)))
    return targets


def ladder(low: int, high: int) -> list[int]:
    """Whole numbers from low to high in steps of about 6%."""
    values = [low]
    while values[-1] < high:
        values.append(min(high, max(values[-1] + 1, round(values[-1] * STEP))))
    return values


def find_points(
    evaluate: Callable[[int], Quality], values: Sequence[int], targets: Sequence[Target]
) -> list[Point]:
    """The least value per target, by bisection: quality is taken to rise with the knob.

    Args:
        evaluate: quality of the calibration queries at a value; asked once per value.
        values: of the knob, rising.
    """
    known: dict[int, Quality] = {}

    def metric(place: int, name: str) -> float:
        if place not in known:
            known[place] = evaluate(values[place])
        return float(getattr(known[place], name))

    points = []
    for target in targets:
        last = len(values) - 1
        if metric(last, target.metric) < target.value:
            best = max(known, key=lambda place: getattr(known[place], target.metric))
            points.append(Point(target, values[best], metric(best, target.metric), False))
            continue
        low, high = -1, last
        while high - low > 1:
            middle = (low + high) // 2
            if metric(middle, target.metric) >= target.value:
                high = middle
            else:
                low = middle
        points.append(Point(target, values[high], metric(high, target.metric), True))
    return points
