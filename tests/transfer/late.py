"""A stand-in for the ways to a GPU: nothing has arrived until somebody waits for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_kv.transfer.cuda import Copies


class LateLane:
    """Copies in order, as a stream does, but not before a later point is waited for.

    What has not been copied yet reads as NaN or as a large number, so that whoever looks too early
    is found out; and what is written over too early arrives wrong. Any thread may wait.
    """

    def __init__(self) -> None:
        self.copying = threading.Lock()
        self.pending: deque[LateMark] = deque()
        self.staged: list[tuple[int, ...]] = []
        self.returned = 0
        self.pieces: list[Tensor] = []

    def out(self, copies: Copies) -> LateMark:
        mark = LateMark(self, copies)
        for target, _ in copies:
            _spoil(target)
        self.pending.append(mark)
        return mark

    def back(self, target: Tensor, source: Tensor) -> None:
        self.returned += 1
        self.pieces.append(source)
        target.copy_(source)

    def stage(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.staged.append(tuple(size))
        return torch.empty(list(size), dtype=dtype)


class LateMark:
    def __init__(self, lane: LateLane, copies: Copies) -> None:
        self.lane, self.copies, self.waits = lane, copies, 0

    def query(self) -> bool:
        return self not in self.lane.pending

    def synchronize(self) -> None:
        self.waits += 1
        with self.lane.copying:  # a mark is passed when its copies are made, not before
            while self in self.lane.pending:
                for target, source in self.lane.pending[0].copies:
                    target.copy_(source)
                self.lane.pending.popleft()


def _spoil(target: Tensor) -> None:
    if target.is_floating_point():
        target.fill_(torch.nan)
    elif target.dtype is torch.bool:
        target.fill_(False)
    else:
        target.fill_(torch.iinfo(target.dtype).max)
