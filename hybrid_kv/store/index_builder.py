"""The builds of one extent's indexes: begun, waited for, taken or given up."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from traceback import format_exception
from typing import Protocol

from torch import Tensor

from hybrid_kv.ops.host_memory import give_back_freed
from hybrid_kv.plugins import Index
from hybrid_kv.rotary import Samples
from hybrid_kv.store.memory import Stamps

MakeIndex = Callable[[], Index]
BuildWork = Callable[[], None]


_log = logging.getLogger(__name__)


class BuildRunner(Protocol):
    """Runner of builds."""

    def here(self, build: BuildWork) -> None:
        """Runs a build that is waited for."""
        ...

    def beside(self, build: BuildWork, holds: int = 0) -> Future[None]:
        """Begins a build that need not be waited for; it may be done when this returns.

        Args:
            holds: bytes of host memory that are kept until it has ended.
        """
        ...


class InlineRunner:
    """All builds in the caller's thread, at once."""

    def here(self, build: BuildWork) -> None:
        build()

    def beside(self, build: BuildWork, holds: int = 0) -> Future[None]:
        done: Future[None] = Future()
        run_into(done, build)
        return done


@dataclass(frozen=True, slots=True)
class Build:
    """An index that is being built while another one serves, and what it learns from.

    is_first: a stand-in serves meanwhile; else the index that it will replace.
    """

    index: Index
    future: Future[None]
    samples: Samples | None
    nearest: Tensor | None = None
    is_first: bool = True

    @property
    def state(self) -> str:
        return "in progress" if self.is_first else "again in progress"

    @property
    def error(self) -> BaseException | None:
        """The error of a build that has ended, or None."""
        future = self.future
        return CancelledError("its executor ended") if future.cancelled() else future.exception()

    def cancel(self) -> None:
        """Ends it soon, or keeps it from beginning; nobody looks at what it gives."""
        self.future.cancel()
        self.index.cancel()

    @property
    def memory_bytes(self) -> int:
        """Bytes of queries and lists that it learns from."""
        return _learned_bytes(self.samples, self.nearest)


class IndexBuilder:
    """Builds the indexes of one extent, at most one at a time beside the one that serves.

    A build that is pending is cancelled when nobody refers to its builder any more.

    pending: the build that has been begun and not taken yet; None for none.

    Args:
        make: a new index.
        runner: where builds run.
        stamps: marked when a build has ended that may be taken.
    """

    pending: Build | None

    def __init__(self, make: MakeIndex, runner: BuildRunner, stamps: Stamps) -> None:
        self.make, self._runner, self._stamps = make, runner, stamps
        self.pending = None

    def build(
        self, index: Index, keys: Tensor, samples: Samples | None, nearest: Tensor | None = None
    ) -> Index:
        """The same index over keys [Hkv, N, D]; waits for it.

        Args:
            samples: for an index that learns from them.
            nearest: [Hkv, G, M, K] int32, their best keys where a device has found them.

        Raises:
            Exception: what the build raises.
        """
        self._runner.here(_work(index, keys, samples, nearest))
        return index

    def begin(
        self,
        index: Index,
        keys: Tensor,
        samples: Samples | None,
        nearest: Tensor | None,
        *,
        is_first: bool = True,
    ) -> Build:
        """Begins to build an index from the prompt's samples; it may have ended when this returns.

        Args:
            index, keys, samples, nearest: as for `build`.
            is_first: see `Build`.
        """
        work = _work(index, keys, samples, nearest)
        future = self._runner.beside(work, _learned_bytes(samples, nearest))
        return self._await(Build(index, future, samples, nearest, is_first), keys)

    def begin_again(self, index: Index, keys: Tensor, samples: Samples) -> Build:
        """Begins to build the successor of an index, from queries of late."""
        work = partial(_tidily, _work(index, keys, samples, None))
        future = self._runner.beside(work)
        return self._await(Build(index, future, samples, is_first=False), keys)

    def _await(self, build: Build, keys: Tensor) -> Build:
        self.pending = build
        if not build.is_first:
            _log.debug("index build begins again, with %d keys", keys.shape[1])
        self._given_up = weakref.finalize(self, build.cancel)
        build.future.add_done_callback(partial(_mark_ended, self._stamps))
        return build

    @property
    def has_ended(self) -> bool:
        """Whether a build is pending that has ended."""
        return self.pending is not None and self.pending.future.done()

    def take(self) -> Build | None:
        """The build that was pending and has ended; None where there is none."""
        build = self.pending
        if build is None or not build.future.done():
            return None
        self._forget()
        return build

    def cancel(self) -> None:
        """Gives up what is pending."""
        if (build := self.pending) is not None:
            self._forget()
            build.cancel()
            _log.debug("index build given up")

    def _forget(self) -> None:
        self.pending = None
        self._given_up.detach()


def _work(index: Index, keys: Tensor, samples: Samples | None, nearest: Tensor | None) -> BuildWork:
    return partial(index.build, keys, None if samples is None else samples.queries, nearest)


def _learned_bytes(samples: Samples | None, nearest: Tensor | None) -> int:
    asked = 0 if samples is None else samples.queries.nbytes
    return asked + (0 if nearest is None else nearest.nbytes)


def _mark_ended(stamps: Stamps, _: Future[None]) -> None:
    stamps.mark("an index was built")


def _tidily(build: BuildWork) -> None:
    """A build that comes again and again, each time with many times the memory that it leaves."""
    try:
        build()
    finally:
        give_back_freed()


# What becomes of work that nobody waits for -------------------------------------------------------


def run_into(
    future: Future[None],
    work: Callable[[], None],
    caught: type[BaseException] = Exception,
) -> None:
    """Runs work, whose end or error becomes the future's.

    Args:
        caught: what is an error of the work; everything else is raised here.
    """
    failure: BaseException | None = None
    try:
        work()
    except caught as error:
        failure = without_frames(error)
    del work  # before anybody who waits is told
    if failure is None:
        future.set_result(None)
    else:
        future.set_exception(failure)


def without_frames(error: BaseException) -> BaseException:
    """The error with its traceback as text: frames would keep the keys of the work that failed, and
    those of its callers the future that keeps the error.
    """
    error.add_note("".join(format_exception(error)))
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
