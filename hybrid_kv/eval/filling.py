"""A context that never was computed: attention-like KV put straight into a cache's tiers.

Decoding can then be measured at 128K to 1M tokens in minutes, without a prefill. A random model's
own queries would find nothing in such keys, so each step asks with a made-up query of the same
text; the model's own are computed, and then replaced. Times and work are those of a real step; what
the model writes means nothing.

A few heads are made with `hybrid_kv.eval.synthetic`; the others are copies of them with channels
permuted and signs flipped, which changes no score and no statistic of a channel. So the exact best
keys of the prompt's queries, which graphs are built from, are found once for all copies and caches;
builds are shorter by that, as they are where a GPU finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.synthetic import PROFILES, SyntheticHead
from hybrid_kv.models.attach import Attachment
from hybrid_kv.models.cache_layers import HybridLayer
from hybrid_kv.models.cache_state import is_fixed
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.ops.native import engine_state
from hybrid_kv.ops.native.graph import nearest_keys
from hybrid_kv.ops.native.library import pool_here
from hybrid_kv.ops.native.rows import QuantisedKeys
from hybrid_kv.ops.native.scans import FlatScan
from hybrid_kv.plugins import Method
from hybrid_kv.runtime import KVCache, LayerCache
from hybrid_kv.runtime.cache_context import CacheContext
from hybrid_kv.runtime.engine_plan import EnginePlan
from hybrid_kv.runtime.offload import FindNearest, nearest_finder
from hybrid_kv.runtime.step import Step
from hybrid_kv.store import LayerStore
from hybrid_kv.transfer import Executor
from hybrid_kv.types import Evidence, LayerShape, ModelInfo, Needs, PartialAttention

_QUERIES_AT_ONCE = 8192
_TURNS = 7919
"""Spreads (layer, head) over the seeds of permutations."""


class SyntheticContext:
    """KV and queries of a text for all layers of a model.

    Args:
        num_tokens: N, of the context.
        max_steps: decode steps for which there are queries.
        made_heads: KV heads that are made; the rest are turned copies.
        keep: keeps K and V of every layer, so that further caches are filled quicker.

    Raises:
        ConfigError: a number is below 1, or the layers differ in head_dim or group size.
    """

    def __init__(
        self,
        info: ModelInfo,
        num_tokens: int,
        *,
        max_steps: int = 512,
        made_heads: int = 2,
        seed: int = 0,
        keep: bool = False,
    ) -> None:
        shapes = {(shape.head_dim, shape.group_size) for shape in info.layers}
        if len(shapes) != 1:
            raise ConfigError(
                f"layers must agree in head_dim and group size to be filled, got {sorted(shapes)}"
            )
        for name, value in (("num_tokens", num_tokens), ("made_heads", made_heads)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        head_dim, group = shapes.pop()
        self.num_tokens, self.max_steps = num_tokens, max_steps
        self._shapes = {shape.layer_idx: shape for shape in info.layers}
        self._made = [
            SyntheticHead(
                PROFILES["paper"],
                num_tokens,
                head_dim=head_dim,
                num_q_heads=group,
                weight_seed=seed + number,
                text_seed=seed + number,
                sink_tokens=0,
                window_tokens=0,
                test_tokens=max_steps,
            )
            for number in range(made_heads)
        ]
        self._asked = [
            torch.stack([head.test_queries(member) for member in range(group)])
            for head in self._made
        ]  # [G, max_steps, D] each
        self._steps: dict[int, Tensor] = {}  # [Hq, max_steps, D] by layer, made when asked for
        self._kept: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] | None = (
            {} if keep else None
        )
        self._prompt: dict[tuple[int, str, int], Tensor] = {}  # [G, M, D] of made heads
        self._nearest: dict[tuple[int, ...], Tensor] = {}  # [G, M, K] of made heads
        self._values = torch.randn(
            num_tokens, head_dim, generator=torch.Generator().manual_seed(seed)
        )

    def kv(self, layer_idx: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """k, v [1, Hkv, N, D] of a layer; not to be written."""
        if self._kept is None:
            return self._make_kv(layer_idx, dtype)
        if (layer_idx, dtype) not in self._kept:
            self._kept[layer_idx, dtype] = self._make_kv(layer_idx, dtype)
        return self._kept[layer_idx, dtype]

    def forget_kv(self) -> bool:
        """Gives back what `keep` has kept, and keeps nothing any more; whether there was any."""
        kept, self._kept = self._kept, None
        return bool(kept)

    def _make_kv(self, layer_idx: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        size = (1, self._shape(layer_idx).num_kv_heads, *self._values.shape)
        k, v = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)
        # Turning changes no digit, so that it may come after rounding, where it is quicker.
        values = self._values.to(dtype)
        keys = [head.keys.to(dtype) for head in self._made]
        for head in range(size[1]):
            self._turn(layer_idx, head, keys[self._number(layer_idx, head)], k[0, head])
            self._turn(layer_idx, head, values, v[0, head])
        return k, v

    def evidence(self, layer_idx: int, needs: Needs, dtype: torch.dtype) -> Evidence:
        """Evidence that a prefill of the text would have left of the queries that `needs` names."""
        total = self.num_tokens
        spread = min(needs.sampled_queries, total)
        last = min(needs.last_queries, total)
        return Evidence(
            total,
            self._prompt_queries(layer_idx, "spread", spread, dtype) if spread else None,
            self._prompt_queries(layer_idx, "last", last, dtype) if last else None,
        )

    def nearest(
        self, layer_idx: int, first: int, samples: Tensor, keys: Tensor, count: int
    ) -> Tensor:
        """The best keys of a layer's prompt queries, found once per made head, on the host.

        Args:
            first: position of the first key.
            samples: [Hkv, G, M, D]; keys: [Hkv, N, D].

        Returns:
            [Hkv, G, M, count] int32, best first.
        """
        found = []
        for head, number in enumerate(self._numbers(layer_idx)):
            place = (number, first, keys.shape[1], samples.shape[2], count)
            if place not in self._nearest:
                self._nearest[place] = _best_keys(samples[head], keys[head], count)
            found.append(self._nearest[place])
        return torch.stack(found)

    def query(self, layer_idx: int, step: int) -> Tensor:
        """[1, Hq, 1, D] float32, of the decode step that many tokens after the context."""
        if layer_idx not in self._steps:
            turned = [
                self._turned(layer_idx, head, self._asked[number])
                for head, number in enumerate(self._numbers(layer_idx))
            ]
            self._steps[layer_idx] = torch.cat(turned)
        return self._steps[layer_idx][None, :, step, None]

    def _prompt_queries(self, layer_idx: int, where: str, count: int, dtype: torch.dtype) -> Tensor:
        """[Hq, count, D] at positions that are spread over the prompt, or the last ones of it."""
        turned = [
            self._turned(layer_idx, head, self._asked_of(number, where, count))
            for head, number in enumerate(self._numbers(layer_idx))
        ]
        return torch.cat(turned).to(dtype)

    def _asked_of(self, number: int, where: str, count: int) -> Tensor:
        """[G, count, D] of a made head, which all its copies share."""
        key = (number, where, count)
        if key not in self._prompt:
            total, made = self.num_tokens, self._made[number]
            spread = torch.arange(count) * total // count
            rows = spread if where == "spread" else torch.arange(total - count, total)
            members = range(made.num_q_heads)
            self._prompt[key] = torch.stack([made.build_queries(g, rows) for g in members])
        return self._prompt[key]

    def _shape(self, layer_idx: int) -> LayerShape:
        return self._shapes[layer_idx]

    def _numbers(self, layer_idx: int) -> list[int]:
        """Number of the made head that each KV head of a layer is a copy of."""
        heads = range(self._shape(layer_idx).num_kv_heads)
        return [self._number(layer_idx, head) for head in heads]

    def _number(self, layer_idx: int, head: int) -> int:
        return (layer_idx + head) % len(self._made)

    def _turned(self, layer_idx: int, head: int, vectors: Tensor) -> Tensor:
        """Channels permuted and flipped, alike for all vectors [..., D] of a layer's KV head."""
        turned = torch.empty_like(vectors)
        self._turn(layer_idx, head, vectors, turned)
        return turned

    def _turn(self, layer_idx: int, head: int, vectors: Tensor, into: Tensor) -> None:
        generator = torch.Generator().manual_seed(_TURNS * layer_idx + head)
        order = torch.randperm(vectors.shape[-1], generator=generator)
        signs = 2.0 * torch.randint(2, order.shape, generator=generator) - 1
        torch.index_select(vectors, -1, order, out=into)
        into *= signs.to(into.dtype)


