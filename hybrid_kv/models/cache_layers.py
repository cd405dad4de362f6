"""Layers of a cache in the shape that transformers expects: tiered ones, and sliding windows."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from hybrid_kv.errors import ConfigError
from hybrid_kv.models.cache_state import CacheState, outside_graphs
from hybrid_kv.runtime import LayerCache
from hybrid_kv.types import Evidence, PartialAttention

if TYPE_CHECKING:
    from hybrid_kv.runtime.snapshot import LayerSnapshot


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

    pending: new tokens came that no attention has asked for yet.
    """

    pending = False

    def __init__(self, state: CacheState, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self.state = state

    @outside_graphs
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.state.require_open()
        k, v = super().update(key_states, value_states, *args, **kwargs)
        self.pending = True
        return tag(k.view_as(k), self), v

    def mark(self) -> dict[str, Any]:
        """State to go back to; its tensors are replaced, never written to."""
        return dict(vars(self))

    def go_back(self, mark: dict[str, Any]) -> None:
        """Holds that again."""
        vars(self).clear()
        vars(self).update(mark, pending=False)

    def forked(self, state: CacheState) -> SlidingLayer:
        """This layer in a fork of its cache, whose state is given."""
        new = copy(self)
        new.state = state
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


class HybridLayer(CacheLayerMixin):
    """One full-attention layer of the cache.

    `update` keeps the new tokens aside and returns them with a handle to this layer, because the
    mask that tells padding apart arrives only with the attention call.

    pending: new k, v [B, Hkv, T, D] that no attention has asked for yet; None for none. seen:
    tokens, whatever the method kept of them.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, state: CacheState, layer_idx: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state, self.layer_idx = state, layer_idx
        self.seen = 0
        self.pending: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.state.check_shapes(self.layer_idx, key_states, value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    @outside_graphs
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes new k, v [B, Hkv, T, D]; returns the same values with a handle to us."""
        self.state.require_open()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        # Tensors of our own: the model's must not keep us alive, and nothing is trained by them.
        k, v = tag(key_states.detach(), self), tag(value_states.detach(), self)
        self.pending = k, v
        self.seen += key_states.shape[-2]
        return k, v

    @property
    def _tiered(self) -> LayerCache:
        return self.state.kv.layers[self.layer_idx]

    def attend(
        self, q: Tensor, mask: Tensor | None, *, scale: float, softcap: float | None
    ) -> PartialAttention:
        """Stores what `update` brought and attends; q [B, Hq, T, D], mask [B, tokens seen]."""
        if torch.is_grad_enabled() and q.requires_grad:
            raise ConfigError(
                "a tiered KV cache serves inference only, got queries that require gradients; "
                "call the model under torch.inference_mode()"
            )
        new, self.pending = self.pending, None
        valid = self.state.shown.newest(mask, q.shape[2])
        if new is not None and new[0].shape[2] > 1:
            self.state.kv.finite.watch_new(self.layer_idx, *new, valid)
        return self.state.kv.attend(self.layer_idx, q, new, valid, scale=scale, softcap=softcap)

    def get_seq_length(self) -> int:
        """Tokens seen, whatever the method kept of them."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

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
            self.seen = max(0, self.seen + tokens_to_remove)

    def forked(self, state: CacheState) -> HybridLayer:
        """This layer in a fork of its cache, whose state is given."""
        new = copy(self)
        new.state, new.pending = state, None
        return new

    def mark(self) -> int:
        """Tokens seen; what is stored of them is the runtime's."""
        return self.seen

    def go_back(self, mark: int) -> None:
        """Has seen so many again."""
        self.seen, self.pending = mark, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows continue from other rows; pages are copied on write only."""
        self._tiered.fork(beam_idx.tolist())

    def fill(self, k: Tensor, v: Tensor, evidence: tuple[Evidence, ...] = ()) -> None:
        """Takes a whole prompt's k, v [B, Hkv, N, D], computed elsewhere, and seals the layer."""
        if self.seen:
            raise ConfigError(f"a layer is filled while it is empty, got {self.seen} tokens in it")
        self.lazy_initialization(k, v)
        self.state.kv.load(self.layer_idx, k, v, evidence)
        self.seen = k.shape[2]

    def take(self, held: LayerSnapshot, device: torch.device) -> None:
        """Goes on from what a layer of another cache held; see `LayerSnapshot.revived`."""
        self.lazy_initialization(held.k[None], held.v[None])
        self.device = device
        held.revived(self._tiered, device)
        self.seen = held.length

    def reset(self) -> None:
        self.seen, self.pending = 0, None
        self._tiered.reset()


def new_layers(state: CacheState, model_config: PreTrainedConfig) -> list[Any]:
    """Empty layers of a model: tiered where the state's store has a layer, else transformers'."""
    tiered = {shape.layer_idx for shape in state.kv.info.layers}
    layers: list[Any] = list(DynamicCache(config=model_config).layers)
    for idx, layer in enumerate(layers):
        if idx in tiered:
            layers[idx] = HybridLayer(state, idx)
        elif type(layer) is DynamicSlidingWindowLayer:
            layers[idx] = SlidingLayer(state, layer.sliding_window)
    return layers


def hybrid_layers(layers: Iterable[Any]) -> list[HybridLayer]:
    """The tiered ones of some layers."""
    return [layer for layer in layers if isinstance(layer, HybridLayer)]


def can_go_back(layer: Any) -> TypeGuard[HybridLayer | SlidingLayer]:
    """Whether a layer is of our kinds, which are put back after a forward that failed.

    Others are written over in place: recurrent states.
    """
    return isinstance(layer, (HybridLayer, SlidingLayer))


def copied_state(layer: Any) -> dict[str, Any]:
    """A copy of what a layer that is not tiered holds, without the cache that it belongs to."""
    return {name: deepcopy(value) for name, value in vars(layer).items() if name != "state"}


def max_context(config: PreTrainedConfig) -> int | None:
    """The longest context the model was made for, in tokens; None where it says nothing."""
    return getattr(config, "max_position_embeddings", None)


def keeps_keys(model_config: PreTrainedConfig) -> bool:
    """Whether any layer attends: a cache of recurrent states alone has nothing to tier."""
    return any(
        isinstance(layer, CacheLayerMixin) for layer in DynamicCache(config=model_config).layers
    )


def tiered_layers(model_config: PreTrainedConfig) -> list[int]:
    """Indices of the layers whose cache can be tiered: plain full attention."""
    layers = DynamicCache(config=model_config).layers
    return [idx for idx, layer in enumerate(layers) if type(layer) is DynamicLayer]
