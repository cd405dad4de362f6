"""Putting a cache back to where it stood: always, or after a call that failed in the middle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from hybrid_kv.models.cache_layers import can_go_back
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.runtime.checkpoint import Checkpoint
from hybrid_kv.types import Demotion


@contextmanager
def rolled_back(cache: TieredCache) -> Iterator[None]:
    """A block after which the cache is as it was before."""
    with cache.in_use():
        saved, states = Checkpoint.of(cache.kv.layers), _states(cache)
        try:
            yield
        finally:
            saved.restore(cache.kv.layers)
            _set_states(cache, states)


class ReturnPoint:
    """Where a cache of one row stands, to go back to if what comes next fails.

    Cheap, unlike `rolled_back`: tokens are taken back by cropping, and what has moved to the cold
    tier since stays there. Only where a method drops entries, which cropping would not bring back,
    is the resident tier copied.
    """

    def __init__(self, cache: TieredCache) -> None:
        self._cache, self._num_tokens = cache, cache.get_seq_length()
        self._states = _states(cache)
        self._was_open = any(store.placement is None for store in cache.kv.stores.values())
        places = [layer.placement for layer in cache.kv.stores.values()]
        moves = (Demotion.DROP, Demotion.ABSORB)
        drops = any(place is not None and place.rest in moves for place in places)
        shadows = any(row.shadows for store in cache.kv.stores.values() for row in store.rows)
        self._saved = Checkpoint.of(cache.kv.layers) if drops or shadows else None

    def go_back(self) -> bool:
        """Forgets what came since, of which layers may hold different numbers after a failure.

        False where that cannot be done: nothing came before, rows were forked since, or memory runs
        out again. The cache is then of no use any more.
        """
        kv = self._cache.kv
        try:
            if self._saved is not None:
                self._saved.restore(kv.layers)
            if not self._num_tokens or any(len(store.rows) != 1 for store in kv.stores.values()):
                return False
            if self._was_open and any(store.moves_entries for store in kv.stores.values()):
                return False  # its prompt has ended with tokens that came since
            for layer_idx, store in kv.stores.items():
                kv.layers[layer_idx].crop(store.rows[0].length - self._num_tokens)
        except (MemoryError, RuntimeError):
            return False
        _set_states(self._cache, self._states)
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