def context_bytes(layers: Sequence[LayerShape], num_tokens: int, itemsize: int) -> int:
    """The most host memory that a `SyntheticContext` takes, K and V that it keeps not counted."""
    widest = max((shape.head_dim for shape in layers), default=0)
    # Of two heads keys and meanings in float32, tokens and targets; one head's values; and all of
    # them rounded.
    return num_tokens * (widest * (2 * 6 + 4 + 3 * itemsize) + 256)


def _best_keys(samples: Tensor, keys: Tensor, count: int) -> Tensor:
    """[G, M, count] int32 for samples [G, M, D]; found in 8 bits, then exactly, as indexes do."""
    one = keys[None].contiguous()
    quantised = QuantisedKeys(1, keys.shape[1], with_rows=True, with_blocks=True)
    quantised.build(one, pool_here())
    scan = FlatScan(one, quantised)
    flat = samples.flatten(0, 1).contiguous()
    parts = [
        nearest_keys(scan, 0, some, count, rerank=count + count // 2, pool=pool_here())
        for some in flat.split(_QUERIES_AT_ONCE)
    ]
    return torch.cat(parts).view(*samples.shape[:2], count)


def context_finder(
    context: SyntheticContext, method: Method, means: CacheContext, store: LayerStore
) -> FindNearest | None:
    """A `Finder` of the best keys of a context's prompt queries, which are known before."""
    count, place = method.needs.nearest_keys, store.placement
    on_host = store.resident.pool.device.type == "cpu"
    if not on_host or not count or engine_state().isa is None:
        return nearest_finder(method, means, store)
    layer_idx, first = store.shape.layer_idx, place.sink_tokens if place is not None else 0

    def find(samples: Tensor, keys: Tensor) -> Tensor:
        return context.nearest(layer_idx, first, samples, keys, min(count, keys.shape[1]))

    return find


class FilledKV(KVCache):
    """A cache whose decode steps ask with the queries of a synthetic context."""

    def __init__(
        self,
        info: ModelInfo,
        config: HybridConfig,
        context: SyntheticContext,
        executor: Executor | None = None,
    ) -> None:
        self._context = context
        self._asked: dict[int, list[Tensor]] = {}
        super().__init__(info, config, executor)

    def _new_layer(self, shape: LayerShape) -> LayerCache:
        rotary, find = self.info.rotary_of(shape.layer_idx), partial(context_finder, self._context)
        return LayerCache(shape, rotary, self.means, find)

    def _decode(
        self,
        layer: LayerCache,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        scale: float,
        softcap: float | None,
    ) -> PartialAttention:
        stored = layer.held.rows[0].length - (new is None)
        step = stored - self._context.num_tokens
        if q.shape[0] != 1 or q.shape[2] != 1 or not 0 <= step < self._context.max_steps:
            raise ConfigError(
                f"a filled context takes one row and up to {self._context.max_steps} tokens, one "
                f"at a time, got {q.shape[0]} rows of {q.shape[2]} at step {step}"
            )
        return super()._decode(layer, self._queries(layer, q)[step], new, scale, softcap)

    def joint_step(
        self, layer_idx: int, q: Tensor, new: tuple[Tensor, Tensor], **scores: Any
    ) -> tuple[EnginePlan, Step] | None:
        layer = self.layers[layer_idx]
        step = layer.held.rows[0].length - self._context.num_tokens
        if not 0 <= step < self._context.max_steps:
            return None  # `_decode` refuses it
        return super().joint_step(layer_idx, self._queries(layer, q)[step], new, **scores)

    def _queries(self, layer: LayerCache, q: Tensor) -> list[Tensor]:
        """Queries of all steps, made at once: no step's time is theirs."""
        layer_idx, context = layer.shape.layer_idx, self._context
        if layer_idx not in self._asked:
            asked = (context.query(layer_idx, step) for step in range(context.max_steps))
            self._asked[layer_idx] = [one.to(q.device, q.dtype).contiguous() for one in asked]
        return self._asked[layer_idx]


def filled_cache(
    runtime: Attachment,
    context: SyntheticContext,
    on_layer: Callable[[int, int, float], None] | None = None,
) -> TieredCache:
    """A cache of the attachment that holds the context in all its layers, sealed, indexes built.

    States of a fixed size are left empty: a step takes as long whatever is in them.

    Continue it with `generate` on N + 1 token ids, of which only the last is computed.

    Args:
        on_layer: called with (layers done, all layers, seconds of index builds so far) as they are
            filled; may raise to give up.

    Raises:
        ConfigError: the model has layers with sliding windows, or of another kind.
    """
    config = runtime.config.replace(index_build="wait")
    cache, dtype = runtime.cache(config), runtime.model.dtype
    cache.kv = FilledKV(runtime.info, config, context, cache.kv.executor)
    cache.kv.means.reserve(context.num_tokens + context.max_steps)
    needs = cache.kv.means.method.needs
    for layer_idx, layer in enumerate(cache.layers):
        if is_fixed(layer):
            continue
        if not isinstance(layer, HybridLayer):
            raise ConfigError(
                f"layer {layer_idx} is a {type(layer).__name__} and cannot be filled; use a model "
                "whose layers attend to the whole context or keep a state of a fixed size"
            )
        evidence = (context.evidence(layer_idx, needs, dtype),) if needs != Needs() else ()
        k, v = (tensor.to(runtime.model.device) for tensor in context.kv(layer_idx, dtype))
        layer.fill(k, v, evidence)
        if on_layer is not None:
            on_layer(layer_idx + 1, len(cache.layers), cache.kv.means.builds.clock.seconds)
    return cache
