"""The index of one cold extent, which serves from its first moment on."""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import wait
from typing import Any, cast
from warnings import warn

from torch import Tensor

from hybrid_kv.errors import IndexBuildWarning
from hybrid_kv.plugins import DeviceIndex, Index
from hybrid_kv.rotary import Samples
from hybrid_kv.store.index_builder import Build, BuildRunner, IndexBuilder, MakeIndex
from hybrid_kv.store.index_refresh import IndexRefresh
from hybrid_kv.store.stamps import Stamps
from hybrid_kv.types import SearchResult

_log = logging.getLogger(__name__)


class LiveIndex:
    """An index over an extent's keys, or what serves while it is being built.

    One thread owns it: adds, settles, rebuilds, cancels. Searches may come from any thread, but not
    while keys are added.

    An index that has taken over may name a successor (`Index.successor`), which is then built and
    takes over likewise.

    What an index has learned from queries ages as decoding goes on (`Index.relearn_keys`). Then
    another is built beside the one that serves, from a part of the prompt's samples and from
    queries that came since (`RecentQueries`), as if they were asked where decoding is now.

    serving: the index, or its stand-in. answers: what its searches come to, `Index.innermost`.
    selector: the same index where it finds keys on a device; None where the host searches.
    revision: changes whenever what serves does, or grows. stamps: of plans that describe how it is
    searched; they are marked when another index serves, and when a build has ended that `settle`
    would let take over.
    builder: its builds; who finds one pending settles before it searches.
    aging: what is learned from later; None where nothing is.

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

    serving: Index
    answers: Index
    selector: DeviceIndex | None
    aging: IndexRefresh | None

    def __init__(
        self,
        make: MakeIndex,
        keys: Tensor,
        samples: Samples | None,
        runner: BuildRunner,
        nearest: Tensor | None = None,
        aging: IndexRefresh | None = None,
    ) -> None:
        self._begin(make, runner, keys.shape[1])
        index, asked = make(), None if samples is None else samples.queries
        stand_in = index.stand_in(keys, asked)
        if samples is not None and index.relearn_keys:
            self.aging = IndexRefresh(samples, keys.shape[1])
        elif aging is not None and index.relearn_keys:
            self.aging = aging
        _log.debug("index build begins: %d KV heads of %d keys", *keys.shape[:2])
        if stand_in is None:
            self._serve(self.builder.build(index, keys, samples, nearest))
            _log_served(index, keys)
            return
        begun, is_built = self.builder.begin(index, keys, samples, nearest), False
        if begun.future.done():
            error = begun.error
            if error is not None and not isinstance(error, MemoryError):
                self.builder.take()
                try:
                    raise error
                finally:
                    del error, begun  # this frame hangs on the error
            is_built = error is None
        if not is_built:
            self._serve(self.builder.build(stand_in, keys, None))
        self.settle(keys)

    @classmethod
    def resumed(
        cls, make: MakeIndex, index: Index, runner: BuildRunner, aging: IndexRefresh | None
    ) -> LiveIndex:
        """One that an index serves which was built elsewhere.

        Args:
            make, runner: as for a new one.
            aging: what to learn from later; None for nothing.
        """
        live = cls.__new__(cls)
        live._begin(make, runner, len(index))
        live.aging = aging
        live._serve(index)
        return live

    def _begin(self, make: MakeIndex, runner: BuildRunner, num_keys: int) -> None:
        self.revision, self.stamps = 0, Stamps()
        self.builder = IndexBuilder(make, runner, self.stamps)
        self.aging = None
        self._outcome = "done"  # of the latest build that is not pending
        self.searches = self.searches_before = 0
        self._num_keys = num_keys

    def _serve(self, index: Index) -> None:
        # A search in another thread sees either of the two, and both are whole.
        self.serving, self.answers = index, index.innermost
        self._relearn_keys = index.relearn_keys
        self.selector = cast("DeviceIndex", index) if index.selects else None
        self.revision += 1
        self.stamps.mark("another index serves")

    def search(
        self, queries: Tensor, top_k: int, most: int | None = None, near: Tensor | None = None
    ) -> SearchResult:
        """See `Index.search`."""
        self.note(queries)
        return self.answers.search(queries, top_k, most, near)

    def note(self, queries: Tensor | None) -> None:
        """Counts a search that is made here, by the engine as `Index.plan` says, or by a device.

        Args:
            queries: in the order of [Hkv, M, D]; None is allowed where `aging` is None.
        """
        self.searches += 1
        aging = self.aging
        if aging is not None and queries is not None and queries.numel() == aging.size:
            aging.note(queries.clone(), self._num_keys)

    def add(self, keys: Tensor) -> None:
        """See `Index.add`; an index that is still being built gets them when it takes over."""
        self.serving.add(keys)
        self.revision += 1
        self._num_keys = keys.shape[1]
        aging, after = self.aging, self._relearn_keys
        if aging is None or self.builder.pending is not None or not after:
            return
        if keys.shape[1] - aging.num_keys >= after:
            self._learn_again(keys, aging)

    def _learn_again(self, keys: Tensor, aging: IndexRefresh) -> None:
        """Begins to build an index that shall replace the one that serves."""
        samples = aging.renew(keys.shape[1])
        self.builder.begin_again(self.builder.make(), keys, samples)
        self.settle(keys)

    def _succeed(self, built: Build, keys: Tensor) -> None:
        """Begins to build what is likely to serve faster than the index that now serves."""
        if (index := built.index.successor()) is not None:
            self.builder.begin(index, keys, built.samples, built.nearest, is_first=False)
            self.settle(keys)

    def settle(self, keys: Tensor) -> None:
        """Lets a build that has ended take over, with the keys added since; does not wait.

        Args:
            keys: [Hkv, N, D], all that the index shall hold.

        Warns:
            IndexBuildWarning: it has failed; its stand-in, or the older index, serves on.
        """
        if (build := self.builder.take()) is None:
            return
        error = build.error
        if error is None:
            try:
                build.index.add(keys)
            except MemoryError as full:
                error = full.with_traceback(None)  # it would hold this frame, which holds the error
        if error is None:
            self._serve(build.index)
            self.searches_before = self.searches
            self._outcome = "done"
            _log_served(build.index, keys)
            self._succeed(build, keys)
        elif isinstance(error, Exception):
            what = f"{type(error).__name__}: {error}"
            _log.info("index build failed: %s", what)
            self._outcome = f"failed: {what}"
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

    def wait(self, keys: Tensor) -> None:
        """Returns when no stand-in serves any more that an index is about to replace.

        Args:
            keys: as for `settle`, which warns and raises what this does.
        """
        while (build := self.builder.pending) is not None and build.is_first:
            wait([build.future])
            self.settle(keys)

    def cancel(self) -> None:
        """Gives up a build; what serves goes on."""
        if self.builder.pending is not None:
            self.builder.cancel()
            self._outcome = "given up"

    def rebuild(self, keys: Tensor) -> None:
        """Indexes other keys [Hkv, N, D]: they are scanned until an index has learned again, from
        the prompt's samples; the queries since then asked for others.
        """
        self.builder.cancel()
        self._outcome = "done"
        self._serve(self.builder.build(self.builder.make(), keys, None))
        self._num_keys = keys.shape[1]
        if self.aging is not None:
            self.aging.forget_asked()
            self._learn_again(keys, self.aging)

    @property
    def memory_bytes(self) -> int:
        """Bytes beside the keys, with what a build learns from, now or later."""
        parts = (self.serving, self.builder.pending, self.aging)
        return sum(part.memory_bytes for part in parts if part is not None)

    def describe(self) -> list[dict[str, Any]]:
        """See `Index.describe`; beside it the state of the build, and who served how many searches.

        build: "done", "in progress", "again in progress", "given up" or "failed: ...". searches:
        all so far; searches_before: those before the one that serves now took over. samples: where
        the queries stand that it has learned from; None where nothing is learned, or not again.
        """
        pending = self.builder.pending
        state = self._outcome if pending is None else pending.state
        before = self.searches_before if state == "done" else self.searches
        build = {"build": state, "searches": self.searches, "searches_before": before}
        samples = None if self.aging is None else self.aging.stand
        return [{**what, **build, "samples": samples} for what in self.serving.describe()]


def _log_served(index: Index, keys: Tensor) -> None:
    """Logs which kinds serve the heads now that a build has ended."""
    if _log.isEnabledFor(logging.INFO):
        kinds = Counter(str(head.get("serves")) for head in index.describe())
        heads = ", ".join(f"{count} by {kind}" for kind, count in sorted(kinds.items()))
        _log.info("index of %d keys serves; KV heads: %s", keys.shape[1], heads)
