"""The index of one cold extent, which serves from its first moment on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from warnings import warn

from torch import Tensor

from hybrid_kv.errors import IndexBuildWarning
from hybrid_kv.plugins import Index
from hybrid_kv.types import SearchResult

MakeIndex = Callable[[], Index]
Work = Callable[[], None]


class BuildRunner(Protocol):
    """Where builds run."""

    def here(self, build: Work) -> None:
        """Runs a build that is waited for."""
        ...

    def beside(self, build: Work) -> Future[None]:
        """Begins a build that need not be waited for; it may be done when this returns."""
        ...


class InlineRunner:
    """All builds in the caller's thread, at once."""

    def here(self, build: Work) -> None:
        build()

    def beside(self, build: Work) -> Future[None]:
        done: Future[None] = Future()
        try:
            build()
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        return done


@dataclass(frozen=True, slots=True)
class _Build:
    """An index that is being built, and what it is built from."""

    index: Index
    future: Future[None]
    learned_from: tuple[Tensor, ...]

    def cancel(self) -> None:
        """Ends it soon, or keeps it from beginning; nobody looks at what it gives."""
        self.future.cancel()
        self.index.cancel()


def _error_of(future: Future[None]) -> BaseException | None:
    """What a build that has ended raised, or None."""
    return CancelledError("its executor ended") if future.cancelled() else future.exception()


class LiveIndex:
    """An index over an extent's keys, or its stand-in while it is being built.

    One thread owns it: adds, settles, rebuilds, cancels. Searches may come from any thread, but not
    while keys are added. A build whose index nobody refers to any more is cancelled.

    Args:
        make: a new index.
        keys: [Hkv, N, D].
        samples: [Hkv, G, M, D] queries for an index that learns from them.
        nearest: [Hkv, G, M, K] int32, their best keys where a device has found them.
        runner: where builds run; a finished one takes over at once, a later one in `settle`.
        make_stand_in: what serves while it is built, instead of what the index itself names.

    Raises:
        Exception: what the build raises while it is waited for. Memory that runs out while an index
            with a stand-in is built is no error: the stand-in serves on, and a warning says so.
    """

    def __init__(
        self,
        make: MakeIndex,
        keys: Tensor,
        samples: Tensor | None,
        runner: BuildRunner,
        nearest: Tensor | None = None,
        make_stand_in: MakeIndex | None = None,
    ) -> None:
        self._make, self._runner = make, runner
        self._build: _Build | None = None
        self._state = "done"
        self.searches = self.searches_before = 0
        index = make()
        self._serving = index
        stand_in = index.stand_in(keys, samples)
        build = partial(index.build, keys, samples, nearest)
        if stand_in is None:
            runner.here(build)
            return
        learned_from = tuple(t for t in (samples, nearest) if t is not None)
        begun = _Build(index, runner.beside(build), learned_from)
        if begun.future.done():
            error = _error_of(begun.future)
            if error is None:
                return
            if not isinstance(error, MemoryError):
                raise error
        if make_stand_in is not None:
            stand_in = make_stand_in()
        runner.here(partial(stand_in.build, keys, None))
        self._serving, self._build, self._state = stand_in, begun, "in progress"
        self._given_up = weakref.finalize(self, begun.cancel)
        self.settle(keys)

    def __len__(self) -> int:
        return len(self._serving)

    @property
    def is_building(self) -> bool:
        return self._build is not None

    @property
    def on_device(self) -> bool:
        """See `Index.on_device`."""
        return self._serving.on_device

    def choose_pages(self, queries: Tensor, new: int) -> Tensor:
        """See `Index.choose_pages`."""
        self.searches += 1
        return self._serving.choose_pages(queries, new)

    @property
    def page_tokens(self) -> int:
        """See `Index.page_tokens`."""
        return self._serving.page_tokens

    def search(
        self, queries: Tensor, top_k: int, most: int | None = None, near: Tensor | None = None
    ) -> SearchResult:
        """See `Index.search`."""
        self.searches += 1
        return self._serving.search(queries, top_k, most, near)

    def add(self, keys: Tensor) -> None:
        """See `Index.add`; an index that is still being built gets them when it takes over."""
        self._serving.add(keys)

    def settle(self, keys: Tensor) -> None:
        """Lets a build that has ended take over, with the keys added since; does not wait.

        Args:
            keys: [Hkv, N, D], all that the index shall hold.

        Warns:
            IndexBuildWarning: it has failed; its stand-in serves on.
        """
        if (build := self._build) is None or not build.future.done():
            return
        self._forget_build()
        error = _error_of(build.future)
        if error is None:
            try:
                build.index.add(keys)
            except MemoryError as full:
                error = full
        if error is None:
            # One assignment: a search in another thread sees either of the two, and both are whole.
            self._serving, self.searches_before = build.index, self.searches
            self._state = "done"
        elif isinstance(error, Exception):
            what = f"{type(error).__name__}: {error}"
            self._state = f"failed: {what}"
            warn(
                f"an index could not be built ({what}); its keys are scanned instead, more slowly",
                IndexBuildWarning,
                stacklevel=2,
            )
        else:
            raise error

    def rebuild(self, keys: Tensor) -> None:
        """Indexes other keys [Hkv, N, D]; no queries to learn from are left."""
        self.cancel()
        index = self._make()
        self._runner.here(partial(index.build, keys, None))
        self._serving, self._state = index, "done"

    def cancel(self) -> None:
        """Gives up a build; what serves goes on."""
        if (build := self._build) is not None:
            self._forget_build()
            build.cancel()
            self._state = "given up"

    def _forget_build(self) -> None:
        self._build = None
        self._given_up.detach()

    @property
    def memory_bytes(self) -> int:
        """Bytes beside the keys, with what a build learns from."""
        kept = self._build.learned_from if self._build is not None else ()
        return self._serving.memory_bytes + sum(tensor.nbytes for tensor in kept)

    def describe(self) -> list[dict[str, Any]]:
        """See `Index.describe`; beside it the state of the build, and who served how many searches.

        build: "done", "in progress", "given up" or "failed: ...". searches: all so far;
        searches_before: those that the stand-in served.
        """
        before = self.searches_before if self._state == "done" else self.searches
        build = {"build": self._state, "searches": self.searches, "searches_before": before}
        return [{**what, **build} for what in self._serving.describe()]
