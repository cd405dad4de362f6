"""Guesses of the next tokens from what stands in the text already.

Source: prompt lookup decoding (Saxena 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MATCHED = 4
"""Tokens that must have stood before a guess as they stand now."""


class PromptLookup:
    """Tokens of a sequence, prompt and answer, in which its end is looked up.

    num_tokens: so many.

    Args:
        ids: tokens so far.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids, self.num_tokens = np.array(ids, dtype=np.int64), len(ids)

    def add(self, token: int) -> None:
        """Takes the next token."""
        if self.num_tokens == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(self.num_tokens + 64, np.int64)])
        self._ids[self.num_tokens] = token
        self.num_tokens += 1

    def guess(self, more: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens that followed the last tokens where these stood before, the latest
        time; [] where they did not.

        Args:
            more: tokens behind those that were added.
        """
        ids = np.concatenate([self._ids[: self.num_tokens], np.array(more, dtype=np.int64)])
        if len(ids) <= _MATCHED or count < 1:
            return []
        ends = np.flatnonzero(ids[_MATCHED - 1 : -1] == ids[-1]) + _MATCHED - 1
        for back in range(1, _MATCHED):
            ends = ends[ids[ends - back] == ids[-1 - back]]
        if not len(ends):
            return []
        first = int(ends[-1]) + 1
        return list(map(int, ids[first : first + count]))
