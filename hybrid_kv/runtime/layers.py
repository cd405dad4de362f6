"""The layers of a cache as one: what begins, ends or is taken back in all of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hybrid_kv.runtime.cache_context import CacheContext
from hybrid_kv.runtime.layer import LayerCache
from hybrid_kv.store import LayerStore
from hybrid_kv.store.memory import spare_host_memory
from hybrid_kv.types import Evidence, LayerShape, bytes_per_token

if TYPE_CHECKING:
    from hybrid_kv.runtime.device_plan import DevicePlan

_log = logging.getLogger(__name__)


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
