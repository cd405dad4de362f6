"""The index of one cold extent, which serves from its first moment on."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from warnings import warn

from torch import Tensor

from hybrid_kv.errors import IndexBuildWarning
from hybrid_kv.ops.host_memory import give_back_freed
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.plugins import Index
from hybrid_kv.rotary import Samples
from hybrid_kv.store.aging import Aging
from hybrid_kv.store.outcome import run_into
from hybrid_kv.store.stamps import Stamps
from hybrid_kv.types import Candidates, PartialAttention, SearchResult

MakeIndex = Callable[[], Index]
BuildWork = Callable[[], None]


_log = logging.getLogger(__name__)


class BuildRunner(Protocol):
    """Where builds run."""

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
class _Build:
    """An index that is being built, and what it is built from.

    is_first: a stand-in serves meanwhile; else the index that it will replace.
    """

    index: Index
    future: Future[None]
    num_keys: int
    samples: Samples | None
    nearest: Tensor | None = None
    is_first: bool = True

    def cancel(self) -> None:
        """Ends it soon, or keeps it from beginning; nobody looks at what it gives."""
        self.future.cancel()
        self.index.cancel()

    @property
    def memory_bytes(self) -> int:
        return _learned_bytes(self.samples, self.nearest)


def _learned_bytes(samples: Samples | None, nearest: Tensor | None) -> int:
    asked = 0 if samples is None else samples.queries.nbytes
    return asked + (0 if nearest is None else nearest.nbytes)


def _error_of(future: Future[None]) -> BaseException | None:
    """What a build that has ended raised, or None."""
    return CancelledError("its executor ended") if future.cancelled() else future.exception()


def _mark_ended(stamps: Stamps, _: Future[None]) -> None:
    stamps.mark("an index was built")


def _tidily(build: BuildWork) -> None:
    """A build that comes again and again, each time with many times the memory that it leaves."""
    try:
        build()
    finally:
        give_back_freed()


class LiveIndex:
    """An index over an extent's keys, or what serves while it is being built.

    One thread owns it: adds, settles, rebuilds, cancels. Searches may come from any thread, but not
    while keys are added. A build whose index nobody refers to any more is cancelled.

    An index that has taken over may name a successor (`Index.successor`), which is then built and
    takes over likewise.

    What an index has learned from queries ages as decoding goes on (`Index.relearn_keys`). Then
    another is built beside the one that serves, from a part of the prompt's samples and from
    queries that came since (`AskedQueries`), as if they were asked where decoding is now.

    selects, joint, page_tokens: those of the index that serves now, see `Index`.
    revision: changes whenever what serves does. stamps: of plans that describe how it is searched;
    they are marked then, and when a build has ended that `settle` would let take over.

    Args:
        make: a new index.
        keys: [Hkv, N, D].
        samples: for an index that learns from them.
        nearest: [Hkv, G, M, K] int32, their best keys where a device has found them.
        runner: where builds run; a finished one takes over at once, a later one in `settle`.
        aging: what it learns from when there are enough keys, where it has no samples yet.

    Raises:
        Exception: what the build raises while it is waited for. Memory that runs out while an index
            with a stand-in is built is no error: the stand-in serves on, and a warning says so.
    """

    _build: _Build | None
    aging: Aging | None

    def __init__(
        self,
        make: MakeIndex,
        keys: Tensor,
        samples: Samples | None,
        runner: BuildRunner,
        nearest: Tensor | None = None,
        aging: Aging | None = None,
    ) -> None:
        index = make()
        self._begin(make, index, runner, keys.shape[1])
        asked = None if samples is None else samples.queries
        stand_in = index.stand_in(keys, asked)
        build = partial(index.build, keys, asked, nearest)
        if samples is not None and index.relearn_keys:
            self.aging = Aging(samples, keys.shape[1])
        elif aging is not None and index.relearn_keys:
            self.aging = aging
        _log.debug("index build begins: %d KV heads of %d keys", *keys.shape[:2])
        if stand_in is None:
            runner.here(build)
            self._serve(index)
            self._log_served(keys)
            return
        future = runner.beside(build, _learned_bytes(samples, nearest))
        begun = _Build(index, future, keys.shape[1], samples, nearest)
        if begun.future.done():
            error = _error_of(begun.future)
            if error is None:
                self._serve(index)
                self._log_served(keys)
                self._succeed(begun, keys)
                return
            if not isinstance(error, MemoryError):
                try:
                    raise error
                finally:
                    del error, begun  # this frame hangs on the error
        runner.here(partial(stand_in.build, keys, None))
        self._serve(stand_in)
        self._await(begun)
        self.settle(keys)

    @classmethod
    def resumed(
        cls, make: MakeIndex, index: Index, runner: BuildRunner, aging: Aging | None
    ) -> LiveIndex:
        """One that an index serves which was built elsewhere.

        Args:
            make, runner: as for a new one.
            aging: what to learn from later; None for nothing.
        """
        live = cls.__new__(cls)
        live._begin(make, index, runner, len(index))
        live.aging = aging
        return live

    def _begin(self, make: MakeIndex, index: Index, runner: BuildRunner, num_keys: int) -> None:
        self._make, self._runner = make, runner
        self.revision, self.stamps = 0, Stamps()
        self._build, self.aging = None, None
        self.is_building = False
        self._state = "done"
        self.searches = self.searches_before = 0
        self._num_keys = num_keys
        self._serve(index)

    def __len__(self) -> int:
        return len(self._serving)

    @property
    def serving(self) -> Index:
        """What answers searches now: the index, or its stand-in."""
        return self._serving

    @property
    def has_built(self) -> bool:
        """Whether a build has ended that `settle` would let take over."""
        return self._build is not None and self._build.future.done()

    def wait(self, keys: Tensor) -> None:
        """Returns when no stand-in serves any more that an index is about to replace.

        Args:
            keys: as for `settle`, which warns and raises what this does.
        """
        while (build := self._build) is not None and build.is_first:
            wait([build.future])
            self.settle(keys)

    def _serve(self, index: Index) -> None:
        # A search in another thread sees either of the two, and both are whole.
        self._serving, self._answers = index, index.innermost
        self.revision += 1
        self.selects, self.joint = index.selects, index.joint
        self.page_tokens = index.page_tokens
        self.stamps.mark("another index serves")

    def see(self, length: int) -> Hashable:
        """See `Index.see`; comes before every search that a device makes."""
        self.searches += 1
        return self._serving.see(length)

    @property
    def seen(self) -> Tensor:
        """See `Index.seen`."""
        return self._serving.seen

    def candidates(self, queries: Tensor, keys: Tensor, new: int, top_k: int) -> Candidates:
        """See `Index.candidates`."""
        return self._serving.candidates(queries, keys, new, top_k)

    def search(
        self, queries: Tensor, top_k: int, most: int | None = None, near: Tensor | None = None
    ) -> SearchResult:
        """See `Index.search`."""
        self.note(queries)
        return self._answers.search(queries, top_k, most, near)

    def note(self, queries: Tensor | None) -> None:
        """Counts a search that is made here, or by the engine as `plan` says.

        Args:
            queries: [Hkv, M, D]; None is allowed where `aging` is None.
        """
        self.searches += 1
        aging = self.aging
        if aging is not None and queries is not None and queries.shape[1] == aging.group:
            aging.note(queries.clone(), self._num_keys)

    def plan(self, top_k: int, most: int) -> Sequence[EngineSearch] | None:
        """See `Index.plan`; valid while `revision` stays the same."""
        return self._answers.plan(top_k, most)

    def estimate(
        self,
        queries: Tensor,
        found: Tensor,
        values: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> PartialAttention:
        """See `Index.estimate`."""
        return self._answers.estimate(queries, found, values, scale=scale, softcap=softcap)

    def estimate_bytes(self, queries: int, found: int) -> int:
        """See `Index.estimate_bytes`."""
        return self._answers.estimate_bytes(queries, found)

    def selection_bytes(self, queries: int, top_k: int) -> int:
        """See `Index.selection_bytes`."""
        return self._serving.selection_bytes(queries, top_k)

    def add(self, keys: Tensor) -> None:
        """See `Index.add`; an index that is still being built gets them when it takes over."""
        self._serving.add(keys)
        self.revision += 1
        self.stamps.mark("an index has grown")
        self._num_keys = keys.shape[1]
        aging, after = self.aging, self._serving.relearn_keys
        if aging is None or self._build is not None or not after:
            return
        if keys.shape[1] - aging.num_keys >= after:
            self._learn_again(keys, aging)

    def _log_served(self, keys: Tensor) -> None:
        """Says who serves the heads now that a build has ended."""
        if _log.isEnabledFor(logging.INFO):
            kinds = Counter(str(head.get("serves")) for head in self._serving.describe())
            heads = ", ".join(f"{count} by {kind}" for kind, count in sorted(kinds.items()))
            _log.info("index of %d keys serves; KV heads: %s", keys.shape[1], heads)

    def _learn_again(self, keys: Tensor, aging: Aging) -> None:
        """Begins to build an index that shall replace the one that serves."""
        samples = aging.renew(keys.shape[1])
        index = self._make()
        build = partial(index.build, keys, samples.queries, None)
        future = self._runner.beside(partial(_tidily, build))
        self._await(_Build(index, future, keys.shape[1], samples, is_first=False))
        self.settle(keys)

    def _succeed(self, built: _Build, keys: Tensor) -> None:
        """Begins to build what is likely to serve faster than the index that now serves."""
        index = built.index.successor()
        if index is None:
            return
        asked = None if built.samples is None else built.samples.queries
        build = partial(index.build, keys, asked, built.nearest)
        future = self._runner.beside(build, built.memory_bytes)
        following = (built.samples, built.nearest)
        self._await(_Build(index, future, keys.shape[1], *following, is_first=False))
        self.settle(keys)

    def _await(self, build: _Build) -> None:
        self._build, self.is_building = build, True
        if not build.is_first:
            _log.debug("index build begins again, with %d keys", build.num_keys)
        self._state = "in progress" if build.is_first else "again in progress"
        self._given_up = weakref.finalize(self, build.cancel)
        build.future.add_done_callback(partial(_mark_ended, self.stamps))

    def settle(self, keys: Tensor) -> None:
        """Lets a build that has ended take over, with the keys added since; does not wait.

        Args:
            keys: [Hkv, N, D], all that the index shall hold.

        Warns:
            IndexBuildWarning: it has failed; its stand-in, or the older index, serves on.
        """
        if (build := self._build) is None or not build.future.done():
            return
        self._forget_build()
        error = _error_of(build.future)
        if error is None:
            try:
                build.index.add(keys)
            except MemoryError as full:
                error = full.with_traceback(None)  # it would hold this frame, which holds the error
        if error is None:
            self._serve(build.index)
            self.searches_before = self.searches
            self._state = "done"
            self._log_served(keys)
            self._succeed(build, keys)
        elif isinstance(error, Exception):
            what = f"{type(error).__name__}: {error}"
            _log.info("index build failed: %s", what)
            self._state = f"failed: {what}"
            instead = (
                "its keys are scanned instead, more slowly"
                if build.is_first
                else "the one from before serves on, and may find less as the text grows"
            )
            warn(
                f"an index could not be built ({what}); {instead}",
                IndexBuildWarning,
                stacklevel=2,
            )
        else:
            try:
                raise error
            finally:
                del error, build

    def rebuild(self, keys: Tensor) -> None:
        """Indexes other keys [Hkv, N, D]: they are scanned until an index has learned again, from
        the prompt's samples; the queries since then asked for others.
        """
        self.cancel()
        index = self._make()
        self._runner.here(partial(index.build, keys, None))
        self._serve(index)
        self._num_keys, self._state = keys.shape[1], "done"
        if self.aging is not None:
            self.aging.forget_asked()
            self._learn_again(keys, self.aging)

    def made_again(self, keys: Tensor, aging: Aging) -> Index:
        """Another index of keys [Hkv, N, D], which has learned from `aging`; waits for it."""
        index, samples = self._make(), aging.renew(keys.shape[1])
        self._runner.here(partial(index.build, keys, samples.queries, None))
        return index

    def cancel(self) -> None:
        """Gives up a build; what serves goes on."""
        if (build := self._build) is not None:
            self._forget_build()
            build.cancel()
            self._state = "given up"
            _log.debug("index build given up")

    def _forget_build(self) -> None:
        self._build, self.is_building = None, False
        self._given_up.detach()

    @property
    def memory_bytes(self) -> int:
        """Bytes beside the keys, with what a build learns from, now or later."""
        parts = (self._serving, self._build, self.aging)
        return sum(part.memory_bytes for part in parts if part is not None)

    def describe(self) -> list[dict[str, Any]]:
        """See `Index.describe`; beside it the state of the build, and who served how many searches.

        build: "done", "in progress", "again in progress", "given up" or "failed: ...". searches:
        all so far; searches_before: those before the one that serves now took over. samples: where
        the queries stand that it has learned from; None where nothing is learned, or not again.
        """
        before = self.searches_before if self._state == "done" else self.searches
        build = {"build": self._state, "searches": self.searches, "searches_before": before}
        samples = None if self.aging is None else self.aging.stand
        return [{**what, **build, "samples": samples} for what in self._serving.describe()]
