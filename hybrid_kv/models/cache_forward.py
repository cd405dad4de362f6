"""A forward with a cache: when it is over all layers hold its tokens, or none does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from hybrid_kv.errors import UnsupportedModelError
from hybrid_kv.models.cache_layers import can_go_back
from hybrid_kv.models.cache_state import CacheState

_log = logging.getLogger(__name__)


class Forward:
    """A forward that runs with a cache, to be ended once or taken back.

    failed: set by who knows that it has, where nothing is raised.

    Args:
        cache: whose layers take the tokens.
        state: its state.
        start_over: makes the cache as it was before its first token.
    """

    def __init__(self, cache: Cache, state: CacheState, start_over: Callable[[], None]) -> None:
        self._cache, self._state, self._start_over = cache, state, start_over
        self.failed = self._is_over = False
        self._before: list[Any] = []

    @contextmanager
    def running(self) -> Iterator[Forward]:
        """The block of the forward, at the end of which it is ended, or taken back if it failed."""
        try:
            self._begin()
            yield self
            self.end()
        except BaseException:
            self._go_back()
            raise
        finally:
            self._state.in_forward = False
            self._state.shown.end_forward()

    def _begin(self) -> None:
        """Notes where the cache stands."""
        layers = self._cache.layers
        self._state.kv.layers.begin_forward()
        self._before = [layer.mark() if can_go_back(layer) else None for layer in layers]
        self._was_empty = all(map(_is_empty, layers))
        self._state.in_forward = self._state.is_unfinished = True

    def end(self) -> None:
        """Ends it, once.

        Raises:
            UnsupportedModelError: a layer stored keys and then attended without asking us.
            Exception: it cannot be ended, and is taken back next.
        """
        if self.failed:
            self._go_back()
        elif not self._is_over:
            self._settle()
            self._is_over, self._state.is_unfinished = True, False

    def _settle(self) -> None:
        kv = self._state.kv
        if (ahead := kv.means.look_ahead) is not None:
            ahead.forget()
        for idx, layer in enumerate(self._cache.layers):
            if getattr(layer, "pending", False):
                raise UnsupportedModelError(
                    f"layer {idx} of this model attends to other keys than it caches, which "
                    "hybrid_kv cannot serve; use this model without it"
                )
        kv.layers.end_forward()

    def _go_back(self) -> None:
        """Puts the cache back to where it was; where that is not possible, it is broken."""
        if self._is_over:
            return
        self._is_over, state = True, self._state
        if state.is_closed:
            state.is_unfinished = False
            return
        try:
            state.is_unfinished = not self._put_back()
        except Exception:  # what ended the forward is what its caller wants to know
            _log.warning("a cache could not be put back and is broken", exc_info=True)

    def _put_back(self) -> bool:
        """False where that cannot be done: recurrent states were overwritten, or see
        `Layers.go_back`.
        """
        if not self._before:  # it failed before it began
            return True
        done = self._state.kv.layers.go_back()
        if self._was_empty:
            self._start_over()
            return True
        for layer, mark in zip(self._cache.layers, self._before, strict=True):
            if can_go_back(layer):
                layer.go_back(mark)
            else:
                done = False
        self._state.shown.cut(self._cache.get_seq_length())
        return done


def _is_empty(layer: Any) -> bool:
    """Whether a layer has seen no token."""
    states = getattr(layer, "has_previous_state", {})
    seen = layer.get_seq_length() if isinstance(layer, CacheLayerMixin) else 0
    return seen == 0 and not any(states.values())
