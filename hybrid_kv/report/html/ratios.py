"""How many times a run takes what another takes, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

RESAMPLES: Final = 2000
LEAST_STEPS: Final = 8
"""Fewer steps than this, and no interval is given."""

METHOD: Final = (
    "Ratio of the medians of the measured steps, second over first. The interval is the middle 95% "
    f"of {RESAMPLES:,} ratios from circular block bootstrap samples of both runs’ steps (blocks of "
    "the cube root of their number, because neighbouring steps are alike; fixed seed). With fewer "
    f"than {LEAST_STEPS} steps there is none. It covers how steps vary within these two runs, not "
    "how two runs on another day would differ; and of twenty rows that do not differ at all, about "
    "one is coloured by chance."
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Second over first; low and high bound the 95% interval, None where there is none."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def verdict(self) -> int:
        """-1: surely less, 1: surely more, 0: the interval holds 1 or there is none."""
        if self.low is None or self.high is None:
            return 0
        return 1 if self.low > 1 else -1 if self.high < 1 else 0


def ratio_of_medians(first: Sequence[float], second: Sequence[float]) -> Ratio:
    """The ratio of two runs' step times, with its interval where both have steps enough.

    Raises:
        ValueError: one of them is empty or its median is zero.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if not a.size or not b.size or not np.median(a):
        raise ValueError("a ratio needs steps of both runs that took time")
    value = float(np.median(b) / np.median(a))
    if min(a.size, b.size) < LEAST_STEPS:
        return Ratio(value)
    rng = np.random.default_rng(0)
    ratios = _medians(b, rng) / _medians(a, rng)
    low, high = np.quantile(ratios, [0.025, 0.975]).tolist()
    return Ratio(value, low, high)


def _medians(steps: npt.NDArray[np.float64], rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Medians of block bootstrap samples, [RESAMPLES]."""
    block = max(1, round(steps.size ** (1 / 3)))
    blocks = -(-steps.size // block)
    starts = rng.integers(steps.size, size=(RESAMPLES, blocks, 1))
    places = (starts + np.arange(block)).reshape(RESAMPLES, -1)[:, : steps.size] % steps.size
    medians: npt.NDArray[np.float64] = np.median(steps[places], axis=1)
    return medians
