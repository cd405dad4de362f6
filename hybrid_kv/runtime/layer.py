"""The layers of a cache: what one holds, its prompt, what is leaving it, how its steps are made;
and what begins or ends in all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from hybrid_kv.store.memory import spare_host_memory
from hybrid_kv.types import Demotion, Evidence, LayerShape, Needs, PartialAttention, bytes_per_token

if TYPE_CHECKING:
    from hybrid_kv.runtime.device_plan import DevicePlan

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


class Layers(dict[int, LayerCache]):
    """The tiered layers by index.

    may_go_back: whether a forward runs that may be taken back; then what leaves the windows in its
        decode steps begins to depart when all layers have ended theirs.
    """

    def __init__(self, layers: Iterable[LayerCache], means: CacheContext) -> None:
        super().__init__((layer.shape.layer_idx, layer) for layer in layers)
        self._means, self.may_go_back = means, False

    def stores(self) -> dict[int, LayerStore]:
        """Stores of the layers that have a token; nothing is on its way any more."""
        self.settle()
        held = {idx: layer.store for idx, layer in self.items()}
        return {idx: store for idx, store in held.items() if store is not None}

    def settle(self) -> None:
        """Ends all that is leaving a window."""
        leaving = [layer for layer in self.values() if layer.leaving.departure is not None]
        for layer in reversed(leaving):  # the last copy first: with it all others arrived
            layer.leaving.wait()
        for layer in leaving:
            layer.settle()

    # The prompt's end -----------------------------------------------------------------------------

    def seal(
        self,
        layer_idx: int,
        evidence: tuple[Evidence, ...] | None = None,
        *,
        wait: bool = False,
    ) -> None:
        """Ends a layer's prompt: its entries move to where the method wants them.

        Called by whoever knows that the prompt is complete; else the first short input does it. On
        a GPU they leave while the next layer computes, and the layer before has left by then.

        Args:
            evidence: see `LayerCache.seal`.
            wait: until they have left, so that no two layers' prompts share a GPU's memory.
        """
        self.settle()
        if (pinned := self._means.pinned) is not None:
            pinned.begin()
        self[layer_idx].seal(evidence)
        if wait:
            self[layer_idx].settle()
        is_last = not self._unsealed()
        if (pinned := self._means.pinned) is not None:
            pinned.clear() if is_last else pinned.repeat()
        if is_last:
            told = self._means.method_name, len(self), self[layer_idx].held.longest
            _log.info("prompt ended: method %s, %d layers, %d tokens", *told)

    def seal_if_open(self, layer_idx: int, *, wait: bool = False) -> None:
        """Ends a layer's prompt unless that has happened or the layer is not tiered; see `seal`."""
        layer = self.get(layer_idx)
        if layer is not None and layer.store is not None and not layer.is_sealed:
            self.seal(layer_idx, wait=wait)

    def seal_all(self) -> None:
        """Ends the prompts of all layers; nothing is on its way any more."""
        for layer_idx in self:
            self.seal_if_open(layer_idx)
        self.settle()

    def _unsealed(self) -> list[LayerShape]:
        """The layers whose prompt is still to be computed or to be ended."""
        return [layer.shape for layer in self.values() if not layer.is_sealed]

    def spare_host_memory(self) -> int:
        """Free bytes of the host beyond the cold entries and indexes of the layers to come."""
        means, held = self._means, (layer.store for layer in self.values())
        store = next((store for store in held if store is not None), None)
        if store is None:
            return 0
        tokens = len(store.rows) * max(means.reserved_tokens, store.longest)
        dtype = store.resident.pool.dtype
        per_token = sum(
            bytes_per_token(shape, dtype) + means.method.index_bytes_per_token(shape, tokens)
            for shape in self._unsealed()
        )
        return spare_host_memory(tokens * per_token)

    # A forward, which may fail --------------------------------------------------------------------

    def begin_forward(self) -> None:
        """From now on all layers can be put back to where they are, by `go_back`."""
        self.may_go_back = True
        self.settle()
        for layer in self.values():
            layer.mark()

    def advance(self, position: int) -> list[DevicePlan]:
        """Begins a step of one token in all layers: its places are fixed, and devices are told.

        The layers attend it as ever, and store it where it belongs.

        Args:
            position: of the token in the model, padding included.

        Returns:
            By layer how the step is made, as long as that still holds; else nothing, be it that
            some layer cannot begin before its queries are known.
        """
        for layer in self.values():
            if layer.store is not None and layer.leaving.departure is None:
                layer.steps.renew(layer.store, *layer.prompt.logits)
        plans = self._device_plans()
        told = [plan for plan in plans if plan is not None]
        if not told or len(told) < len(plans):
            return []
        for plan in told:
            plan.advance(self._means.work)
        self._means.step_numbers().send(position)
        return told if all(self._device_plans()) else []

    def _device_plans(self) -> list[DevicePlan | None]:
        """By layer how its next step is made where it can be advanced already."""
        return [
            None
            if layer.store is None or layer.leaving.departure is not None
            else layer.steps.device_plan(layer.store)
            for layer in self.values()
        ]

    def describe_indexes(self) -> list[dict[str, Any]]:
        """By layer, row, extent and KV head what finds its cold entries; see `Index.describe`."""
        return [
            {"layer": layer_idx, **head}
            for layer_idx, store in sorted(self.stores().items())
            for head in store.cold.describe_indexes()
        ]

    def describe_look_ahead(self) -> list[dict[str, Any]]:
        """By layer what came of it; see `LookAhead.describe`."""
        ahead = self._means.searches_ahead()
        return [] if ahead is None else [ahead.describe(layer_idx) for layer_idx in self]

    def end_step(self, layer: LayerCache) -> None:
        """Ends a layer's decode step."""
        if not self.may_go_back:  # else `end_forward` does
            layer.move_on()

    def end_forward(self) -> None:
        """Ends a forward: its entries stay; those that left a window in a decode step depart."""
        if (numbers := self._means.numbers) is not None:
            for layer in self.values():
                numbers.take_back(layer.store)
            numbers.forget()
        self._move_on()
        for layer in self.values():
            layer.forget_mark()
        self.may_go_back = False

    def _move_on(self) -> None:
        for layer in self.values():  # methods are asked here, and may fail, before any entry moves
            layer.move_on(settle=False)
        for layer in self.values():
            if layer.leaving.departure is not None and layer.leaving.has_arrived:
                layer.settle()

    @contextmanager
    def speculating(self) -> Iterator[None]:
        """A block whose tokens may be cropped: entries leave the windows at its end."""
        self._means.speculates = True
        try:
            yield
        finally:
            self._means.speculates = False
        self._move_on()

    def go_back(self) -> bool:
        """Puts all layers back to where they were at `begin_forward`.

        Exact where that forward was a decode step, a piece of a prompt or all of it. What a later
        turn has moved to the cold tier stays there. False where a layer has lost something since;
        then the cache is of no use any more.
        """
        self.may_go_back, means = False, self._means
        if means.numbers is not None:
            means.numbers.forget()
        if means.look_ahead is not None:
            means.look_ahead.forget()
        done = [layer.go_back() for layer in self.values()]
        return all(done)
