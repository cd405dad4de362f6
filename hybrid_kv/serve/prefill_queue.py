"""Prefills of waiting requests, in chunks between the decode steps of running ones.

Contexts of earlier requests are kept: a prompt goes on from the one with the longest common prefix.
Saved contexts are opened in another thread, and so are a prompt's layers moved to the tier where
their method wants them: both take as long as the prompt makes them, and neither can be cut into
chunks. The size of a chunk follows from the time for which running requests can be held up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import sqrt
from time import monotonic
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.api.llm import LLM
from hybrid_kv.api.tokens import common_length
from hybrid_kv.config import HybridConfig
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.runtime import memory_errors
from hybrid_kv.saved.identity import BLOCK_TOKENS
from hybrid_kv.saved.registry import ContextRegistry
from hybrid_kv.serve.requests import Limits, Request
from hybrid_kv.serve.running import RunningRequest
from hybrid_kv.store import Row
from hybrid_kv.store.layer import TierBytes, tier_bytes
from hybrid_kv.transfer import ThreadExecutor

_LEAST_TOKENS = 32
"""Fewer are computed sooner than a cache is forked."""
_MOST_HIDDEN = 256
"""Cold entries that may be cut off: every search would find them first, and look beyond."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Prefix:
    """A cache of one row and the tokens that it holds.

    key: what must be alike in whoever continues it.
    """

    ids: npt.NDArray[np.int64]
    cache: TieredCache
    key: dict[str, Any]

    @classmethod
    def of(cls, cache: TieredCache, ids: Sequence[int]) -> Prefix:
        """Prefix of the tokens that a cache holds of these, which may be more."""
        held = np.asarray(ids[: cache.get_seq_length()], dtype=np.int64)
        return cls(held, cache, prefix_key(cache.kv.config))

    def shared(self, ids: npt.NDArray[np.int64]) -> int:
        """With how many tokens both begin, if what lies beyond can be cut off cheaply; else 0."""
        count = common_length(ids, self.ids)
        cut = len(self.ids) - count
        is_cheap = cut == 0 or (self.cache.can_crop and self._hidden(cut) <= _MOST_HIDDEN)
        return count if is_cheap else 0

    def _hidden(self, cut: int) -> int:
        """Indexed cold entries that go when so many tokens are cut off."""
        rows = (row for store in self.cache.kv.stores.values() for row in store.rows)
        return max((_hidden_of(row, cut) for row in rows), default=0)


def _hidden_of(row: Row, cut: int) -> int:
    sinks = 0 if row.placement is None else row.placement.sink_tokens
    near = row.table.num_tokens - sinks
    is_indexed = any(span.extent.index is not None for span in row.chain.spans)
    return max(0, cut - near) if is_indexed else 0


def prefix_key(config: HybridConfig) -> dict[str, Any]:
    """Part of a configuration that decides what a cache holds; audits do not."""
    return {**config.flat(), "audit_every": 0, "audit": None}


