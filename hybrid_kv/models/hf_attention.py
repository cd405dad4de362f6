"""The attention function that transformers calls in place of its own, for forwards with our cache.

Registered by name in transformers' two public registries; nothing of transformers is patched. The
mask function must be registered too: without one transformers passes no mask and padding is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, flash_attention_mask

from hybrid_kv.errors import ConfigError, UnsupportedModelError
from hybrid_kv.models.cache_layers import SlidingLayer, layer_of
from hybrid_kv.models.cache_state import outside_graphs, seen_on_host, with_copy
from hybrid_kv.ops import get_ops
from hybrid_kv.ops.devices import staged
from hybrid_kv.runtime.step import apply_sink, attend, attend_causal, group_queries
from hybrid_kv.types import PartialAttention

NAME = "hybrid_kv"

_mask_here: ContextVar[Tensor | None] = ContextVar("mask_here", default=None)


@contextmanager
def with_mask(mask_here: Tensor | None) -> Iterator[None]:
    """A forward whose mask [B, tokens seen] bool is known on the host; None where it is not."""
    before = _mask_here.set(mask_here)
    try:
        yield
    finally:
        _mask_here.reset(before)


def register() -> None:
    """Makes `attn_implementation="hybrid_kv"` known to transformers; harmless when repeated."""
    AttentionInterface.register(NAME, hybrid_attention)
    AttentionMaskInterface.register(NAME, padding_mask)


def padding_mask(
    batch_size: int,
    q_length: int,
    *args: Any,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """None, or which tokens are real [B, tokens seen]; everything else follows from the order.

    A step of one row needs none: its token is real, and the cache knows what came before. Sliding
    windows keep it, as their cache is transformers'. To look at a mask on a GPU is to wait for it,
    so that of `with_mask` stands for it.

    Raises:
        ConfigError: the forward needs another mask: image tokens that see each other, an encoder's.
        UnsupportedModelError: the model works with the mask itself.
    """
    if not allow_is_causal_skip:  # the mask must be there, whatever is in it
        if kwargs.get("mask_function") is causal_mask_function:  # nothing is laid over it
            raise UnsupportedModelError(
                f"attention of model type '{getattr(config, 'model_type', None)}' adds a mask of "
                "its own to the causal one, which a tiered KV cache cannot apply; use this model "
                "without hybrid_kv"
            )
        raise ConfigError(
            "the mask must be causal with padding at most, got one of another form, such as image "
            "tokens that see each other; for text alone leave token_type_ids away"
        )
    if batch_size == q_length == 1 and local_size is None:
        return None
    mask: Tensor | None = kwargs.get("attention_mask")
    here = None if mask is None else _mask_here.get()
    if mask is None or here is None or here.shape != mask.shape:
        mask = flash_attention_mask(batch_size, q_length, *args, **kwargs)
        return mask
    newest = slice(-kwargs["kv_length"], None)
    here = here[:, newest]
    return None if bool(here.all()) else with_copy(mask[:, newest], here)


@outside_graphs
def hybrid_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unsupported: Any,
) -> tuple[Tensor, None]:
    """Attention over the tiered cache behind `key`, or plain attention where there is none.

    Args:
        query: [B, Hq, T, D].
        key, value: [B, Hkv, n, D]: the new tokens only if the cache layer is ours.
        attention_mask: None or [B, tokens seen] bool, False for padding.
        s_aux: [Hq] learned sink logits (gpt-oss).

    Returns:
        [B, T, Hq, D] and no attention weights.
    """
    _refuse(attention_mask, unsupported)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = layer_of(key)
    causal = getattr(module, "is_causal", True)
    if layer is not None and not isinstance(layer, SlidingLayer):
        if layer_of(value) is not layer or not causal:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends to other values than it caches, or not causally, "
                "which hybrid_kv cannot serve; use this model without it"
            )
        part = layer.attend(query, attention_mask, scale=scale, softcap=softcap)
    else:
        if layer is not None:
            layer.pending = False
            sliding_window = layer.sliding_window
        window = sliding_window if sliding_window and sliding_window < key.shape[2] else None
        part = _attend_plain(query, key, value, attention_mask, scale, softcap, window, causal)
    out = part.out if s_aux is None else apply_sink(part, s_aux)
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


def _refuse(attention_mask: Tensor | None, unsupported: dict[str, Any]) -> None:
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ConfigError(
            f"attention_mask must be [batch, tokens] or absent, got {attention_mask.ndim} axes; "
            "masks other than causal with padding cannot be served from a tiered cache"
        )
    for name in ("indices", "block_indices", "position_bias"):
        if unsupported.get(name) is not None:
            raise UnsupportedModelError(
                f"the model passes '{name}' to its attention, which a tiered KV cache cannot "
                "serve; use this model without hybrid_kv"
            )


def _attend_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    causal: bool,
) -> PartialAttention:
    """Attention over all of `k`: sliding-window layers, whose cache is transformers' own."""
    if mask is None:
        return _attend_whole(q, k, v, scale, softcap, window, causal)
    here = seen_on_host(mask)
    # The newest columns of the mask belong to the keys at hand.
    valid = (mask.cpu() if here is None else here)[:, mask.shape[1] - k.shape[2] :].bool()
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    for row in range(q.shape[0]):
        keys, queries = valid[row], valid[row, -q.shape[2] :]
        one = slice(row, row + 1)
        asking = _places(queries, q.device)
        if window is not None and bool((keys.diff() & ~keys[1:]).any()):
            there = staged(keys, q.device)
            part = _attend_slots(q[one], k[one], v[one], there, scale, softcap, window)
            part = PartialAttention(part.out[:, :, asking], part.lse[:, :, asking])
        else:
            asked = _places(keys, q.device)
            real = (q[one, :, asking], k[one, :, asked], v[one, :, asked])
            part = _attend_whole(*real, scale, softcap, window, causal)
        out[row][:, asking], lse[row][:, asking] = part.out[0].to(q.dtype), part.lse[0]
    return PartialAttention(out, lse)


