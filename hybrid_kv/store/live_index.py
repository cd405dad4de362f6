"""The index of one cold extent, which serves from its first moment on and may be learned again.

It learns again from recent queries, when decoding has left the places that it was made for.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import wait
from copy import copy
from typing import Any, NamedTuple, Self, cast
from warnings import warn

import torch
from torch import Tensor

from hybrid_kv.errors import IndexBuildWarning
from hybrid_kv.plugins import DeviceIndex, Index
from hybrid_kv.rotary import Samples
from hybrid_kv.store.index_builder import Build, BuildRunner, IndexBuilder, MakeIndex
from hybrid_kv.store.memory import Stamps
from hybrid_kv.types import SearchResult

PROMPT, LATEST, SPREAD = 768, 512, 768
"""Positions that are learned from again: of the prompt's samples, the latest that were asked, and
at most so many of those between. Fewer of a short context; see `room`."""
_LEAST = 32


def room(most: int, num_keys: int, group: int) -> int:
    """Number of positions, of `most`, that are kept beside a number of keys.

    All of PROMPT, LATEST and SPREAD together are no more rows of queries than there are keys, half
    of what keys and values take: else those of a short context would be several times its size.
    """
    every = PROMPT + LATEST + SPREAD
    return min(most, max(_LEAST, most * num_keys // (every * group)))


class AskedQuery(NamedTuple):
    """Queries, in the order of [Hkv, G, D], and how many keys there were when they came."""

    queries: Tensor
    num_keys: int


class RecentQueries:
    """The latest queries that were asked, and an even part of those before them.

    The latest alone would tell nothing of thousands of tokens that were generated before them. Of
    those every stride-th is kept, and the stride doubles when they are too many, so that the part
    stays even and bounded without knowing how much will come.

    latest, spread: oldest first.

    Args:
        group: G.
    """

    def __init__(self, group: int) -> None:
        self._group = group
        self.latest: deque[AskedQuery] = deque()
        self.spread: list[AskedQuery] = []
        self._stride, self._passed, self._num_keys = 1, 0, -1

    def __len__(self) -> int:
        return len(self.spread) + len(self.latest)

    def __iter__(self) -> Iterator[AskedQuery]:
        """Oldest first."""
        yield from self.spread
        yield from self.latest

    def take(self, asked: AskedQuery) -> None:
        """Takes what was asked behind all others."""
        self.latest.append(asked)
        if asked.num_keys != self._num_keys:  # a page has come, or gone
            self._num_keys = asked.num_keys
            self._most_latest = room(LATEST, asked.num_keys, self._group)
            self._most_spread = room(SPREAD, asked.num_keys, self._group)
        if len(self.latest) <= self._most_latest:
            return
        older = self.latest.popleft()
        if self._passed % self._stride == 0:
            if len(self.spread) >= self._most_spread:
                self.spread, self._stride = self.spread[::2], 2 * self._stride
            self.spread.append(older)
        self._passed += 1

    def behind(self, count: int) -> Self:
        """The same, counted without the first `count` keys."""
        new = copy(self)
        new._num_keys = -1
        new.latest = deque(AskedQuery(q, keys - count) for q, keys in self.latest)
        new.spread = [AskedQuery(q, keys - count) for q, keys in self.spread]
        return new

    @property
    def memory_bytes(self) -> int:
        return sum(asked.queries.nbytes for asked in self)


class IndexRefresh:
    """Samples of an index's prompt, and queries that it was asked since.

    Args:
        prompt_keys: keys that were there when the prompt ended, where that is not now.

    Attributes:
        prompt: those samples, thinned; prompt_keys: see above.
        num_keys: keys that were there when it learned last.
        stand: where the queries stood, in words.
        group: G, queries of a KV head in a step of one token; only those are of use. size: numbers
            in the queries of such a step.
        asked: what was asked since.
    """

    def __init__(self, samples: Samples, num_keys: int, prompt_keys: int | None = None) -> None:
        self.num_keys, self.stand = num_keys, samples.describe()
        self.prompt_keys = num_keys if prompt_keys is None else prompt_keys
        heads, self.group, _, dim = samples.queries.shape
        self.size = heads * self.group * dim
        self.prompt = samples.thinned(room(PROMPT, self.prompt_keys, self.group))
        self.asked = RecentQueries(self.group)

    def behind(self, count: int) -> IndexRefresh:
        """The same for an index of the entries that follow the first `count` of this one's."""
        new = copy(self)
        new.num_keys, new.prompt_keys = 0, self.prompt_keys - count
        new.asked = self.asked.behind(count)
        return new

    def ask(self, queries: Tensor, position: int) -> None:
        """Takes queries as `note`, asked at a position."""
        self.note(queries, position - self.prompt.first + self.prompt_keys)

    def note(self, queries: Tensor, num_keys: int) -> None:
        """Takes queries of one token, which so many keys were searched for.

        Args:
            queries: in the order of [Hkv, G, D]; it owns their memory from now on.
        """
        self.asked.take(AskedQuery(queries, num_keys))

    def forget_asked(self) -> None:
        """Only the prompt is learned from again."""
        self.asked = RecentQueries(self.group)

    def renew(self, num_keys: int) -> Samples:
        """Queries to learn from now that so many keys are there, turned to where decoding is.

        The latest come first and those that are spread last: an index checks itself on the last
        ones, and neighbours would tell what they found (docs/lab.md).
        """
        samples, first = self.prompt, self.prompt.first - self.prompt_keys
        if asked := [*self.asked.latest, *self.asked.spread]:
            heads, _, _, dim = samples.queries.shape
            each = [one.queries.reshape(heads, self.group, dim) for one in asked]
            queries = torch.stack(each, 2).to(samples.queries.dtype)
            # Where the keys behind the prompt's are counted, to a page: samples are spread far
            # wider.
            positions = torch.tensor([first + one.num_keys for one in asked])
            samples = samples.joined(queries, positions, before=len(self.asked.latest))
        samples = samples.ahead(first + num_keys, self.prompt.horizon)
        self.num_keys, self.stand = num_keys, samples.describe()
        return samples

    @property
    def memory_bytes(self) -> int:
        return self.prompt.queries.nbytes + self.asked.memory_bytes


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
