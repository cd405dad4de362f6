"""Moving entries between tiers and running work beside the device, behind one protocol.

The executor of a GPU is `transfer.cuda`, which is loaded where there is one.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from queue import Empty, SimpleQueue
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError
from hybrid_kv.ops.native.library import work_alone
from hybrid_kv.store import all_finite
from hybrid_kv.store.index_builder import run_into
from hybrid_kv.types import PartialAttention

__all__ = ["Executor", "SyncExecutor", "ThreadExecutor", "Transfer"]


_CPUS_PER_THREAD = 4
_NICEST = 19

_Job: TypeAlias = tuple[list[Callable[[], None]], "Future[None]"]
"""Work in a list, which is emptied when the work is cancelled or begins: a job that waits for its
turn in vain shall not keep its keys."""

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

    def soon(self, work: Callable[[], None]) -> Future[None]:
        """Begins short work that the next step waits for (moments): no build is before it.

        It can be cancelled, as by `close`, until it begins.
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
        if tensor.is_cpu:
            into.copy_(tensor)
            return CompletedTransfer(into)
        from hybrid_kv.ops.pinned import bus_copies

        for target, source in bus_copies(into, tensor):
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

    def soon(self, work: Callable[[], None]) -> Future[None]:
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


class ThreadExecutor(SyncExecutor):
    """Runs work in the background beside the caller, in the order in which it came.

    Threads start with the first work. They end with `close`, with the executor, or with the
    process, which waits for the work that has begun. They share nothing with the threads that
    decoding uses, so that no step waits for them.

    Args:
        threads: that work in the background; None for `build_threads()`.

    Raises:
        ConfigError: HYBRID_KV_BUILD_THREADS is no number of threads.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._builders = _Crew(build_threads() if threads is None else threads, gives_way=True)
        self._helper = _Crew(1, gives_way=False)
        for crew in (self._builders, self._helper):
            # Not at exit: `_end_at_exit` waits for the threads too, which a collection must not.
            weakref.finalize(self, crew.end).atexit = False

    def background(self, work: Callable[[], None]) -> Future[None]:
        return self._builders.begin(work)

    def soon(self, work: Callable[[], None]) -> Future[None]:
        return self._helper.begin(work)

    def close(self) -> None:
        """See `Executor.close`; further work starts new threads."""
        for crew in (self._builders, self._helper):
            crew.end()
            crew.join()


class _Crew:
    """Threads that take jobs in turn. It does not know its executor, which it may outlive."""

    def __init__(self, size: int, *, gives_way: bool) -> None:
        self._size, self._gives_way = size, gives_way
        self._set_up()

    def _set_up(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()

    def begin(self, work: Callable[[], None]) -> Future[None]:
        if os.getpid() != self._process:  # a copy, which has none of the threads
            self._set_up()
        future: Future[None] = Future()
        held = [work]
        future.add_done_callback(lambda _: held.clear())
        self._jobs.put((held, future))
        self._grow()
        return future

    def _grow(self) -> None:
        if len(self._threads) == self._size:
            return
        name = f"hybrid-kv-build-{len(self._threads)}"
        # Daemons, because the process would else wait for them before it tells them to end.
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._threads.append(thread)
        _at_work.add(self)
        _wait_at_exit()
        thread.start()

    def end(self) -> None:
        """Cancels the jobs that have not begun; the threads end after those that have."""
        with suppress(Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    job[1].cancel()
        for _ in self._threads:
            self._jobs.put(None)

    def join(self) -> None:
        """Waits for the threads that were told to end."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        _at_work.discard(self)

    def _work(self) -> None:
        if self._gives_way:
            _give_way()
        work_alone()
        while (job := self._jobs.get()) is not None:
            held, future = job
            if future.set_running_or_notify_cancel():
                run_into(future, held.pop(), BaseException)
            del job, held, future  # nobody shall keep its keys while this thread waits


_at_work: set[_Crew] = set()


@cache
def _wait_at_exit() -> None:
    # Finalizers run in the reverse order of their making: builds are cancelled before this one.
    weakref.finalize(_Crew, _end_at_exit)


def _end_at_exit() -> None:
    for crew in list(_at_work):
        crew.end()
        crew.join()


def build_threads() -> int:
    """`HYBRID_KV_BUILD_THREADS`, or one per four CPUs that the process may use, at least one.

    Raises:
        ConfigError: it is no number of threads.
    """
    wanted = os.environ.get("HYBRID_KV_BUILD_THREADS", "")
    if not wanted:
        return max(1, len(os.sched_getaffinity(0)) // _CPUS_PER_THREAD)
    if not wanted.isdecimal() or not 1 <= int(wanted) <= 1024:
        raise ConfigError(
            f"HYBRID_KV_BUILD_THREADS must be a number of threads, 1..1024, got '{wanted}'; unset "
            "it for one per four CPUs"
        )
    return int(wanted)


def _give_way() -> None:
    """This thread runs where nobody else wants to: decoding goes first.

    A lower priority alone is not enough: a step of several threads waits for the last of them, and
    the scheduler lets a build finish its slice of a core first. It is taken where a sandbox refuses
    the policy. Only Linux has either by thread.
    """
    if sys.platform == "linux":
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        except OSError:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICEST)
