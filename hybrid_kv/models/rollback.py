"""Putting a cache back to where it stood: always, or after a call that failed in the middle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from hybrid_kv.models.cache_layers import can_go_back
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.runtime.layer import Layers
from hybrid_kv.store import LayerStore
from hybrid_kv.types import Demotion


@contextmanager
def rolled_back(cache: TieredCache) -> Iterator[None]:
    """A block after which the cache is as it was before."""
    with cache.in_use():
        saved, states = Checkpoint.of(cache.kv.layers), _states(cache)
        inexact_from = cache.state.inexact_from
        try:
            yield
        finally:
            saved.restore(cache.kv.layers)
            _set_states(cache, states)
            cache.state.inexact_from = inexact_from


class ReturnPoint:
    """State of a cache of one row, to go back to if what comes next fails.

    Cheap, unlike `rolled_back`: tokens are taken back by cropping, and what has moved to the cold
    tier since stays there. Only where a method drops entries, which cropping would not bring back,
    is the resident tier copied.
    """

    def __init__(self, cache: TieredCache) -> None:
        self._cache, self._num_tokens = cache, cache.get_seq_length()
        self._states, self._inexact_from = _states(cache), cache.state.inexact_from
        self._num_stores = len(cache.kv.stores)
        self._was_open = any(store.placement is None for store in cache.kv.stores.values())
        places = [layer.placement for layer in cache.kv.stores.values()]
        moves = (Demotion.DROP, Demotion.ABSORB)
        drops = any(place is not None and place.rest in moves for place in places)
        shadows = any(row.shadows for store in cache.kv.stores.values() for row in store.rows)
        self._saved = Checkpoint.of(cache.kv.layers) if drops or shadows else None

    def go_back(self) -> bool:
        """Forgets what came since, of which layers may hold different numbers after a failure.

        False where that cannot be done: nothing came before, some of that was dropped or rows were
        forked since, or memory runs out again. The cache is then of no use any more.
        """
        kv = self._cache.kv
        try:
            if self._saved is not None:
                self._saved.restore(kv.layers)
            lengths = [[row.length for row in store.rows] for store in kv.stores.values()]
            if not self._num_tokens or len(lengths) != self._num_stores:
                return False
            if any(len(rows) != 1 or rows[0] < self._num_tokens for rows in lengths):
                return False
            if self._was_open and any(store.moves_entries for store in kv.stores.values()):
                return False  # its prompt has ended with tokens that came since
            for layer_idx, store in kv.stores.items():
                kv.layers[layer_idx].crop(store.rows[0].length - self._num_tokens)
        except (MemoryError, RuntimeError):
            return False
        _set_states(self._cache, self._states)
        self._cache.state.inexact_from = self._inexact_from
        return True

    def keep(self) -> None:
        """Stays at what came since: gives up the copy of what was before."""
        for layer_idx, layer in self._saved.stores.items() if self._saved is not None else ():
            if self._cache.kv.stores.get(layer_idx) is not layer:
                layer.cold.release()


def _states(cache: TieredCache) -> list[Any]:
    """State of the layers beside the runtime's stores."""
    # Layers of transformers' own are small, and written to in place: copy them.
    return [layer.mark() if can_go_back(layer) else deepcopy(vars(layer)) for layer in cache.layers]


def _set_states(cache: TieredCache, states: Sequence[Any]) -> None:
    """Lets the layers hold that again; the runtime's stores have been put back, too."""
    for layer, state in zip(cache.layers, states, strict=True):
        if can_go_back(layer):
            layer.go_back(state)
        else:
            vars(layer).update(state)
    cache.state.is_unfinished = False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of all layers to go back to: the stores they had, and by row how many tokens.

    Where the method moves entries on as the window advances, the next tokens are taken by a branch
    of the store: cropping would bring back neither dropped nor offloaded entries.
    """

    stores: Mapping[int, LayerStore]
    lengths: Mapping[int, Sequence[int]]

    @classmethod
    def of(cls, layers: Layers) -> Checkpoint:
        """The state now; prompts that have not ended end here.

        Raises:
            CapacityError, DeviceMemoryError: a branch does not fit; nothing has changed.
        """
        layers.seal_all()
        saved, branches = layers.stores(), dict[int, LayerStore]()
        try:
            for layer_idx, store in saved.items():
                if store.moves_entries:
                    branches[layer_idx] = store.branch()
        except BaseException:  # memory ran out: all layers stay what they are
            for branch in branches.values():
                branch.cold.release()
            raise
        for layer_idx, branch in branches.items():
            layers[layer_idx].go_on_from(branch)
        lengths = {idx: [row.length for row in store.rows] for idx, store in saved.items()}
        return cls(saved, lengths)

    def restore(self, layers: Layers) -> None:
        """Puts every layer back to where it was."""
        for layer in layers.values():
            layer.leaving.forget()
        for layer_idx, store in self.stores.items():
            layer = layers[layer_idx]
            if layer.held is not store:
                layer.held.cold.release()
                layer.go_on_from(store)
            for row, length in zip(store.rows, self.lengths[layer_idx], strict=True):
                row.crop(row.length - length)
