"""The choice of a replica for a request: where its prefix lies, else where least is to do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from hybrid_kv.errors import BusyError, QueueFullError
from hybrid_kv.saved.identity import chain_of

R = TypeVar("R", bound=Hashable)

_BLOCK_TOKENS = 32
"""Of one hash; an engine continues no shorter prefix."""
_LEAST_SHARE = 2
"""A prefix decides if it is one part in so many of a prompt: else one system prompt would bring
every request to the same replica."""
_MOST_BLOCKS = 2**17
"""Hashes that are remembered of a replica: of 4 million tokens, in some 20 MiB."""


@dataclass(slots=True)
class _Load:
    """Requests that a replica has, and the hashes of prompts that it had, the latest last."""

    open: int = 0
    known: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def shared(self, blocks: Sequence[bytes]) -> int:
        """Blocks at the beginning of a prompt that the replica has computed."""
        return next((n for n in range(len(blocks), 0, -1) if blocks[n - 1] in self.known), 0)

    def learn(self, blocks: Sequence[bytes]) -> None:
        for block in blocks:
            self.known.pop(block, None)
            self.known[block] = None
        while len(self.known) > _MOST_BLOCKS:
            self.known.popitem(last=False)


class Router(Generic[R]):
    """Distributes requests over replicas; for one thread at a time.

    Args:
        most_running: requests that a replica computes at a time; beyond, a prefix elsewhere counts
            less than a free place.
        most_open: requests that a replica has at most.
    """

    def __init__(self, most_running: int, most_open: int) -> None:
        self._most_running, self._most_open = most_running, most_open
        self._loads: dict[R, _Load] = {}

    def __iter__(self) -> Iterator[R]:
        return iter(self._loads)

    def add(self, replica: R) -> None:
        """Takes a replica in, which has computed nothing yet."""
        self._loads[replica] = _Load()

    def remove(self, replica: R) -> None:
        """Forgets a replica and what it has computed; harmless when it is not there."""
        self._loads.pop(replica, None)

    def take(self, ids: Sequence[int]) -> R:
        """The replica for a prompt; `release` must follow.

        Raises:
            BusyError: there is none.
            QueueFullError: all of them have as many requests as they may.
        """
        if not self._loads:
            raise BusyError("no replica is there to answer; ask again when a node has come back")
        open_to = {one: load for one, load in self._loads.items() if load.open < self._most_open}
        if not open_to:
            raise QueueFullError(
                f"at most {self._most_open} requests may be open on each of {len(self._loads)} "
                "replicas, got one more; try again later"
            )
        free = {one: load for one, load in open_to.items() if load.open < self._most_running}
        blocks = chain_of(torch.tensor(ids), _BLOCK_TOKENS)

        def rank(pair: tuple[R, _Load]) -> tuple[int, int]:
            shared = pair[1].shared(blocks)
            return shared if shared * _LEAST_SHARE >= len(blocks) else 0, -pair[1].open

        replica, load = max((free or open_to).items(), key=rank)
        load.open += 1
        load.learn(blocks)
        return replica

    def release(self, replica: R) -> None:
        """A request that was given to a replica has ended; harmless when the replica has left."""
        if (load := self._loads.get(replica)) is not None:
            load.open -= 1