def _places(flags: Tensor, device: torch.device) -> slice | Tensor:
    """Places of flags [n] that are set on the host, to index a tensor of a device without a wait: a
    slice where they follow each other, as behind padding.
    """
    ids = flags.nonzero()[:, 0]
    first, count = int(ids[0]) if len(ids) else 0, len(ids)
    if not count or int(ids[-1]) == first + count - 1:
        return slice(first, first + count)
    return staged(ids, device)


def _attend_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    scale: float,
    softcap: float | None,
    window: int,
) -> PartialAttention:
    """One row with padding behind real tokens: transformers' window counts that padding."""
    slots = torch.arange(k.shape[2], device=q.device)
    ends = slots[-q.shape[2] :, None]
    seen = keys & (slots <= ends) & (slots > ends - window)
    bias = torch.zeros(seen.shape, device=q.device).masked_fill(~seen, -torch.inf)
    grouped = group_queries(q, k.shape[1])
    bias = bias.repeat(q.shape[1] // k.shape[1], 1)
    part = attend(get_ops("auto"), grouped, k, v, scale=scale, softcap=softcap, bias=bias)
    return PartialAttention(part.out.reshape(q.shape), part.lse.reshape(q.shape[:3]))


def _attend_whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
    causal: bool,
) -> PartialAttention:
    ops = get_ops("auto")
    if not causal:
        out, lse = attend(ops, group_queries(q, k.shape[1]), k, v, scale=scale, softcap=softcap)
        return PartialAttention(out.reshape(q.shape), lse.reshape(q.shape[:3]))
    if window is not None:
        return ops.attend_causal(q, k, v, scale=scale, softcap=softcap, window=window)
    return attend_causal(ops, q, k, v, scale=scale, softcap=softcap)
