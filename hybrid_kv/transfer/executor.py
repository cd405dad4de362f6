"""What the runtime needs of an executor."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Executor(Protocol):
    """Decides when and where work beside the device runs.

    What is computed never depends on it; what serves until a build in the background is done does.
    """

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Begins work that the running step waits for (a cold search)."""
        ...

    def background(self, work: Callable[[], None]) -> Future[None]:
        """Begins work that no step waits for (an index build).

        The future can be cancelled until the work begins.
        """
        ...

    def close(self) -> None:
        """Forgets work in the background that has not begun, and waits for the one that has."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """The same values in host memory."""
        ...

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The same values on `device`."""
        ...
