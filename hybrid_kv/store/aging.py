"""What an index learns from once more, when decoding has left the positions it was made for."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_kv.rotary import Samples
from hybrid_kv.store.memory import allocate

KEPT_POSITIONS = 1024
"""Of the prompt's samples, and of the latest queries, those that are kept to learn from again."""


class Aging:
    """Samples of an index's prompt, and the latest queries that it was asked.

    Attributes:
        num_keys: keys that were there when it learned last.
        stand: where the queries stood, in words.
    """

    def __init__(self, samples: Samples, num_keys: int) -> None:
        self.num_keys, self.stand = num_keys, samples.describe()
        self._prompt, self._prompt_keys = samples.thinned(KEPT_POSITIONS), num_keys
        self._ring: Tensor | None = None  # [Hkv, G, KEPT_POSITIONS, D]
        # Positions of its queries. Neither is one of inference mode, which may begin or end.
        self._asked = allocate([KEPT_POSITIONS], torch.int64, torch.device("cpu"), 0)
        self._count = 0

    def observe(self, queries: Tensor, num_keys: int) -> None:
        """Takes the queries [Hkv, M, D] of a search over so many keys; steps of one token only."""
        heads, group, _, dim = self._prompt.queries.shape
        if queries.shape != (heads, group, dim):
            return
        if self._ring is None:
            size = (heads, group, KEPT_POSITIONS, dim)
            self._ring = allocate(size, queries.dtype, queries.device)
        place = self._count % KEPT_POSITIONS
        self._ring[:, :, place] = queries
        # Where the keys behind the prompt's are counted, to a page: samples are spread far wider.
        self._asked[place] = self._prompt.first + num_keys - self._prompt_keys
        self._count += 1

    def renew(self, num_keys: int) -> Samples:
        """What to learn from now that so many keys are there, turned to where decoding is."""
        samples = self._prompt
        if self._ring is not None:
            kept = min(self._count, KEPT_POSITIONS)
            order = (torch.arange(kept) + self._count - kept) % KEPT_POSITIONS
            asked = self._ring[:, :, order].to(samples.queries.dtype)
            samples = samples.joined(asked, self._asked[order])
        first = self._prompt.first + num_keys - self._prompt_keys
        samples = samples.ahead(first, self._prompt.horizon)
        self.num_keys, self.stand = num_keys, samples.describe()
        return samples

    @property
    def memory_bytes(self) -> int:
        ring = 0 if self._ring is None else self._ring.nbytes
        return self._prompt.queries.nbytes + ring
