"""Our KV cache in the shape that transformers expects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any, NoReturn, Self

from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError, IntegrityError
from hybrid_kv.models.cache_forward import Forward
from hybrid_kv.models.cache_layers import HybridLayer, can_go_back, new_layers
from hybrid_kv.models.cache_state import CacheState
from hybrid_kv.models.shown_tokens import ShownTokens
from hybrid_kv.runtime import KVCache
from hybrid_kv.transfer import Executor
from hybrid_kv.types import ModelInfo, Work


class TieredCache(Cache):
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
        """What all layers store to and attend by; another one may take its place while empty."""
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
        with self.in_use(), Forward(self, self.state, self._start_over).running() as forward:
            yield forward

    def _start_over(self) -> None:
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
        """Beam search: rows continue from other rows."""
        with self.in_use():
            super().reorder_cache(beam_idx)  # type: ignore[arg-type]
            self.state.shown.take_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        with self.in_use():
            super().batch_repeat_interleave(repeats)
            self.state.shown.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        with self.in_use():
            super().batch_select_indices(indices)
            self.state.shown.take_rows(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest tokens; transformers passes their negative number.

        Raises:
            MethodError: a method has lost what would be the window; no layer has forgotten any.
        """
        with self.in_use():
            for store in self.kv.stores.values():
                store.check_crop(max(0, -tokens_to_remove))
            super().crop(tokens_to_remove)

    @property
    def can_crop(self) -> bool:
        """Whether every layer still has what came before its newest tokens.

        Windows have not, nor has a method that drops entries once it has dropped some.
        """
        if any(row.lost_entries for store in self.kv.stores.values() for row in store.rows):
            return False
        return all(
            isinstance(layer, (HybridLayer, DynamicLayer)) and not layer.is_sliding
            for layer in self.layers
        )

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
