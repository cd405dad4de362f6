"""How much of a prompt fits into the time for which others can be held up."""

from __future__ import annotations

from collections import deque
from math import sqrt

import numpy as np

_KNOWN = 24
"""Chunks that are looked back on: the machine may be busier now than it was."""
_FIRST, _LEAST = 128, 16
"""Tokens of the very first chunk, and of the smallest."""
_EVEN = 32
"""Tokens of which a chunk has a multiple: torch's products prepare for every new number of rows
again, and odd ones take longer (1.3 to 2.1 times, 64 to 192 rows of 256 channels on a Zen 5)."""
_LOOKED_BACK = 16
"""Chunks whose delay the next one allows for."""
_LEAST_DELAY, _MOST_DELAY = 1.18, 4.0
"""Times as long as planned that a chunk is expected to take, at least and at most."""


class PrefillPace:
    """Predicts by the chunks before: a token takes some time, and more for each one before it.

    A machine that others use takes longer now and then; the worst of the latest chunks says how
    much longer.
    """

    def __init__(self) -> None:
        self._chunks: deque[tuple[int, int, float]] = deque(maxlen=_KNOWN)
        self._delays: deque[float] = deque(maxlen=_LOOKED_BACK)

    def note(self, first: int, count: int, seconds: float) -> None:
        """A chunk of `count` tokens took so long, behind `first` others."""
        if self._chunks:
            self._delays.append(seconds / self.seconds(first, count))
        self._chunks.append((first, count, seconds))

    def seconds(self, first: int, count: int) -> float:
        """What `count` tokens behind `first` others take where nothing delays them; of their
        number alone while nothing is known.
        """
        if not self._chunks:
            return float(count)
        each, before = self._costs()
        return count * (each + before * (first + count / 2))

    def tokens(self, first: int, seconds: float, most: int) -> int:
        """How many tokens behind `first` others take no more than `seconds`, at most `most`.

        At least a few, whatever they take, for else a prompt would never end; but for these and the
        last ones a multiple of `_EVEN`.
        """
        if not self._chunks:
            return min(most, _FIRST)
        each, before = self._costs()
        # count * (each + before * (first + count / 2)) = seconds
        own, time = each + before * first, seconds / self._delay
        count = int(2 * time / (own + sqrt(own**2 + 2 * before * time)))
        if count >= most:
            return most
        return max(min(_LEAST, most), count // _EVEN * _EVEN)

    @property
    def _delay(self) -> float:
        return min(_MOST_DELAY, max(_LEAST_DELAY, *self._delays, 0.0))

    def _costs(self) -> tuple[float, float]:
        """Seconds of a token, and of a pair of tokens of which one attends to the other."""
        first, count, seconds = np.array(self._chunks, dtype=np.float64).T
        pairs = count * (first + count / 2)
        parts = np.stack([count, pairs], 1)
        found, *_ = np.linalg.lstsq(parts / seconds[:, None], np.ones(len(seconds)), rcond=None)
        each, before = float(found[0]), float(found[1])
        if before <= 0:  # too few chunks, or too much alike, to tell the two apart
            return float((seconds / count).max()), 0.0
        if each <= 0:
            return 1e-9, float((seconds / pairs).max())
        return each, before
