"""Pinned arrays that are made before they are asked for.

Locking an array for a GPU touches all of it, some hundred milliseconds for a layer's keys at 128K.
The layers of a model ask for the same arrays one after the other, so the next one's are made in a
thread while it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from threading import Thread

import torch
from torch import Tensor

from hybrid_kv.store.memory import allocate

_HOST = torch.device("cpu")
_Kind = tuple[tuple[int, ...], torch.dtype]


class PinnedAhead:
    """Makes pinned arrays when they are asked for, or earlier. For one thread that asks."""

    def __init__(self) -> None:
        self._ready: dict[_Kind, list[Future[Tensor]]] = {}
        self._asked: list[_Kind] = []

    def take(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An array of undefined content, one that was made ahead if there is one.

        Raises:
            CapacityError: host memory does not suffice.
        """
        kind = tuple(size), dtype
        self._asked.append(kind)
        made = self._ready.get(kind)
        return made.pop(0).result() if made else _made(kind)

    def begin(self) -> None:
        """What is taken from here on is one layer's."""
        self._asked.clear()

    def repeat(self) -> None:
        """Begins to make, in a thread, what has been taken since `begin`; waits for nothing."""
        wanted = []
        for kind in self._asked:
            future: Future[Tensor] = Future()
            self._ready.setdefault(kind, []).append(future)
            wanted.append((kind, future))
        self._asked.clear()
        if wanted:
            Thread(target=_make_all, args=(wanted,), name="hybrid-kv-pin", daemon=True).start()

    def clear(self) -> None:
        """Gives up what nobody has asked for."""
        self._ready.clear()
        self._asked.clear()


def _made(kind: _Kind) -> Tensor:
    size, dtype = kind
    return allocate(size, dtype, _HOST, pinned=True)


def _make_all(wanted: list[tuple[_Kind, Future[Tensor]]]) -> None:
    while wanted:
        kind, future = wanted.pop(0)
        try:
            future.set_result(_made(kind))
        except BaseException as error:  # whoever asks for the array is told
            future.set_exception(error)
        del future
