"""Everything in the caller's thread, at once: CPU-only machines, tests, debugging."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class SyncExecutor:
    """Runs work when it is started; errors come out of `result()`, as from any executor."""

    def start(self, work: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        return done

    def background(self, work: Callable[[], None]) -> Future[None]:
        return self.start(work)

    def close(self) -> None:
        """Nothing is ever left to do."""

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu")

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        return tensor.to(device)
