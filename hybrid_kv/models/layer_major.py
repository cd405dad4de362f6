"""Layer-major prefill: each decoder layer takes the whole prompt in chunks, in place.

A plain forward pass holds several full-length temporaries per layer; here only one hidden-state
tensor has full length and the layer's KV can leave before the next layer begins. Decoder layers
work token by token outside attention, and attention sees the layer's earlier chunks in the cache,
so the result is that of one pass. Works for any model whose decoder layers have a `self_attn`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.widening import widened, widened_bytes

_MIN_CHUNK, _MAX_CHUNK = 256, 4096


def chunk_size(setting: int | Literal["auto"], num_tokens: int) -> int:
    """Tokens per chunk: the setting, or an eighth of the prompt between 256 and 4096."""
    if setting == "auto":
        return min(_MAX_CHUNK, max(_MIN_CHUNK, num_tokens // 8))
    return setting


class LayerMajorPrefill:
    """Wraps the forward methods of one model's decoder layers; `close` puts them back."""

    def __init__(self, model: nn.Module, chunk_tokens: int | Literal["auto"]) -> None:
        self._chunk_tokens = chunk_tokens
        self._wrapped: list[tuple[nn.Module, Callable[..., Any] | None]] = []
        self.cache: TieredCache | None = None
        self.in_place = True
        for owner, layers in _decoder_stacks(model):
            for layer in layers:
                self._wrap(layer)
            if isinstance(norm := getattr(owner, "norm", None), nn.Module):
                self._wrap(norm)

    def _wrap(self, module: nn.Module) -> None:
        # An instance attribute may be there already (accelerate's hooks): it is what we call and
        # what `close` restores.
        self._wrapped.append((module, module.__dict__.get("forward")))
        inner = module.forward

        @wraps(inner)
        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.cache is None or (torch.is_grad_enabled() and hidden.requires_grad):
                return inner(hidden, *args, **kwargs)
            size = chunk_size(self._chunk_tokens, hidden.shape[1])
            with widened(module, hidden.shape[0] * hidden.shape[1]):
                if hidden.shape[1] <= size:
                    return inner(hidden, *args, **kwargs)
                return self._in_chunks(module, inner, size, hidden, args, kwargs)

        module.forward = forward

    def _in_chunks(
        self,
        module: nn.Module,
        inner: Callable[..., Any],
        size: int,
        hidden: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        total = hidden.shape[1]
        target = hidden if self.in_place else torch.empty_like(hidden)
        result: Any = None
        with self._prompt_in_pieces(module):
            for start in range(0, total, size):
                stop = min(total, start + size)
                cut_args = [_slice(arg, total, start, stop) for arg in args]
                cut = {name: _slice(arg, total, start, stop, name) for name, arg in kwargs.items()}
                result = inner(hidden[:, start:stop], *cut_args, **cut)
                out = result[0] if isinstance(result, tuple) else result
                if start == 0 and out.device != target.device:  # what follows is there as well
                    target = out.new_empty(target.shape)
                target[:, start:stop] = out
        return (target, *result[1:]) if isinstance(result, tuple) else target

    @contextmanager
    def _prompt_in_pieces(self, module: nn.Module) -> Iterator[None]:
        """Keeps a layer open between its chunks, then seals it: its KV may leave now."""
        if self.cache is None:
            raise RuntimeError("chunks are for forward passes with a tiered cache")
        kv = self.cache.kv
        kv.more_prompt = True
        try:
            yield
        finally:
            kv.more_prompt = False
        layer_idx = getattr(getattr(module, "self_attn", None), "layer_idx", None)
        if layer_idx is not None:
            kv.seal_if_open(layer_idx)

    def widened_bytes(self, num_tokens: int) -> int:
        """Bytes of the largest layer that is widened while so many tokens pass; 0 if none is."""
        return max((widened_bytes(module, num_tokens) for module, _ in self._wrapped), default=0)

    def close(self) -> None:
        """Restores every forward method to what it was."""
        for module, previous in self._wrapped:
            if previous is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = previous
        self._wrapped.clear()


def _decoder_stacks(model: nn.Module) -> list[tuple[nn.Module, nn.ModuleList]]:
    """Each list of decoder layers with the module that owns it."""
    return [
        (owner, child)
        for owner in model.modules()
        for child in owner.children()
        if isinstance(child, nn.ModuleList)
        and len(child)
        and all(hasattr(layer, "self_attn") for layer in child)
    ]


def _slice(value: Any, total: int, start: int, stop: int, name: str = "") -> Any:
    """The chunk's share of an argument: what runs along the sequence is cut, the rest passes."""
    if isinstance(value, tuple):
        return tuple(_slice(item, total, start, stop) for item in value)
    if not isinstance(value, Tensor) or value.ndim < 2:
        return value
    if name == "attention_mask":  # [B, tokens seen]: later chunks do not exist yet
        return value[:, : value.shape[1] - (total - stop)]
    # Mostly axis 1; M-RoPE positions are [3, B, T], factors on queries [1, 1, T, 1].
    axis = next((axis for axis in range(1, value.ndim) if value.shape[axis] == total), None)
    return value if axis is None else value.narrow(axis, start, stop - start)
