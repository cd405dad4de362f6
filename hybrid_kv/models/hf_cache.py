"""Our KV cache in the shape that transformers expects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy, deepcopy
from threading import RLock
from typing import Any, NoReturn, Protocol, Self, TypeGuard

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import (
    BrokenCacheError,
    BusyError,
    ConfigError,
    IntegrityError,
    UnsupportedModelError,
)
from hybrid_kv.models.graphs import outside_graphs
from hybrid_kv.runtime import DevicePlan, HeldLayer, KVCache, TieredLayer
from hybrid_kv.runtime.together import JointRow
from hybrid_kv.transfer import Executor
from hybrid_kv.types import Evidence, ModelInfo, PartialAttention, Work

_log = logging.getLogger(__name__)


class CacheState:
    """What the layers of a cache share. It knows none of them, nor does it know the cache, so that
    a cache which nobody refers to is freed at once.

    is_unfinished: a forward runs, or has ended without putting the layers back in step.
    """

    def __init__(self, kv: KVCache, is_open: Callable[[], bool]) -> None:
        self.kv, self._is_open = kv, is_open
        self.in_forward = self.in_own_graph = self.is_closed = self.is_unfinished = False
        self._lock = RLock()  # held by the thread that uses the cache
        self.forget_mask()

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

    def forget_mask(self) -> None:
        self._mask: Tensor | None = None
        self._mask_is_plain = True

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

    def new_valid(self, mask: Tensor | None, new_tokens: int) -> Tensor | None:
        """Which of the newest tokens are real, [B, T] bool; None if all are."""
        if mask is None:
            return None
        newest = mask[:, -new_tokens:].bool()
        if mask is not self._mask:  # one look per forward, not per layer
            here = seen_on_host(mask)
            flags = newest if here is None else here[:, -new_tokens:]
            self._mask, self._mask_is_plain = mask, bool(flags.all())
        return None if self._mask_is_plain else newest


class AttendingLayer(Protocol):
    """A cache layer that attends by itself: ours, or several of them joined."""

    def attend(
        self, q: Tensor, mask: Tensor | None, *, scale: float, softcap: float | None
    ) -> PartialAttention:
        """Stores what `update` brought and attends; q [B, Hq, T, D], mask [B, tokens seen]."""
        ...


def tag(tensor: Tensor, layer: AttendingLayer | SlidingLayer) -> Tensor:
    """Hangs a handle to its cache layer on a tensor that goes to the attention function."""
    tensor.hybrid_kv_layer = layer  # type: ignore[attr-defined]
    return tensor


def layer_of(tensor: Tensor) -> AttendingLayer | SlidingLayer | None:
    """The cache layer that a key or value came from; None where the model made another tensor."""
    return getattr(tensor, "hybrid_kv_layer", None)


def with_copy(mask: Tensor, here: Tensor) -> Tensor:
    """Hangs its values on the host on a mask that goes to the attention function."""
    mask.hybrid_kv_here = here  # type: ignore[attr-defined]
    return mask


def seen_on_host(mask: Tensor) -> Tensor | None:
    """A mask's values on the host; None where it has to be looked at, for which a device waits."""
    return getattr(mask, "hybrid_kv_here", None)


