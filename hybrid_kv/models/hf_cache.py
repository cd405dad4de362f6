"""Our KV cache in the shape that transformers expects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError, MethodError, UnsupportedModelError
from hybrid_kv.models.graphs import outside_graphs
from hybrid_kv.runtime import HeldLayer, KVCache, TieredLayer
from hybrid_kv.runtime.together import JointRow
from hybrid_kv.transfer import Executor
from hybrid_kv.types import Evidence, ModelInfo, PartialAttention, Work


class CacheState:
    """What the layers of a cache share. It knows none of them, nor does it know the cache, so that
    a cache which nobody refers to is freed at once.
    """

    def __init__(self, kv: KVCache, is_open: Callable[[], bool]) -> None:
        self.kv, self._is_open = kv, is_open
        self.in_forward = self.in_own_graph = self.is_closed = False
        self.forget_mask()

    def forget_mask(self) -> None:
        self._mask: Tensor | None = None
        self._mask_is_plain = True

    def require_open(self) -> None:
        """Raises ConfigError where our attention is off: the model would attend new keys only."""
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
            self._mask, self._mask_is_plain = mask, bool(newest.all())
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


class SlidingLayer(DynamicSlidingWindowLayer):
    """A sliding-window layer of transformers' own that knows whether its keys were attended.

    Not every model tells its attention function the window, so the layer does.
    """

    is_pending = False

    @outside_graphs
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        k, v = super().update(key_states, value_states, *args, **kwargs)
        self.is_pending = True
        return tag(k.view_as(k), self), v

    def take(self, k: Tensor, v: Tensor, seen: int, device: torch.device) -> None:
        """Goes on from k, v [Hkv, N, D], the newest of so many tokens that were seen."""
        self.keys, self.values = k[None].to(device, copy=True), v[None].to(device, copy=True)
        self.dtype, self.device = k.dtype, device
        self._sliding_window_tensor = self._sliding_window_tensor.to(device)
        self.cumulative_length, self.is_initialized = seen, True


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

    def mark(self) -> tuple[int, list[int]]:
        """Tokens seen, and what the rows have stored of them."""
        return self._seen, self._tiered.lengths

    def take_back(self, seen: int, lengths: list[int]) -> None:
        """Forgets what a forward that failed has stored since it was at this mark."""
        self._seen, self._pending = seen, None
        self._tiered.crop_to(lengths)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: rows continue from other rows; pages are copied on write only."""
        self._tiered.fork(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = self._tiered.num_rows
        self._tiered.fork([r for r in range(rows) for _ in range(repeats)])

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
    """`past_key_values` for one conversation; full-attention layers are tiered, others are not.

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
        self._shown: Tensor | None = None  # [B, tokens] bool, False for padding; None if all are
        self._model_config = model_config
        super().__init__(layers=self._new_layers())

    def _new_layers(self) -> list[Any]:
        tiered = {shape.layer_idx for shape in self.kv.info.layers}
        return [
            HybridLayer(self._state, idx) if idx in tiered else _with_handle(layer)
            for idx, layer in enumerate(DynamicCache(config=self._model_config).layers)
        ]

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

    @contextmanager
    def forward(self) -> Iterator[None]:
        """While the attached model runs with this cache, and our attention is on.

        Where it fails, the tokens that some layers have stored by then are taken back.

        Raises:
            UnsupportedModelError: a layer stored keys and then attended without asking us.
            FileFormatError: a file in which entries lie was cut.
        """
        if (check_source := self.kv.check_source) is not None:
            check_source()
        self._state.in_forward = True
        tiered = [layer for layer in self.layers if isinstance(layer, HybridLayer)]
        before = [layer.mark() for layer in tiered]
        try:
            yield
        except MethodError:
            for own, mark in zip(tiered, before, strict=True):
                own.take_back(*mark)
            raise
        finally:
            self._state.in_forward = False
            if (ahead := self.kv.means.look_ahead) is not None:
                ahead.forget()
        for idx, layer in enumerate(self.layers):
            if getattr(layer, "is_pending", False):
                raise UnsupportedModelError(
                    f"layer {idx} of this model attends to other keys than it caches, which "
                    "hybrid_kv cannot serve; use this model without it"
                )

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
        self._state.require_life()
        new = copy(self)
        new._state = CacheState(self.kv.fork(), self._state._is_open)
        new.layers = [
            layer.forked(new._state) if isinstance(layer, HybridLayer) else deepcopy(layer)
            for layer in self.layers
        ]
        return new

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
        shown = None if mask is None or bool(mask.all()) else mask.bool()
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
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._take_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self._shown is not None:
            self._shown = self._shown.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._take_rows(indices)

    def _take_rows(self, rows: Tensor) -> None:
        if self._shown is not None:
            self._shown = self._shown[rows.to(self._shown.device)]

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest tokens; transformers passes their negative number.

        Raises:
            MethodError: a method has lost what would be the window; no layer has forgotten any.
        """
        for layer in self.kv.layers.values():
            layer.check_crop(max(0, -tokens_to_remove))
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
        # New layers rather than emptied ones: what emptying leaves behind differs by kind.
        self.layers = self._new_layers()
        self.kv.reset()
        self._state.forget_mask()
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
        self.kv.check_integrity()


def _with_handle(layer: Any) -> Any:
    if type(layer) is DynamicSlidingWindowLayer:
        return SlidingLayer(sliding_window=layer.sliding_window)
    return layer


def tiered_layers(model_config: PreTrainedConfig) -> list[int]:
    """Indices of the layers whose cache can be tiered: plain full attention."""
    layers = DynamicCache(config=model_config).layers
    return [idx for idx, layer in enumerate(layers) if type(layer) is DynamicLayer]
