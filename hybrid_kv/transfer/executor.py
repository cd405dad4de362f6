"""The interface of executors, and the executor that does everything at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from hybrid_kv.ops.upload import bus_copies
from hybrid_kv.store import all_finite
from hybrid_kv.store.index_builder import run_into
from hybrid_kv.types import PartialAttention

Work: TypeAlias = Callable[[Tensor], PartialAttention]
"""Work of a device: attention by queries."""


class Transfer(Protocol):
    """A tensor on its way to the host."""

    @property
    def arrived(self) -> bool:
        """Whether `open` would return at once."""
        ...

    def open(self) -> Tensor:
        """The values in host memory, as soon as they are there."""
        ...


@dataclass(frozen=True, slots=True)
class CompletedTransfer:
    """A transfer that was complete when it began."""

    tensor: Tensor

    @property
    def arrived(self) -> bool:
        return True

    def open(self) -> Tensor:
        return self.tensor


class Executor(Protocol):
    """Decides when entries and queries travel, and where index builds run.

    What is computed never depends on it; what serves until a build in the background is done does.

    at_once: whether nothing is ever under way, so that what lies on the host need not be sent.
    """

    at_once: bool

    def send(self, tensor: Tensor, into: Tensor | None = None) -> Transfer:
        """Begins to move a tensor to the host; until it has arrived it must not be written.

        Args:
            into: [H, ...] host memory of the same shape and dtype, each of whose H blocks is
                contiguous, as those of `tensor` must be then; None for memory of its own.
        """
        ...

    def offload(self, k: Tensor, v: Tensor, into: tuple[Tensor, Tensor]) -> Transfer:
        """Begins to move entries k, v [H, n, D] to host memory; see `send`.

        Returns:
            [] bool, whether all of them are finite. When it has been opened, they are there.
        """
        ...

    def keep(self, tensor: Tensor) -> Transfer:
        """As `send`, of what may be large and stays on the host for long, in memory of its own."""
        ...

    def deliver(self, part: PartialAttention, device: torch.device) -> PartialAttention:
        """A partial attention computed on the host, for what `device` computes from now on."""
        ...

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A tensor in host memory, for what `device` computes from now on."""
        ...

    def repeat(
        self, owner: object, signature: Hashable, work: Work, given: Tensor
    ) -> PartialAttention:
        """`work(given)`, or what a recording of it computes, which does the same.

        Args:
            owner: whose work it is; with it the recording goes.
            signature: changes with whatever a recording would hold fixed: all but the values of
                `given` and of tensors that stay in place.
        """
        ...

    def background(self, work: Callable[[], None]) -> Future[None]:
        """Begins work that no step waits for (an index build).

        The future can be cancelled until the work begins.
        """
        ...

    def ahead(self, work: Callable[[], None]) -> Future[None]:
        """Begins work on the host that a later layer of the same step waits for.

        Works one after another, in their order, and beside the caller unless nothing is ever under
        way. An error of the work is the future's.
        """
        ...

    def building(self) -> AbstractContextManager[None]:
        """A block in which an index is built: no graph of a device is captured beside it."""
        ...

    def close(self) -> None:
        """Forgets work in the background that has not begun, and waits for the one that has."""
        ...


class SyncExecutor:
    """Moves and builds when it is asked to; errors of a build come out of its future."""

    at_once = True

    def send(self, tensor: Tensor, into: Tensor | None = None) -> Transfer:
        if into is None:
            return CompletedTransfer(tensor.to("cpu"))
        # On the host one copy does it; of a device each locked range is one of its own.
        for target, source in [(into, tensor)] if tensor.is_cpu else bus_copies(into, tensor):
            target.copy_(source)
        return CompletedTransfer(into)

    def offload(self, k: Tensor, v: Tensor, into: tuple[Tensor, Tensor]) -> Transfer:
        self.send(k, into[0])
        self.send(v, into[1])
        return CompletedTransfer(all_finite(k, v).to("cpu"))

    def keep(self, tensor: Tensor) -> Transfer:
        return self.send(tensor)

    def deliver(self, part: PartialAttention, device: torch.device) -> PartialAttention:
        return PartialAttention(self.to_device(part.out, device), self.to_device(part.lse, device))

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        return tensor.to(device)

    def repeat(
        self, owner: object, signature: Hashable, work: Work, given: Tensor
    ) -> PartialAttention:
        return work(given)

    def background(self, work: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        run_into(done, work)
        return done

    def ahead(self, work: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        run_into(done, work)
        return done

    def building(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """Nothing is ever left to do."""