class SlidingLayer(DynamicSlidingWindowLayer):
    """A sliding-window layer of transformers' own that knows whether its keys were attended.

    Not every model tells its attention function the window, so the layer does.
    """

    is_pending = False

    def __init__(self, state: CacheState, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self._state = state

    @outside_graphs
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._state.require_open()
        k, v = super().update(key_states, value_states, *args, **kwargs)
        self.is_pending = True
        return tag(k.view_as(k), self), v

    def mark(self) -> dict[str, Any]:
        """What it holds; its tensors are replaced, never written to."""
        return dict(vars(self))

    def go_back(self, mark: dict[str, Any]) -> None:
        """Holds that again."""
        vars(self).clear()
        vars(self).update(mark, is_pending=False)

    def forked(self, state: CacheState) -> SlidingLayer:
        """This layer in a fork of its cache, whose state is given."""
        new = copy(self)
        new._state = state
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(new, name, value.clone())
        return new

    def take(self, k: Tensor, v: Tensor, seen: int, device: torch.device) -> None:
        """Goes on from k, v [Hkv, N, D], the newest of so many tokens that were seen."""
        self.keys, self.values = k[None].to(device, copy=True), v[None].to(device, copy=True)
        self.dtype, self.device = k.dtype, device
        self._sliding_window_tensor = self._sliding_window_tensor.to(device)
        self.cumulative_length, self.is_initialized = seen, True


def copied_state(layer: Any) -> dict[str, Any]:
    """A copy of what a layer that is not tiered holds, without the cache that it belongs to."""
    return {name: deepcopy(value) for name, value in vars(layer).items() if name != "_state"}


class HybridLayer(CacheLayerMixin):
    """One full-attention layer of the cache.

    `update` keeps the new tokens aside and returns them with a handle to this layer, because the
    mask that tells padding apart arrives only with the attention call.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, state: CacheState, layer_idx: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state, self._layer_idx = state, layer_idx
        self._seen = 0
        self._pending: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._state.check_shapes(self._layer_idx, key_states, value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes new k, v [B, Hkv, T, D]; returns the same values with a handle to us.

        While a graph of ours is made the values only pass: its own operator brings them back.
        """
        if self._state.in_own_graph and torch.compiler.is_dynamo_compiling():
            return key_states, value_states
        return self._take_in(key_states, value_states)

    @outside_graphs
    def _take_in(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        self._state.require_open()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        # Tensors of our own: the model's must not keep us alive, and nothing is trained by them.
        k, v = tag(key_states.detach(), self), tag(value_states.detach(), self)
        self._pending = k, v
        self._seen += key_states.shape[-2]
        return k, v

    @property
    def _tiered(self) -> TieredLayer:
        return self._state.kv.layers[self._layer_idx]

    @property
    def is_pending(self) -> bool:
        """Whether new tokens came that no attention has asked for yet."""
        return self._pending is not None

    def joint_row(self, q: Tensor) -> JointRow | None:
        """Its part in a joint step of q [1, Hq, 1, D]; None where another layer stores for it."""
        if self._pending is None:
            return None
        return JointRow(self._state.kv, self._layer_idx, q, self._pending)

    def forget_pending(self) -> None:
        """Drops them: this forward has failed, or they are stored."""
        self._pending = None

    def attend(
        self, q: Tensor, mask: Tensor | None, *, scale: float, softcap: float | None
    ) -> PartialAttention:
        """Stores what `update` brought and attends; q [B, Hq, T, D], mask [B, tokens seen]."""
        if torch.is_grad_enabled() and q.requires_grad:
            raise ConfigError(
                "a tiered KV cache serves inference only, got queries that require gradients; "
                "call the model under torch.inference_mode()"
            )
        new, self._pending = self._pending, None
        valid = self._state.new_valid(mask, q.shape[2])
        if new is not None and new[0].shape[2] > 1:
            self._state.kv.finite.watch_new(self._layer_idx, *new, valid)
        return self._state.kv.attend(self._layer_idx, q, new, valid, scale=scale, softcap=softcap)

    def get_seq_length(self) -> int:
        """Tokens seen, whatever the method kept of them."""
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest tokens; transformers passes their negative number."""
        if tokens_to_remove > 0:
            raise ConfigError(
                f"crop takes the negative number of tokens to remove, got {tokens_to_remove}"
            )
        if tokens_to_remove:
            self._tiered.crop(-tokens_to_remove)
            self._seen = max(0, self._seen + tokens_to_remove)

    def forked(self, state: CacheState) -> HybridLayer:
        """This layer in a fork of its cache, whose state is given."""
        new = copy(self)
        new._state, new._pending = state, None
        return new

    def mark(self) -> int:
        """Tokens seen; what is stored of them is the runtime's."""
        return self._seen

    def go_back(self, mark: int) -> None:
        """Has seen so many again."""
        self._seen, self._pending = mark, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: rows continue from other rows; pages are copied on write only."""
        self._tiered.fork(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        store = self._tiered.store
        rows = range(0 if store is None else len(store.rows))
        self._tiered.fork([row for row in rows for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self._tiered.fork(indices.tolist())

    def fill(self, k: Tensor, v: Tensor, evidence: tuple[Evidence, ...] = ()) -> None:
        """Takes a whole prompt's k, v [B, Hkv, N, D], computed elsewhere, and seals the layer."""
        if self._seen:
            raise ConfigError(f"a layer is filled while it is empty, got {self._seen} tokens in it")
        self.lazy_initialization(k, v)
        self._state.kv.load(self._layer_idx, k, v, evidence)
        self._seen = k.shape[2]

    def take(self, held: HeldLayer, device: torch.device) -> None:
        """Goes on from what a layer of another cache held; see `HeldLayer.revived`."""
        self.lazy_initialization(held.k[None], held.v[None])
        self.device = device
        held.revived(self._tiered, device)
        self._seen = held.length

    def reset(self) -> None:
        self._seen, self._pending = 0, None
        self._tiered.reset()


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
        self._state = CacheState(KVCache(info, config, executor), is_open)
        self._before: list[Any] = []  # of the forward that runs
        self._was_empty = True
        # [B, tokens] bool on the host, False for padding; None if all are shown.
        self._shown: Tensor | None = None
        self.mask_here: Tensor | None = None  # that of the forward, on the host
        self._model_config = model_config
        super().__init__(layers=self._new_layers())

    def _new_layers(self) -> list[Any]:
        tiered = {shape.layer_idx for shape in self.kv.info.layers}
        return [
            HybridLayer(self._state, idx) if idx in tiered else self._with_handle(layer)
            for idx, layer in enumerate(DynamicCache(config=self._model_config).layers)
        ]

    def _with_handle(self, layer: Any) -> Any:
        if type(layer) is DynamicSlidingWindowLayer:
            return SlidingLayer(self._state, layer.sliding_window)
        return layer

    @property
    def kv(self) -> KVCache:
        """What all layers store to and attend by; another one may take its place while empty."""
        return self._state.kv

    @kv.setter
    def kv(self, kv: KVCache) -> None:
        self._state.kv = kv

    @property
    def work(self) -> Work:
        """Counters of what decoding has touched."""
        return self.kv.work

    @property
    def in_own_graph(self) -> bool:
        """Whether a compiled step of ours is traced or runs with this cache."""
        return self._state.in_own_graph

    @in_own_graph.setter
    def in_own_graph(self, value: bool) -> None:
        self._state.in_own_graph = value

    def in_use(self) -> AbstractContextManager[None]:
        """See `CacheState.in_use`."""
        return self._state.in_use()

    def alone(self) -> AbstractContextManager[None]:
        """See `CacheState.alone`."""
        return self._state.alone()

    @contextmanager
    def forward(self) -> Iterator[Forward]:
        """While the attached model runs with this cache, and our attention is on.

        Where it fails, be it by an interrupt, the cache goes back to where it was, or is broken.

        Raises:
            UnsupportedModelError: a layer stored keys and then attended without asking us.
            FileFormatError: a file in which entries lie was cut.
            BusyError: another forward runs with it.
        """
        state = self._state
        if (check_source := self.kv.check_source) is not None:
            check_source()
        with self.in_use():
            forward = Forward(self)
            try:
                forward.begin()
                yield forward
                forward.end()
            except BaseException:
                forward.go_back()
                raise
            finally:
                state.in_forward = False
                self.mask_here = None
                state.forget_mask()

    def advance(self) -> list[DevicePlan]:
        """Begins a step of one token of one row, inside of `forward`; see `Layers.advance`."""
        return [] if self.kv.more_prompt else self.kv.layers.advance(self.get_seq_length())

    @property
    def device(self) -> torch.device:
        """Where its first layer computes, which has seen a token."""
        return next(layer.device for layer in self._hybrid)

    @property
    def _hybrid(self) -> list[HybridLayer]:
        return [layer for layer in self.layers if isinstance(layer, HybridLayer)]

    @contextmanager
    def launched_again(self) -> Iterator[None]:
        """A block that launches a step which was advanced; if it fails, another one may."""
        numbers, layers = self.kv.means.numbers, self._hybrid
        seen = [layer.mark() for layer in layers]
        reserved, noted = set(numbers.reserved), set(numbers.noted)
        try:
            yield
        except BaseException:
            for layer, mark in zip(layers, seen, strict=True):
                layer.go_back(mark)
            numbers.reserved, numbers.noted = reserved, noted
            raise

    def note_launched(self) -> None:
        """A step that was advanced is launched without any layer being asked."""
        for layer in self._hybrid:
            layer.go_back(layer.mark() + 1)
        self.kv.means.numbers.reserved.clear()
        self.kv.means.numbers.noted.clear()

    def begin_forward(self) -> None:
        """From now on the cache can be put back to where it is."""
        self.kv.layers.begin_forward()
        self._before = [layer.mark() if _can_go_back(layer) else None for layer in self.layers]
        self._was_empty = all(_is_empty(layer) for layer in self.layers)

    def end_forward(self) -> None:
        """What came stays.

        Raises:
            UnsupportedModelError: see `forward`.
        """
        if (ahead := self.kv.means.look_ahead) is not None:
            ahead.forget()
        for idx, layer in enumerate(self.layers):
            if getattr(layer, "is_pending", False):
                raise UnsupportedModelError(
                    f"layer {idx} of this model attends to other keys than it caches, which "
                    "hybrid_kv cannot serve; use this model without it"
                )
        self.kv.layers.end_forward()
        self._before = []

    def go_back(self) -> bool:
        """Puts the cache back to where it was at `begin_forward`.

        False where that cannot be done: recurrent states were overwritten, or see `Layers.go_back`.
        """
        before, self._before = self._before, []
        if not before:  # it failed before it began
            return True
        done = self.kv.layers.go_back()
        if self._was_empty:
            self.layers = self._new_layers()
            self.kv.start_over()
            self._shown = None
            return True
        for layer, mark in zip(self.layers, before, strict=True):
            if _can_go_back(layer):
                layer.go_back(mark)
            else:
                done = False
        if self._shown is not None:
            self._shown = self._shown[:, : self.get_seq_length()]
        return done

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
            self._state.require_life()
            new = type(self).__new__(type(self))
            vars(new).update(vars(self))
            new._state = CacheState(self.kv.fork(), self._state._is_open)
            new.layers = [
                layer.forked(new._state) if _can_go_back(layer) else deepcopy(layer)
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

    def states(self) -> list[Any]:
        """What the layers hold beside the runtime's stores."""
        # Layers of transformers' own are small, and written to in place: copy them.
        return [
            layer.mark() if _can_go_back(layer) else deepcopy(vars(layer)) for layer in self.layers
        ]

    def set_states(self, states: Sequence[Any]) -> None:
        """Lets the layers hold that again; the runtime's stores have been put back, too."""
        for layer, state in zip(self.layers, states, strict=True):
            if _can_go_back(layer):
                layer.go_back(state)
            else:
                vars(layer).update(state)
        self._state.is_unfinished = False

    def accept_mask(self, mask: Tensor | None, new_tokens: int) -> None:
        """Takes note of what a forward shows: its mask [B, tokens seen], or None for everything.

        Raises:
            ConfigError: the mask has another length, or hides or shows other tokens than it did
                when they were cached: padding is not stored, what is stored cannot be hidden.
        """
        seen, before = self.get_seq_length(), self._shown
        if mask is not None and mask.shape[1] != seen + new_tokens:
            raise ConfigError(
                f"attention_mask must cover the {seen} tokens in the cache and the {new_tokens} "
                f"new ones, got {mask.shape[1]}; extend the mask of the call before by ones"
            )
        # The one look of a forward at its mask: a device that computed it is waited for.
        here = self.mask_here = None if mask is None else mask.bool().cpu()
        shown = None if here is None or bool(here.all()) else here
        if self.kv.info.layers and seen and (shown is not None or before is not None):
            self._check_change(before, shown, seen)
        self._shown = shown

    @staticmethod
    def _check_change(before: Tensor | None, now: Tensor | None, seen: int) -> None:
        """Raises ConfigError where the first `seen` tokens differ; None stands for all shown."""
        then = torch.ones_like(now) if before is None and now is not None else before
        now = torch.ones_like(then) if now is None and then is not None else now
        if then is None or now is None:
            return
        changed = (then[:, :seen] != now[:, :seen]).nonzero().tolist()
        if changed:
            row, token = changed[0]
            verb, was = ("hides", "shown") if then[row, token] else ("shows", "hidden")
            raise ConfigError(
                f"attention_mask {verb} token {token} of row {row}, which was {was} when it was "
                f"cached, and {len(changed) - 1} more; pass the mask of the call before, extended "
                "by ones (where none is passed, generate() hides every pad token of input_ids)"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: rows continue from other rows."""
        with self.in_use():
            super().reorder_cache(beam_idx)  # type: ignore[arg-type]
            self._take_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        with self.in_use():
            super().batch_repeat_interleave(repeats)
            if self._shown is not None:
                self._shown = self._shown.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        with self.in_use():
            super().batch_select_indices(indices)
            self._take_rows(indices)

    def _take_rows(self, rows: Tensor) -> None:
        if self._shown is not None:
            self._shown = self._shown[rows.cpu()]

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
            self._state.require_idle()
            # New layers rather than emptied ones: what emptying leaves behind differs by kind.
            self.layers = self._new_layers()
            self.kv.reset()
            self._state.forget_mask()
            self._state.is_unfinished = False
            self._shown = None

    def close(self) -> None:
        """Gives back all memory; a cache that nobody needs any more does so by itself.

        An index build in progress keeps its keys until it notices, at its next block of rows.
        """
        self._state.is_closed = True
        self.layers = self._new_layers()
        self.kv.close()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every token seen has exactly one owner in every layer."""
        with self.alone():
            self._state.require_idle()
            if self._state.is_unfinished:
                raise IntegrityError("a forward has ended in the middle, and left layers as it was")
            seen = {i: x.get_seq_length() for i, x in enumerate(self.layers) if _can_go_back(x)}
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


class Forward:
    """A forward that runs with a cache: when it is over all layers hold its tokens, or none does.

    failed: set by who knows that it has, where nothing is raised.
    """

    def __init__(self, cache: TieredCache) -> None:
        self._cache, self.failed, self._is_over = cache, False, False

    def begin(self) -> None:
        """Notes where the cache stands."""
        self._cache.begin_forward()
        state = self._cache._state
        state.in_forward = state.is_unfinished = True

    def end(self) -> None:
        """Ends it, once.

        Raises:
            Exception: it cannot be ended, so that `go_back` is next.
        """
        if self.failed:
            self.go_back()
        elif not self._is_over:
            self._cache.end_forward()
            self._is_over, self._cache._state.is_unfinished = True, False

    def go_back(self) -> None:
        """Puts the cache back to where it was; where that is not possible, it is broken."""
        if self._is_over:
            return
        self._is_over, state = True, self._cache._state
        if state.is_closed:
            state.is_unfinished = False
            return
        try:
            state.is_unfinished = not self._cache.go_back()
        except Exception:  # what ended the forward is what its caller wants to know
            _log.warning("a cache could not be put back and is broken", exc_info=True)


def _can_go_back(layer: Any) -> TypeGuard[HybridLayer | SlidingLayer]:
    """Whether a layer is of our kinds, which are put back after a forward that failed.

    Others are written over in place: recurrent states.
    """
    return isinstance(layer, (HybridLayer, SlidingLayer))


def _is_empty(layer: Any) -> bool:
    """Whether a layer has seen no token."""
    states = getattr(layer, "has_previous_state", {})
    seen = layer.get_seq_length() if isinstance(layer, CacheLayerMixin) else 0
    return seen == 0 and not any(states.values())


def keeps_keys(model_config: PreTrainedConfig) -> bool:
    """Whether any layer attends: a cache of recurrent states alone has nothing to tier."""
    return any(
        isinstance(layer, CacheLayerMixin) for layer in DynamicCache(config=model_config).layers
    )


def tiered_layers(model_config: PreTrainedConfig) -> list[int]:
    """Indices of the layers whose cache can be tiered: plain full attention."""
    layers = DynamicCache(config=model_config).layers
    return [idx for idx, layer in enumerate(layers) if type(layer) is DynamicLayer]
