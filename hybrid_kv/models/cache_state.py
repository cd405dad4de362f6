"""State of a cache that its layers share: its store, who uses it, whether it is open and whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock

from torch import Tensor

from hybrid_kv.errors import BrokenCacheError, BusyError, ConfigError, UnsupportedModelError
from hybrid_kv.models.shown_tokens import ShownTokens
from hybrid_kv.runtime import KVCache


class CacheState:
    """State that the layers of a cache share, and who may use it now. It knows none of them, nor
    does it know the cache, so that a cache which nobody refers to is freed at once.

    kv: what all layers store to and attend by. shown: see `ShownTokens`. in_own_graph: a compiled
    step of ours is traced or runs with the cache. is_unfinished: a forward runs, or has ended
    without putting the layers back in step.
    """

    def __init__(self, kv: KVCache, is_open: Callable[[], bool]) -> None:
        self.kv, self._is_open = kv, is_open
        self.in_forward = self.in_own_graph = self.is_closed = self.is_unfinished = False
        self._lock = RLock()  # held by the thread that uses the cache
        self.shown = ShownTokens()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A block in which nobody else uses the cache, which is whole.

        Raises:
            BusyError: another thread does, or this one in the middle of a forward.
            BrokenCacheError: a forward has ended in the middle and left it so.
        """
        with self.alone():
            self.require_idle()
            if self.is_unfinished:
                raise BrokenCacheError(
                    "this cache was interrupted in the middle of a forward, and what its layers "
                    "have lost since does not come back; call its reset(), or take a new one"
                )
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block in which no other thread uses the cache; raises BusyError where one does."""
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "this cache is in use in another thread, and serves one at a time; wait for that "
                "one, or fork the cache before"
            )
        try:
            yield
        finally:
            self._lock.release()

    def require_idle(self) -> None:
        """Raises BusyError in the middle of a forward."""
        if self.in_forward:
            raise BusyError(
                "this cache is in the middle of a forward in this thread; wait until that one has "
                "returned"
            )

    def require_open(self) -> None:
        """Raises ConfigError where our attention is off: the model would attend new keys only.

        Raises BusyError where a forward runs in another thread.
        """
        with self.alone():
            self.require_life()
        if not self.in_forward:
            raise ConfigError(
                "this cache was given to a model that is not attached, or to a part of one; call "
                "the attached model itself"
            )

    def require_life(self) -> None:
        """Raises ConfigError where the cache or the attachment that it belongs to has ended."""
        if not self._is_open():
            raise ConfigError(
                "this cache belongs to a model that was detached; use it inside its `with "
                "hybrid_kv.attach(...)` block"
            )
        if self.is_closed:
            raise ConfigError("this cache is closed and holds nothing any more; take a new one")

    def check_shapes(self, layer_idx: int, k: Tensor, v: Tensor) -> None:
        """Raises UnsupportedModelError where keys or values are not as the model's config says."""
        shape = next(shape for shape in self.kv.info.layers if shape.layer_idx == layer_idx)
        expected = (shape.num_kv_heads, shape.head_dim)
        for name, tensor in (("keys", k), ("values", v)):
            if (tensor.shape[1], tensor.shape[3]) != expected:
                raise UnsupportedModelError(
                    f"{name} of layer {layer_idx} must have {expected[0]} heads of {expected[1]} "
                    f"channels by the model's configuration, got {tensor.shape[1]} of "
                    f"{tensor.shape[3]}; use this model without hybrid_kv"
                )

    def forked(self, kv: KVCache) -> CacheState:
        """The state of a fork of the cache, which stores in `kv`."""
        new = CacheState(kv, self._is_open)
        new.shown = self.shown.forked()
        return new
