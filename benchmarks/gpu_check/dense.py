"""Full attention by transformers alone: what stands beside our methods, end to end."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer

from benchmarks.gpu_check.device_memory import Footprint
from benchmarks.gpu_check.sizes import Sizes
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.load import load_model

_WARMUP_NEW = 3


class InPlaceLayer(DynamicLayer):
    """Keys and values in a buffer that is allocated once; attention sees what is filled.

    As StaticLayer, but torch's SDPA needs no mask and so takes its fastest kernels.
    """

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self._max_tokens = max_tokens
        self._buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            batch, heads, _, dim = key_states.shape
            size = (batch, heads, self._max_tokens, dim)
            self._buffers = [key_states.new_empty(size) for _ in "kv"]
        start = self.get_seq_length()
        stop = start + key_states.shape[2]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:stop] = new
        self.keys, self.values = (buffer[:, :, :stop] for buffer in self._buffers)
        return self.keys, self.values


def run_dense(
    system: str, sizes: Sizes, ids: Tensor, footprint: Footprint, device: torch.device
) -> dict[str, Any]:
    """Prefill and greedy steps of "static", "static_transformers" or "offloaded"."""
    model: Any = load_model(
        sizes.model, device=device, dtype=sizes.dtype, layers=sizes.layers, seed=0
    )
    model.set_attn_implementation("sdpa")
    run = {"static": static, "static_transformers": static_transformers, "offloaded": offloaded}
    with torch.inference_mode():
        run[system](model, sizes, ids[:, : sizes.warmup_tokens], _WARMUP_NEW)
        footprint.restart()
        return run[system](model, sizes, ids, None)


def static(model: Any, sizes: Sizes, ids: Tensor, new: int | None) -> dict[str, Any]:
    """The whole prompt at once, then steps; a buffer per layer."""
    cache = in_place_cache(model, ids.shape[1] + (new or sizes.new_tokens))
    begin = perf_counter()
    token = forward(model, cache, ids)
    return generated(model, cache, token, new or sizes.new_tokens, begin)


def static_transformers(model: Any, sizes: Sizes, ids: Tensor, new: int | None) -> dict[str, Any]:
    """As `static`, with the keys moved into transformers' StaticCache after the prompt.

    Its own prefill would hand SDPA a mask of the prompt's length squared.
    """
    new = new or sizes.new_tokens
    filled = in_place_cache(model, ids.shape[1])
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + new)
    begin = perf_counter()
    token = forward(model, filled, ids)
    for layer_idx, layer in enumerate(filled.layers):
        cache.update(layer.keys, layer.values, layer_idx)
        filled.layers[layer_idx] = InPlaceLayer(0)
    return generated(model, cache, token, new, begin)


def offloaded(model: Any, sizes: Sizes, ids: Tensor, new: int | None) -> dict[str, Any]:
    """Transformers' offloaded cache. Its prompt comes in chunks, or it would not fit; beyond some
    length, where each chunk would move all earlier ones, the cache is filled with random entries
    and the time to the first token is not measured.
    """
    cache = DynamicCache(config=model.config, offloading=model.device.type == "cuda")
    new, total = new or sizes.slow_new_tokens, ids.shape[1]
    begin = perf_counter()
    if total > sizes.offloaded_prefill_tokens:
        fill(model, cache, total - 1)
        token = forward(model, cache, ids[:, -1:])
        return {**generated(model, cache, token, new, begin), "ttft_s": None, "filled": True}
    for chunk in ids.split(sizes.offloaded_chunk, 1):
        token = forward(model, cache, chunk)
    return {**generated(model, cache, token, new, begin), "filled": False}


def in_place_cache(model: PreTrainedModel, tokens: int) -> Cache:
    layers = model.config.num_hidden_layers
    return Cache(layers=[InPlaceLayer(tokens) for _ in range(layers)])


def fill(model: Any, cache: DynamicCache, tokens: int) -> None:
    """Random entries: the time of a dense step does not depend on them."""
    config = model.config
    size = (1, config.num_key_value_heads, tokens, config.head_dim)
    for layer_idx in range(config.num_hidden_layers):
        k, v = (torch.randn(size, dtype=model.dtype, device=model.device) for _ in "kv")
        cache.update(k, v, layer_idx)


def forward(model: Any, cache: Cache, ids: Tensor) -> Tensor:
    """The next token [1, 1], on the device; waits for it."""
    logits = model(ids, **passing(cache), use_cache=True, logits_to_keep=1).logits
    return logits[:, -1:].argmax(-1)


def generated(model: Any, cache: Cache, token: Tensor, new: int, begin: float) -> dict[str, Any]:
    """Times of the tokens after the first one, which has just come."""
    ids, times = [int(token)], [perf_counter() - begin]
    while len(ids) < new:
        token = forward(model, cache, token)
        ids.append(int(token))
        times.append(perf_counter() - begin)
    return {"token_ids": ids, "token_times_s": times, "ttft_s": times[0]}
