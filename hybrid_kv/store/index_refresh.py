"""Queries from which an index learns again, when decoding has left the places it was made for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from copy import copy
from typing import NamedTuple, Self

import torch
from torch import Tensor

from hybrid_kv.rotary import Samples

PROMPT, LATEST, SPREAD = 768, 512, 768
"""Positions that are learned from again: of the prompt's samples, the latest that were asked, and
at most so many of those between. Fewer of a short context; see `room`."""
_LEAST = 32


def room(most: int, num_keys: int, group: int) -> int:
    """Number of positions, of `most`, that are kept beside a number of keys.

    All of PROMPT, LATEST and SPREAD together are no more rows of queries than there are keys, half
    of what keys and values take: else those of a short context would be several times its size.
    """
    every = PROMPT + LATEST + SPREAD
    return min(most, max(_LEAST, most * num_keys // (every * group)))


class AskedQuery(NamedTuple):
    """Queries, in the order of [Hkv, G, D], and how many keys there were when they came."""

    queries: Tensor
    num_keys: int


class RecentQueries:
    """The latest queries that were asked, and an even part of those before them.

    The latest alone would tell nothing of thousands of tokens that were generated before them. Of
    those every stride-th is kept, and the stride doubles when they are too many, so that the part
    stays even and bounded without knowing how much will come.

    latest, spread: oldest first.

    Args:
        group: G.
    """

    def __init__(self, group: int) -> None:
        self._group = group
        self.latest: deque[AskedQuery] = deque()
        self.spread: list[AskedQuery] = []
        self._stride, self._passed, self._num_keys = 1, 0, -1

    def __len__(self) -> int:
        return len(self.spread) + len(self.latest)

    def __iter__(self) -> Iterator[AskedQuery]:
        """Oldest first."""
        yield from self.spread
        yield from self.latest

    def take(self, asked: AskedQuery) -> None:
        """Takes what was asked behind all others."""
        self.latest.append(asked)
        if asked.num_keys != self._num_keys:  # a page has come, or gone
            self._num_keys = asked.num_keys
            self._most_latest = room(LATEST, asked.num_keys, self._group)
            self._most_spread = room(SPREAD, asked.num_keys, self._group)
        if len(self.latest) <= self._most_latest:
            return
        older = self.latest.popleft()
        if self._passed % self._stride == 0:
            if len(self.spread) >= self._most_spread:
                self.spread, self._stride = self.spread[::2], 2 * self._stride
            self.spread.append(older)
        self._passed += 1

    def behind(self, count: int) -> Self:
        """The same, counted without the first `count` keys."""
        new = copy(self)
        new._num_keys = -1
        new.latest = deque(AskedQuery(q, keys - count) for q, keys in self.latest)
        new.spread = [AskedQuery(q, keys - count) for q, keys in self.spread]
        return new

    @property
    def memory_bytes(self) -> int:
        return sum(asked.queries.nbytes for asked in self)


class IndexRefresh:
    """Samples of an index's prompt, and queries that it was asked since.

    Args:
        prompt_keys: keys that were there when the prompt ended, where that is not now.

    Attributes:
        prompt: those samples, thinned; prompt_keys: see above.
        num_keys: keys that were there when it learned last.
        stand: where the queries stood, in words.
        group: G, queries of a KV head in a step of one token; only those are of use. size: numbers
            in the queries of such a step.
        asked: what was asked since.
    """

    def __init__(self, samples: Samples, num_keys: int, prompt_keys: int | None = None) -> None:
        self.num_keys, self.stand = num_keys, samples.describe()
        self.prompt_keys = num_keys if prompt_keys is None else prompt_keys
        heads, self.group, _, dim = samples.queries.shape
        self.size = heads * self.group * dim
        self.prompt = samples.thinned(room(PROMPT, self.prompt_keys, self.group))
        self.asked = RecentQueries(self.group)

    def behind(self, count: int) -> IndexRefresh:
        """The same for an index of the entries that follow the first `count` of this one's."""
        new = copy(self)
        new.num_keys, new.prompt_keys = 0, self.prompt_keys - count
        new.asked = self.asked.behind(count)
        return new

    def ask(self, queries: Tensor, position: int) -> None:
        """Takes queries as `note`, asked at a position."""
        self.note(queries, position - self.prompt.first + self.prompt_keys)

    def note(self, queries: Tensor, num_keys: int) -> None:
        """Takes queries of one token, which so many keys were searched for.

        Args:
            queries: in the order of [Hkv, G, D]; it owns their memory from now on.
        """
        self.asked.take(AskedQuery(queries, num_keys))

    def forget_asked(self) -> None:
        """Only the prompt is learned from again."""
        self.asked = RecentQueries(self.group)

    def renew(self, num_keys: int) -> Samples:
        """Queries to learn from now that so many keys are there, turned to where decoding is.

        The latest come first and those that are spread last: an index checks itself on the last
        ones, and neighbours would tell what they found (docs/lab.md).
        """
        samples, first = self.prompt, self.prompt.first - self.prompt_keys
        if asked := [*self.asked.latest, *self.asked.spread]:
            heads, _, _, dim = samples.queries.shape
            each = [one.queries.reshape(heads, self.group, dim) for one in asked]
            queries = torch.stack(each, 2).to(samples.queries.dtype)
            # Where the keys behind the prompt's are counted, to a page: samples are spread far
            # wider.
            positions = torch.tensor([first + one.num_keys for one in asked])
            samples = samples.joined(queries, positions, before=len(self.asked.latest))
        samples = samples.ahead(first + num_keys, self.prompt.horizon)
        self.num_keys, self.stand = num_keys, samples.describe()
        return samples

    @property
    def memory_bytes(self) -> int:
        return self.prompt.queries.nbytes + self.asked.memory_bytes
