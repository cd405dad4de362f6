"""One layer of a cache: what it holds, its prompt, what is leaving it, how its steps are made."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from hybrid_kv.errors import ShapeError
from hybrid_kv.plugins import Placement
from hybrid_kv.rotary import Rotary
from hybrid_kv.runtime.cache_context import CacheContext, append, new_store
from hybrid_kv.runtime.layer_prompt import (
    LayerPrompt,
    PromptMark,
    attend_exact,
    note_queries,
)
from hybrid_kv.runtime.offload import Finder, Leaving, nearest_finder
from hybrid_kv.runtime.plan import PlannedSteps
from hybrid_kv.store import LayerStore, RowMark
from hybrid_kv.types import Demotion, Evidence, LayerShape, Needs, PartialAttention

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerMark:
    """The state of a layer to go back to; collected: of its prompt, where that had not ended."""

    store: LayerStore | None
    is_sealed: bool
    rows: Sequence[RowMark]
    collected: PromptMark

    @classmethod
    def of(cls, layer: LayerCache) -> LayerMark:
        """The present state of a layer."""
        store = layer.store
        is_sealed = store is not None and store.placement is not None
        rows = [] if store is None else [row.mark() for row in store.rows]
        return cls(store, is_sealed, rows, ((), ()) if is_sealed else layer.prompt.mark())


class LayerCache:
    """The entries of one layer under the cache's method, for all batch rows.

    It is *unsealed* while its prompt is computed: everything is resident, attention exact. Sealing
    asks the method where entries shall live; what leaves the window then departs, see `Leaving`.

    store: the entries; None before the first token. prompt: what it has seen of its prompt.
    leaving: what is on its way out of the window. steps: its decode steps.

    Args:
        find: see `Leaving`.
    """

    def __init__(
        self, shape: LayerShape, rotary: Rotary, means: CacheContext, find: Finder = nearest_finder
    ) -> None:
        self.shape, self.rotary, self.means = shape, rotary, means
        self.method = means.method.of_layer(shape.layer_idx)
        self.store: LayerStore | None = None
        self.prompt = LayerPrompt(shape)
        self.leaving = Leaving(self.method, rotary, means, find)
        self.steps = PlannedSteps(shape, self.method, means)
        self._mark: LayerMark | None = None  # while a forward runs that may be taken back

    @property
    def is_sealed(self) -> bool:
        """Whether its prompt has ended."""
        return self.store is not None and self.store.placement is not None

    @property
    def held(self) -> LayerStore:
        """The store of a layer that has one.

        Raises:
            ShapeError: it has not: no token was stored.
        """
        if self.store is None:
            raise ShapeError(
                f"layer {self.shape.layer_idx} must hold a token before it is asked, got none; "
                "pass keys and values with the first queries"
            )
        return self.store

    # Tokens and attention -------------------------------------------------------------------------

    def append(self, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        """Stores new tokens; see `append`."""
        if self.store is None:
            self.store = new_store(self.shape, self.means, k)
            needs = self.method.needs | self.means.watched
            self.prompt.begin(needs, k.shape[0], k.device, self.means.prefill_error)
        append(self.store, self.means, self.method, k, v, valid)

    def attend_exact(
        self, q: Tensor, valid: Tensor | None, *, scale: float, softcap: float | None
    ) -> PartialAttention:
        """Everything stored, for many new tokens q [B, Hq, T, D]; a prompt reads as it was set."""
        means, store, keeper = self.means, self.held, self.steps.keeper
        if not self.is_sealed:
            return self.prompt.attend(means, store, q, valid, scale=scale, softcap=softcap)
        part = attend_exact(
            means.ops, means.executor, store, q, valid, scale=scale, softcap=softcap
        )
        if valid is None:
            note_queries(store, q)
        if keeper is not None and keeper.follows:
            told = means.executor, store, q, part.lse, valid
            keeper.follow_turn(*told, scale=scale, softcap=softcap)
        return part

    # The prompt's end -----------------------------------------------------------------------------

    def seal(self, evidence: tuple[Evidence, ...] | None = None) -> None:
        """Ends the prompt: entries begin to move to where the method wants them.

        Args:
            evidence: what another cache collected of the same prompt; None for what this one did.
        """
        means, store = self.means, self.held
        if evidence is None:
            evidence = self.prompt.evidence()
            if means.watched != Needs():
                self.prompt.keep()
        placement = self.method.seal(self.shape.layer_idx, evidence)
        shadows = means.audits and placement.drops
        store.seal(placement.shadowed() if shadows else placement, shadows=shadows)
        self._begin_decoding(store, placement)
        with _unsealed_on_failure(store):
            self.leaving.begin_prompt(store, self.steps.keeper, self.prompt, evidence)
            if self.leaving.has_arrived:
                self.settle()
        _log.debug("layer %d sealed at %d tokens", self.shape.layer_idx, store.longest)

    def _begin_decoding(self, store: LayerStore, placement: Placement) -> None:
        """Makes what serves the entries of a sealed store as they leave its window."""
        means, pool = self.means, store.resident.pool
        if placement.rest is Demotion.ABSORB:
            from hybrid_kv.runtime.checked_method import CheckedMethod

            self.steps.keeper = CheckedMethod(self.method, self.shape, pool.dtype, pool.device)
        store.select = means.select_for(store)

    def take(self, store: LayerStore, placement: Placement) -> None:
        """Goes on from a sealed store of another cache, in the place of its own prompt.

        Args:
            placement: what the method asked for; that of the store may have shadows beside it.
        """
        if self.store is not None:
            raise ShapeError(
                f"layer {self.shape.layer_idx} must be empty to take what another cache held, got "
                f"{self.store.longest} tokens in it; use a new cache"
            )
        self.store = store
        self._begin_decoding(store, placement)

    # What leaves the window -----------------------------------------------------------------------

    def move_on(self, *, settle: bool = True) -> None:
        """Ends a step: what has left the window begins to depart.

        Args:
            settle: what has arrived at once; else no entry changes yet.
        """
        store = self.store
        if store is None or store.placement is None or self.leaving.departure is not None:
            return
        if self.means.speculates:
            return
        for row in store.rows:
            if row.table.num_tokens >= row.full_tokens:  # hardly ever
                start, stop = row.outside()
                if start < stop:
                    departure = self.leaving.begin_pages(store, self.steps.keeper)
                    if settle and departure.arrived:
                        self.settle()
                    return

    def settle(self) -> None:
        """Ends what is leaving; whoever reads or changes the layer does this first."""
        leaving = self.leaving.end()
        if leaving is None:
            return
        begin = self.means.phases.now()
        sealing = _unsealed_on_failure(self.held) if leaving.is_prompt else nullcontext()
        with sealing:
            leaving.end(self.means.builds)
        self.means.phases.book("transfer", begin)
        if leaving.is_prompt:
            self.prompt.end()
            if self._mark is not None and [one.length for one in self._mark.rows] == [
                row.length for row in self.held.rows
            ]:
                self._mark = LayerMark.of(self)  # the prompt has ended before anything new came

    # Rows, and going on elsewhere -----------------------------------------------------------------

    def crop(self, count: int) -> None:
        """Forgets the newest `count` tokens of every row.

        Raises:
            MethodError: the method has lost what would be the window; nothing was forgotten.
        """
        self.settle()
        if self.store is not None:
            self.store.crop(count)

    def fork(self, sources: Sequence[int]) -> None:
        """Row r continues from row sources[r]; pages are copied on write only."""
        self.settle()
        self.steps.drop()
        if self.store is not None:
            self.store.fork(sources)
        self.prompt.fork(sources)
        self.leaving.fork(sources)

    def forked(self, means: CacheContext) -> LayerCache:
        """A layer of another cache, of the same method, that continues from the same entries."""
        new = type(self)(self.shape, self.rotary, means)
        new.prompt, new.leaving = self.prompt.forked(), self.leaving.forked(means)
        new.steps.keeper = self.steps.keeper
        if self.store is not None:
            new.store = self.store.forked()
            new.store.select = means.select_for(new.store)
        return new

    def go_on_from(self, store: LayerStore) -> None:
        """Takes a branch of its store, or what it was branched from, in that store's place."""
        self.store = store
        self.steps.drop()

    def reset(self) -> None:
        """Forgets all entries."""
        self.store, self.prompt = None, LayerPrompt(self.shape)
        self.leaving.reset()
        self.steps = PlannedSteps(self.shape, self.method, self.means)

    # A forward that may fail ----------------------------------------------------------------------

    def mark(self) -> None:
        """Notes where the layer stands, for `go_back`; nothing is leaving it."""
        self._mark = LayerMark.of(self)

    def forget_mark(self) -> None:
        """From now on there is nothing to go back to."""
        self._mark = None

    def go_back(self) -> bool:
        """Takes back what came since `mark`; False where that cannot be done, see `Row.go_back`.

        A prompt that has ended since as it was then stays ended.
        """
        mark, self._mark = self._mark, None
        leaving = self.leaving.end()  # waited for: nobody writes to memory that is let go
        if leaving is not None and leaving.is_prompt:
            self.held.unseal()
        if mark is None or mark.store is None:
            self.reset()
            return True
        store = self.held
        if store is not mark.store or len(store.rows) != len(mark.rows):
            return False
        if not self.is_sealed:
            self.prompt.go_back(mark.collected)
        elif not mark.is_sealed and store.moves_entries:
            return False
        return all(row.go_back(own) for row, own in zip(store.rows, mark.rows, strict=True))


@contextmanager
def _unsealed_on_failure(store: LayerStore) -> Iterator[None]:
    """A part of ending a prompt, which has not ended and can be ended again if this fails."""
    try:
        yield
    except BaseException:
        store.unseal()
        raise
