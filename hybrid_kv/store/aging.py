"""What an index learns from once more, when decoding has left the positions it was made for."""

from __future__ import annotations

from collections import deque
from copy import copy

import torch
from torch import Tensor

from hybrid_kv.rotary import Samples

KEPT_POSITIONS = 1024
"""Of the prompt's samples, and of the latest queries, those that are kept to learn from again."""


class Aging:
    """Samples of an index's prompt, and the latest queries that it was asked.

    Args:
        prompt_keys: keys that were there when the prompt ended, where that is not now.

    Attributes:
        prompt: those samples, thinned; prompt_keys: see above.
        num_keys: keys that were there when it learned last.
        stand: where the queries stood, in words.
        group: G, queries of a KV head in a step of one token; only those are of use.
        asked: the latest queries [Hkv, G, D], copies, each with the number of keys searched.
    """

    def __init__(self, samples: Samples, num_keys: int, prompt_keys: int | None = None) -> None:
        self.num_keys, self.stand = num_keys, samples.describe()
        self.prompt = samples.thinned(KEPT_POSITIONS)
        self.prompt_keys = num_keys if prompt_keys is None else prompt_keys
        self.group = samples.queries.shape[1]
        self.asked: deque[tuple[Tensor, int]] = deque(maxlen=KEPT_POSITIONS)

    def behind(self, count: int) -> Aging:
        """The same for an index of the entries that follow the first `count` of this one's."""
        new = copy(self)
        new.num_keys, new.prompt_keys = 0, self.prompt_keys - count
        new.asked = deque(((asked, keys - count) for asked, keys in self.asked), KEPT_POSITIONS)
        return new

    def ask(self, queries: Tensor, position: int) -> None:
        """Takes queries [Hkv, G, D], whose memory it owns from now on, asked at a position."""
        self.asked.append((queries, position - self.prompt.first + self.prompt_keys))

    def renew(self, num_keys: int) -> Samples:
        """What to learn from now that so many keys are there, turned to where decoding is."""
        samples, first = self.prompt, self.prompt.first - self.prompt_keys
        if self.asked:
            queries = torch.stack([queries for queries, _ in self.asked], 2)
            # Where the keys behind the prompt's are counted, to a page: samples are spread far
            # wider.
            positions = torch.tensor([first + count for _, count in self.asked])
            samples = samples.joined(queries.to(samples.queries.dtype), positions)
        samples = samples.ahead(first + num_keys, self.prompt.horizon)
        self.num_keys, self.stand = num_keys, samples.describe()
        return samples

    @property
    def memory_bytes(self) -> int:
        asked = sum(queries.nbytes for queries, _ in self.asked)
        return self.prompt.queries.nbytes + asked