class KeptPrefixes:
    """Kept prefixes, least recently used first, within a limit of bytes.

    One that loses entries as its prompt ends is not kept: what it would be for a shorter prompt is
    not in it.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._kept: list[Prefix] = []
        self._saved: WeakSet[Prefix] = WeakSet()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def caches(self) -> list[TieredCache]:
        return [prefix.cache for prefix in self._kept]

    def best(
        self, ids: Sequence[int], config: HybridConfig, running: Iterable[Prefix] = ()
    ) -> tuple[TieredCache, int] | None:
        """A fork of what shares most with ids, and how many tokens it holds; None for nothing.

        The last token is left to compute: its logits are wanted.

        Args:
            running: others that may be continued, but are not kept here.
        """
        key, wanted = prefix_key(config), np.asarray(ids[:-1], dtype=np.int64)
        alike = [prefix for prefix in (*self._kept, *running) if prefix.key == key]
        shared = [prefix.shared(wanted) for prefix in alike]
        most = max(shared, default=0)
        if most < _LEAST_TOKENS:
            return None
        prefix = alike[shared.index(most)]
        if prefix in self._kept:
            self._kept.remove(prefix)
            self._kept.append(prefix)
        cache = prefix.cache.fork()
        cache.crop(most - len(prefix.ids))
        return cache, most

    def keep(self, cache: TieredCache, ids: Sequence[int]) -> bool:
        """Takes a cache that its request needs no more; False where it is not kept."""
        if not self._limit or not cache.keeps_all:
            return False
        cache.kv.look_every(0)
        new = Prefix.of(cache, ids)
        for old in [old for old in self._kept if old.key == new.key]:
            if new.shared(old.ids) == len(old.ids):
                self._drop(old)  # the new one serves whoever it served
        self._kept.append(new)
        while self._kept and sum(self.held()) > self._limit:
            self.drop_oldest()
        return new in self._kept

    def held(self) -> TierBytes:
        """Bytes that all of them hold, shared memory once."""
        return tier_bytes(s for cache in self.caches for s in cache.kv.stores.values())

    def unsaved(self) -> Prefix | None:
        """One that was not asked for here yet, the newest first."""
        found = next((one for one in reversed(self._kept) if one not in self._saved), None)
        if found is not None:
            self._saved.add(found)
        return found

    def drop_oldest(self) -> None:
        """Gives back what was used least recently."""
        self._drop(self._kept[0])

    def _drop(self, prefix: Prefix) -> None:
        self._kept.remove(prefix)
        prefix.cache.close()

    def close(self) -> None:
        """Gives everything back."""
        for prefix in list(self._kept):
            self._drop(prefix)


class PrefillQueue:
    """Requests that have no token yet, and their prefills; for the engine's thread.

    Args:
        contexts: saved ones, with which prompts may begin.
        runs: the requests that were admitted, those with tokens too; others change the list.
        make_room: called with a request before its cache is filled; raises CapacityError where
            there is no memory.
    """

    def __init__(
        self,
        llm: LLM,
        limits: Limits,
        contexts: ContextRegistry | None,
        prefixes: KeptPrefixes,
        runs: list[RunningRequest],
        make_room: Callable[[RunningRequest], None],
    ) -> None:
        self._llm, self._limits, self._contexts = llm, limits, contexts
        self._prefixes, self._runs, self._make_room = prefixes, runs, make_room
        self._pace = PrefillPace()
        self._files, self._layers = ThreadExecutor(1), ThreadExecutor(1)

    def leader(self, request: Request) -> RunningRequest | None:
        """Request whose prompt is at least half the same, so that it need not be done twice."""
        if self._limits.reproducible:
            return None
        key, ids = prefix_key(config_of(self._llm, request)), np.asarray(request.ids)
        for run in self._runs:
            other = run.request
            if run.is_ready or prefix_key(config_of(self._llm, other)) != key:
                continue
            # Of a much longer one nothing could be had at its end: too much would be cut off.
            if 2 * common_length(ids, other.ids) >= max(len(ids), len(other.ids)):
                return run
        return None

    def next(self) -> RunningRequest | None:
        """Request whose prompt goes on: the one that has waited longest for what is left to
        compute, so that short prompts pass long ones and none waits for ever.
        """
        waiting = [run for run in self._runs if self._can_go_on(run)]
        return max(waiting, key=self._urgency, default=None)

    def _can_go_on(self, run: RunningRequest) -> bool:
        leader = run.leader
        has_way = leader is None or leader.is_ready or leader not in self._runs
        return has_way and not run.is_ready and run.work is None

    def _urgency(self, run: RunningRequest) -> float:
        if not (left := len(run.request.ids) - run.done):
            return math.inf
        return (monotonic() - run.ticket.submitted) / self._pace.seconds(run.done, left)

    # A piece -------------------------------------------------------------------------------------

    def advance(self, run: RunningRequest, seconds: float, *, alone: bool) -> None:
        """One piece of its way, of so many seconds.

        Args:
            alone: nobody waits for a token.
        """
        end = monotonic() + seconds
        with memory_errors(lambda: run.stage):
            if not run.has_begun and not self._begin(run):
                return
            if not run.is_prefilled:
                self._compute(run, end - monotonic(), alone=alone)
            if run.is_prefilled:
                self._seal(run, end - monotonic(), alone=alone)

    def _begin(self, run: RunningRequest) -> bool:
        """Gives it a cache; False where that is done aside."""
        config, ids = config_of(self._llm, run.request), run.request.ids
        found = None
        if not self._limits.reproducible:
            going_on = (Prefix.of(one.cache, one.ids) for one in self._continuable())
            found = self._prefixes.best(ids, config, going_on)
        if found is None:
            self._make_room(run)
            found = self._llm.runtime.cache(config), 0
        cache, reused = found
        if self._contexts is None or len(ids) - 1 - reused < BLOCK_TOKENS:
            _start(run, cache, reused, config)
            return True
        self._open(run, cache, reused, config, self._contexts)
        return False

    def _open(
        self,
        run: RunningRequest,
        cache: TieredCache,
        reused: int,
        config: HybridConfig,
        contexts: ContextRegistry,
    ) -> None:
        """Looks aside for a saved context that has more of a prompt than the first tokens which a
        cache holds, and takes that in its place.
        """
        held, ids = [(cache, reused)], torch.tensor([run.request.ids[:-1]])

        def take() -> None:
            if reused and contexts.find(ids, self._llm, config)[1] <= reused:
                return
            opened = spare = cache if not reused else self._llm.runtime.cache(config)
            try:
                count = contexts.take(opened, ids, self._llm, self._llm.runtime.device)
                if count > reused:
                    held[0], spare = (opened, count), cache
            finally:
                if opened is not cache:
                    spare.close()

        work = self._aside(self._files, take)

        def close() -> None:
            held[0][0].close()

        run.put_aside(work, close, lambda: _start(run, *held[0], config))

    def _continuable(self) -> Iterator[RunningRequest]:
        """Requests that decode and have lost nothing of their prompts."""
        return (run for run in self._runs if run.is_ready and run.cache.keeps_all)

    def _compute(self, run: RunningRequest, seconds: float, *, alone: bool) -> None:
        left = len(run.request.ids) - run.done
        count = self.chunk_tokens(run.done, seconds, left, alone=alone)
        begin = monotonic()
        run.compute(count)
        self._pace.note(run.done - count, count, monotonic() - begin)

    def chunk_tokens(self, first: int, seconds: float, left: int, *, alone: bool) -> int:
        """Of a chunk behind `first` tokens that shall take so long."""
        if (size := self._limits.reproducible) is not None:
            return min(left, size)
        most = min(left, self._limits.prefill_chunk_tokens)
        return self._pace.tokens(first, seconds, most, alone=alone)

    def _seal(self, run: RunningRequest, seconds: float, *, alone: bool) -> None:
        if alone:
            run.seal(seconds)
        elif not run.is_sealed:
            run.put_aside(self._aside(self._layers, run.seal), run.cache.close)

    def _aside(self, executor: ThreadExecutor, work: Callable[[], None]) -> Future[None]:
        def guarded() -> None:
            with torch.inference_mode(), memory_errors(lambda: "prefill"):
                work()

        return executor.background(guarded)

    def twins(self, run: RunningRequest) -> list[RunningRequest]:
        """Requests for the same that have not begun, and may share what was computed.

        Where this one went on from an inexact answer, an exact one computes part of that again; so
        it takes copies from exact ones alone.
        """
        if self._limits.reproducible:  # what leaves a fork's window lies, and adds up, otherwise
            return []
        config, ids, exact = config_of(self._llm, run.request), run.request.ids, run.request.exact
        # What has come back from aside, and is not taken up, has a cache already.
        others = (one for one in self._runs if not one.has_begun and one.work is None)
        return [
            one
            for one in others
            if one.request.ids == ids
            and config_of(self._llm, one.request) == config
            and one.request.exact <= exact
        ]

    # Files ---------------------------------------------------------------------------------------

    def save(self, prefix: Prefix) -> tuple[Future[None], TieredCache]:
        """Leaves a context in the registry, from a copy that is to be closed when it is done."""
        contexts, cache = self._contexts, prefix.cache.fork()
        assert contexts is not None
        ids = torch.from_numpy(prefix.ids)[None]

        def add() -> None:
            contexts.add(cache, ids, self._llm)

        return self._aside(self._files, add), cache

    def close(self) -> None:
        """Waits for what is done aside."""
        self._files.close()
        self._layers.close()


def _start(run: RunningRequest, cache: TieredCache, reused: int, config: HybridConfig) -> None:
    cache.kv.look_every(config.audit_every, config.audit)  # not as who has computed the prompt
    run.begin(cache, reused)


def config_of(llm: LLM, request: Request) -> HybridConfig:
    """Method, budgets and audit of a request."""
    config = request.config or llm.config
    if request.audit_every is None or request.audit_every == config.audit_every:
        return config
    return config.replace(audit_every=request.audit_every)


_KNOWN = 24
"""Chunks that are looked back on: the machine may be busier now than it was."""

_FIRST, _LEAST = 128, 16
"""Tokens of the very first chunk, and of the smallest; where no stream waits, none is smaller than
the first, for else what a chunk costs whatever its length is paid again for every few tokens."""

_GROWTH = 4
"""Times as long as the longest known chunk that the next one is at most."""

_EVEN = 32
"""Tokens of which a chunk has a multiple: torch's products prepare for every new number of rows
again, and odd ones take longer (1.3 to 2.1 times, 64 to 192 rows of 256 channels on a Zen 5)."""

_EXACT = 1e-12
"""Sum of squared relative errors below which a prediction needs no further parts."""

_LOOKED_BACK = 16
"""Chunks whose delay the next one allows for."""

_LEAST_DELAY, _MOST_DELAY = 1.18, 4.0
"""Times as long as planned that a chunk is expected to take, at least and at most."""


class PrefillPace:
    """Predicts by the chunks before: a chunk takes some time whatever its length, each token of it
    some more, and each one again for every token before it.

    A machine that others use takes longer now and then; the worst of the latest chunks says how
    much longer.
    """

    def __init__(self) -> None:
        self._chunks: deque[tuple[int, int, float]] = deque(maxlen=_KNOWN)
        self._delays: deque[float] = deque(maxlen=_LOOKED_BACK)

    def note(self, first: int, count: int, seconds: float) -> None:
        """A chunk of `count` tokens took so long, behind `first` others."""
        if self._chunks:
            self._delays.append(seconds / self.seconds(first, count))
        self._chunks.append((first, count, seconds))

    def seconds(self, first: int, count: int) -> float:
        """Seconds that `count` tokens behind `first` others take where nothing delays them; of
        their number alone while nothing is known.
        """
        if not self._chunks:
            return float(count)
        fixed, each, before = self._costs()
        return fixed + count * (each + before * (first + count / 2))

    def tokens(self, first: int, seconds: float, most: int, *, alone: bool = False) -> int:
        """Number of tokens behind `first` others that take no more than `seconds`, at most `most`.

        At least a few, whatever they take and if no time is left, for else a prompt would never
        end; but for these and the last ones a multiple of `_EVEN`.

        Args:
            alone: no stream waits.
        """
        if not self._chunks:
            return min(most, _FIRST)
        fixed, each, before = self._costs()
        # fixed + count * (each + before * (first + count / 2)) = seconds
        own, time = each + before * first, max(0.0, seconds / self._delay - fixed)
        count = int(2 * time / (own + sqrt(own**2 + 2 * before * time)))
        count = min(count, _GROWTH * max(_FIRST, *(known for _, known, _ in self._chunks)))
        if count >= most:
            return most
        return max(min(_FIRST if alone else _LEAST, most), count // _EVEN * _EVEN)

    @property
    def _delay(self) -> float:
        return min(_MOST_DELAY, max(_LEAST_DELAY, *self._delays, 0.0))

    def _costs(self) -> tuple[float, float, float]:
        """Seconds of a chunk whatever its length, of a token, and of a pair of tokens of which one
        attends to the other; none is negative.
        """
        first, count, seconds = np.array(self._chunks, dtype=np.float64).T
        pairs = count * (first + count / 2)
        shares = np.stack([np.ones_like(count), count, pairs], 1) / seconds[:, None]
        best, error = None, np.inf
        for parts in ([1, 2], [0, 1], [0, 1, 2]):  # more of them only where they explain more
            if parts[0] == 0 and len(seconds) < len(parts):
                continue
            found, *_ = np.linalg.lstsq(shares[:, parts], np.ones(len(seconds)), rcond=None)
            off = float(((shares[:, parts] @ found - 1) ** 2).sum())
            if (found > 0).all() and off < error / 2 and error > _EXACT:
                best, error = np.zeros(3), off
                best[parts] = found
        if best is None:  # too few chunks, or too much alike, to tell them apart
            return 0.0, float((seconds / count).max()), 0.0
        return float(best[0]), float(best[1]), float(best[2])
