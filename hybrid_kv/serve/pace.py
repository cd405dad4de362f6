"""How much of a prompt fits into the time for which others can be held up."""

from __future__ import annotations

from collections import deque
from math import sqrt

import numpy as np

_KNOWN = 24
"""Chunks that are looked back on: the machine may be busier now than it was."""
_FIRST, _LEAST = 128, 16
"""Tokens of the very first chunk, and of the smallest; where no stream waits, none is smaller than
the first, for else what a chunk costs whatever its length is paid again for every few tokens."""
_GROWTH = 4
"""Times as long as the longest known chunk that the next one is at most."""
_EVEN = 32
"""Tokens of which a chunk has a multiple: torch's products prepare for every new number of rows
again, and odd ones take longer (1.3 to 2.1 times, 64 to 192 rows of 256 channels on a Zen 5)."""
_EXACT = 1e-12
"""Sum of squared relative errors below which a prediction needs no further parts."""
_LOOKED_BACK = 16
"""Chunks whose delay the next one allows for."""
_LEAST_DELAY, _MOST_DELAY = 1.18, 4.0
"""Times as long as planned that a chunk is expected to take, at least and at most."""


class PrefillPace:
    """Predicts by the chunks before: a chunk takes some time whatever its length, each token of it
    some more, and each one again for every token before it.

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
        fixed, each, before = self._costs()
        return fixed + count * (each + before * (first + count / 2))

    def tokens(self, first: int, seconds: float, most: int, *, alone: bool = False) -> int:
        """How many tokens behind `first` others take no more than `seconds`, at most `most`.

        At least a few, whatever they take and if no time is left, for else a prompt would never
        end; but for these and the last ones a multiple of `_EVEN`.

        Args:
            alone: no stream waits.
        """
        if not self._chunks:
            return min(most, _FIRST)
        fixed, each, before = self._costs()
        # fixed + count * (each + before * (first + count / 2)) = seconds
        own, time = each + before * first, max(0.0, seconds / self._delay - fixed)
        count = int(2 * time / (own + sqrt(own**2 + 2 * before * time)))
        count = min(count, _GROWTH * max(_FIRST, *(known for _, known, _ in self._chunks)))
        if count >= most:
            return most
        return max(min(_FIRST if alone else _LEAST, most), count // _EVEN * _EVEN)

    @property
    def _delay(self) -> float:
        return min(_MOST_DELAY, max(_LEAST_DELAY, *self._delays, 0.0))

    def _costs(self) -> tuple[float, float, float]:
        """Seconds of a chunk whatever its length, of a token, and of a pair of tokens of which one
        attends to the other; none is negative.
        """
        first, count, seconds = np.array(self._chunks, dtype=np.float64).T
        pairs = count * (first + count / 2)
        shares = np.stack([np.ones_like(count), count, pairs], 1) / seconds[:, None]
        best, error = None, np.inf
        for parts in ([1, 2], [0, 1], [0, 1, 2]):  # more of them only where they explain more
            if parts[0] == 0 and len(seconds) < len(parts):
                continue
            found, *_ = np.linalg.lstsq(shares[:, parts], np.ones(len(seconds)), rcond=None)
            off = float(((shares[:, parts] @ found - 1) ** 2).sum())
            if (found > 0).all() and off < error / 2 and error > _EXACT:
                best, error = np.zeros(3), off
                best[parts] = found
        if best is None:  # too few chunks, or too much alike, to tell them apart
            return 0.0, float((seconds / count).max()), 0.0
        return float(best[0]), float(best[1]), float(best[2])
