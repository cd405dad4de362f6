"""Everything in the caller's thread, at once: CPU-only machines, tests, debugging."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from hybrid_kv.ops.upload import bus_copies
from hybrid_kv.store import all_finite
from hybrid_kv.store.outcome import run_into
from hybrid_kv.transfer.executor import Arrived, Parcel, Work
from hybrid_kv.types import PartialAttention


class SyncExecutor:
    """Moves and builds when it is asked to; errors of a build come out of its future."""

    at_once = True

    def send(self, tensor: Tensor, into: Tensor | None = None) -> Parcel:
        if into is None:
            return Arrived(tensor.to("cpu"))
        # On the host one copy does it; of a device each locked range is one of its own.
        for target, source in [(into, tensor)] if tensor.is_cpu else bus_copies(into, tensor):
            target.copy_(source)
        return Arrived(into)

    def offload(self, k: Tensor, v: Tensor, into: tuple[Tensor, Tensor]) -> Parcel:
        self.send(k, into[0])
        self.send(v, into[1])
        return self.send(all_finite(k, v))

    def keep(self, tensor: Tensor) -> Parcel:
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
