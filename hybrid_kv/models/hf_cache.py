"""Our KV cache in the shape that transformers expects, and a forward with it.

When a forward is over all layers hold its tokens, or none does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError, IntegrityError, UnsupportedModelError
from hybrid_kv.models.cache_layers import HybridLayer, can_go_back, new_layers
from hybrid_kv.models.cache_state import CacheState, ShownTokens, states_of, stuck_layers
from hybrid_kv.runtime import KVCache
from hybrid_kv.transfer import Executor
from hybrid_kv.types import Demotion, ModelInfo, Work

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
        check_attended(self._cache.layers)
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


def check_attended(layers: Sequence[Any]) -> None:
    """Raises UnsupportedModelError where a layer has new keys that no attention has asked for."""
    for idx, layer in enumerate(layers):
        if getattr(layer, "pending", False):
            raise UnsupportedModelError(
                f"layer {idx} of this model attends to other keys than it caches, which hybrid_kv "
                "cannot serve; use this model without it"
            )


def _is_empty(layer: Any) -> bool:
    """Whether a layer has seen no token."""
    states = getattr(layer, "has_previous_state", {})
    seen = layer.get_seq_length() if isinstance(layer, CacheLayerMixin) else 0
    return seen == 0 and not any(states.values())


class ServedCache(Cache):
    """A cache with which an attached model attends: of one conversation, or of several joined."""


class TieredCache(ServedCache):
    """The cache of one conversation; full-attention layers are tiered, others are not.

    Args:
        model_config: the text model's transformers configuration.
        is_open: tells whether the attachment that serves this cache still stands.
        executor: shared with other caches; None for one of its own.
    """

    def __init__(
        self,
        info: ModelInfo,
        config: HybridConfig,
        model_config: PreTrainedConfig,
        is_open: Callable[[], bool],
        executor: Executor | None = None,
    ) -> None:
        self.state = CacheState(KVCache(info, config, executor), is_open)
        self._model_config = model_config
        super().__init__(layers=new_layers(self.state, model_config))

    @property
    def kv(self) -> KVCache:
        """Store of all layers; another one may take its place while it is empty."""
        return self.state.kv

    @kv.setter
    def kv(self, kv: KVCache) -> None:
        self.state.kv = kv

    @property
    def work(self) -> Work:
        """Counters of what decoding has touched."""
        return self.kv.work

    def in_use(self) -> AbstractContextManager[None]:
        """See `CacheState.in_use`."""
        return self.state.in_use()

    def alone(self) -> AbstractContextManager[None]:
        """See `CacheState.alone`."""
        return self.state.alone()

    @contextmanager
    def forward(self) -> Iterator[Forward]:
        """While the attached model runs with this cache, and our attention is on.

        Where it fails, be it by an interrupt, the cache goes back to where it was, or is broken.

        Raises:
            UnsupportedModelError: a layer stored keys and then attended without asking us.
            FileFormatError: a file in which entries lie was cut.
            BusyError: another forward runs with it.
        """
        if (check_source := self.kv.check_source) is not None:
            check_source()
        seen, unread = self.get_seq_length(), self.work.visible - self.work.attended
        if self.exact_tokens == seen:
            self.state.inexact_from = None
        with self.in_use(), Forward(self, self.state, self.start_over).running() as forward:
            yield forward
        if self.state.inexact_from is None and self.work.visible - self.work.attended != unread:
            self.state.inexact_from = seen

    @property
    def exact_tokens(self) -> int:
        """The first tokens of which all entries are those of full attention, but for rounding.

        Others come from decode steps that left entries unread. What a method rounds as it stores
        it, and what sparse prefill leaves out, does not count here.
        """
        seen, end = self.get_seq_length(), self.state.inexact_from
        return seen if end is None else min(end, seen)

    def start_over(self) -> None:
        """Forgets all tokens, but no counter."""
        self.kv.start_over()
        # New layers rather than emptied ones: what emptying leaves behind differs by kind.
        self.layers = new_layers(self.state, self._model_config)
        self.state.shown = ShownTokens()

    def fork(self) -> Self:
        """A cache of the same tokens: either goes on, is cropped or closed without the other.

        Tokens that have left the window are shared with all that finds them, and never copied. What
        is resident is copied: sinks and window of the method, sliding windows and recurrent states
        of the model. Where a method keeps everything resident (full, quest), pages are shared until
        one of the two writes to them. A prompt that has not ended ends here, as at a first answer.

        Raises:
            ConfigError: this cache is closed, or its model was detached.
            CapacityError, DeviceMemoryError: the copy does not fit; this cache is as it was.
        """
        with self.in_use():
            self.state.require_life()
            new = type(self).__new__(type(self))
            vars(new).update(vars(self))
            new.state = self.state.forked(self.kv.fork())
            new.layers = [
                layer.forked(new.state) if can_go_back(layer) else deepcopy(layer)
                for layer in self.layers
            ]
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A fork, see there."""
        new = memo[id(self)] = self.fork()
        return new

    def __reduce__(self) -> NoReturn:
        """Raises ConfigError: a cache is more than tensors."""
        raise ConfigError(
            "a cache cannot be pickled: its indexes and its model's attachment have no form in a "
            "pickle; make a context (hybrid_kv.load, LLM.context) and call Context.save"
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows continue from other rows, as many as are named."""
        with self.in_use():
            super().reorder_cache(beam_idx)  # type: ignore[arg-type]
            self.state.shown.take_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        with self.in_use():
            self.reorder_cache(torch.arange(self._num_rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        with self.in_use():
            self.reorder_cache(torch.arange(self._num_rows)[indices.cpu()])

    @property
    def _num_rows(self) -> int:
        """Rows of the batch; layers with recurrent states can be reordered, and nothing else."""
        counts = [len(store.rows) for store in self.kv.stores.values()]
        for layer in self.layers:
            held = (getattr(layer, "keys", None), *states_of(layer).values())
            counts += [len(one) for one in held if one is not None]
        return max(counts, default=0)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest tokens; transformers passes their negative number.

        Raises:
            ConfigError: a layer's state cannot follow; no layer has forgotten any.
            MethodError: a method has lost what would be the window, likewise.
        """
        with self.in_use():
            if (stuck := next(stuck_layers(self.layers), None)) is not None:
                if not tokens_to_remove:
                    return
                raise ConfigError(
                    f"layer {stuck} of this cache keeps one state for all its tokens (linear "
                    "attention), from which none can be taken back; fork the cache before tokens "
                    "that may have to go, or compute the shorter sequence anew"
                )
            for store in self.kv.stores.values():
                store.check_crop(max(0, -tokens_to_remove))
            super().crop(tokens_to_remove)

    @property
    def can_crop(self) -> bool:
        """Whether every layer still has what came before its newest tokens.

        Windows and states of a fixed size have not, nor has a method that drops entries once it has
        dropped some.
        """
        rows = (row for store in self.kv.stores.values() for row in store.rows)
        if any(row.lost_entries for row in rows) or any(True for _ in stuck_layers(self.layers)):
            return False
        return all(
            isinstance(layer, (HybridLayer, DynamicLayer)) and not layer.is_sliding
            for layer in self.layers
        )

    @property
    def keeps_all(self) -> bool:
        """Whether all layers keep every entry as it was, and with it all prefixes of a context."""
        if not all(isinstance(layer, HybridLayer) for layer in self.layers):
            return False  # a sliding window has its newest tokens only
        method = self.kv.means.method
        rests = {method.seal(layer_idx, ()).rest for layer_idx in self.kv.layers}
        return rests <= {Demotion.KEEP, Demotion.OFFLOAD}

    def reset(self) -> None:
        """Forgets the conversation."""
        with self.alone():
            self.state.require_idle()
            self.kv.reset()
            self.layers = new_layers(self.state, self._model_config)
            self.state.shown, self.state.is_unfinished = ShownTokens(), False

    def close(self) -> None:
        """Gives back all memory; a cache that nobody needs any more does so by itself.

        An index build in progress keeps its keys until it notices, at its next block of rows.
        """
        self.state.is_closed = True
        self.layers = new_layers(self.state, self._model_config)
        self.kv.close()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every token seen has exactly one owner in every layer."""
        with self.alone():
            self.state.require_idle()
            if self.state.is_unfinished:
                raise IntegrityError("a forward has ended in the middle, and left layers as it was")
            seen = {i: x.get_seq_length() for i, x in enumerate(self.layers) if can_go_back(x)}
            stores = self.kv.stores.items()
            held = {idx: [row.length for row in store.rows] for idx, store in stores}
            for counts in (list(seen.items()), list(held.items())):
                for idx, count in counts[1:]:
                    if count != counts[0][1]:
                        raise IntegrityError(
                            f"layer {idx} has seen {count} tokens, layer {counts[0][0]} "
                            f"{counts[0][1]}"
                        )
            self.kv.check_integrity()
