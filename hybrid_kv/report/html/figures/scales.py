"""From values to pixels, and where the ticks go."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

LOG_RATIO = 8.0
"""An axis is logarithmic where the largest value is more than this many times the smallest."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from low to high on the pixels from start to end, which may run backwards."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value; what lies outside is put on the edge."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    def ticks(self, most: int = 7) -> list[float]:
        """Round values inside, at most `most` where that is possible."""
        return _decades(self, most) if self.log else _steps(self, most)


def fitted(values: Iterable[float], start: float, end: float, *, log: bool | None = None) -> Scale:
    """A scale on which all values lie with some air; linear ones begin at zero."""
    known = [value for value in values if value > 0] or [1.0]
    least, most = min(known), max(known)
    if log or (log is None and most / least > LOG_RATIO):
        return Scale(_round_down(least / 1.15), _round_up(most * 1.1), start, end, log=True)
    return Scale(0.0, _round_up_step(most * 1.04), start, end)


def _steps(scale: Scale, most: int) -> list[float]:
    step = _step((scale.high - scale.low) / max(1, most - 1))
    first = math.ceil(scale.low / step - 1e-9)
    last = math.floor(scale.high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _decades(scale: Scale, most: int) -> list[float]:
    powers = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
    ticks: list[float] = []
    for digits in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        edge = 1 + 1e-9
        ticks = [tick for tick in ticks if scale.low / edge <= tick <= scale.high * edge]
        if len(ticks) <= most:
            break
    return ticks


def _step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1, 2, 2.5, 5, 10) if digit * power >= rough * 0.999)


def _round_up_step(value: float) -> float:
    step = _step(value / 5)
    return step * math.ceil(value / step - 1e-9)


def _round_down(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return max(d * power for d in (1, 1.5, 2, 3, 4, 5, 7) if d * power <= value * (1 + 1e-9))


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return min(d * power for d in (1, 1.5, 2, 3, 4, 5, 7, 10) if d * power >= value * (1 - 1e-9))
