"""A context that never was computed: attention-like KV put straight into a cache's tiers.

Decoding can then be measured at 128K to 1M tokens in minutes, without a prefill. A random model's
own queries would find nothing in such keys, so each step asks with a made-up query of the same
text; the model's own are computed, and then replaced. Times and work are those of a real step; what
the model writes means nothing.

A few heads are made with `hybrid_kv.eval.synthetic`; the others are copies of them with channels
permuted and signs flipped, which changes no score and no statistic of a channel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.synthetic import PROFILES, SyntheticHead
from hybrid_kv.models.attach import Attachment
from hybrid_kv.models.hf_cache import HybridCache, HybridLayer
from hybrid_kv.runtime import KVCache
from hybrid_kv.store import LayerKV
from hybrid_kv.types import Evidence, LayerShape, ModelInfo, Needs, PartialAttention

_TURNS = 7919
"""Spreads (layer, head) over the seeds of permutations."""


class SyntheticContext:
    """KV and queries of a text for all layers of a model.

    Args:
        num_tokens: N, of the context.
        max_steps: decode steps for which there are queries.
        profile: of the heads, a name of `PROFILES`.
        made_heads: KV heads that are made; the rest are turned copies.

    Raises:
        ConfigError: a number is below 1, or the layers differ in head_dim or group size.
    """

    def __init__(
        self,
        info: ModelInfo,
        num_tokens: int,
        *,
        max_steps: int = 512,
        profile: str = "paper",
        made_heads: int = 2,
        seed: int = 0,
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
                PROFILES[profile],
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
        self._values = torch.randn(
            num_tokens, head_dim, generator=torch.Generator().manual_seed(seed)
        )

    def kv(self, layer_idx: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """k, v [1, Hkv, N, D] of a layer."""
        size = (1, self._shape(layer_idx).num_kv_heads, *self._values.shape)
        k, v = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)
        for head in range(size[1]):
            k[0, head] = self._turned(layer_idx, head, self._source(layer_idx, head).keys)
            v[0, head] = self._turned(layer_idx, head, self._values)
        return k, v

    def evidence(self, layer_idx: int, needs: Needs, dtype: torch.dtype) -> Evidence:
        """What a prefill of the text would have left of the queries that `needs` names."""
        total = self.num_tokens
        sampled = torch.arange(min(needs.sampled_queries, total))
        sampled = sampled * total // max(1, len(sampled))
        last = torch.arange(total - min(needs.last_queries, total), total)
        return Evidence(
            total,
            self._prompt_queries(layer_idx, sampled, dtype) if needs.sampled_queries else None,
            self._prompt_queries(layer_idx, last, dtype) if needs.last_queries else None,
        )

    def query(self, layer_idx: int, step: int) -> Tensor:
        """[1, Hq, 1, D] float32, of the decode step that many tokens after the context."""
        if layer_idx not in self._steps:
            heads = range(self._shape(layer_idx).num_kv_heads)
            asked = [self._asked[self._number(layer_idx, head)] for head in heads]
            turned = [self._turned(layer_idx, head, asked[head]) for head in heads]
            self._steps[layer_idx] = torch.cat(turned)
        return self._steps[layer_idx][None, :, step, None]

    def _prompt_queries(self, layer_idx: int, rows: Tensor, dtype: torch.dtype) -> Tensor:
        shape = self._shape(layer_idx)
        queries = [
            self._turned(layer_idx, head, self._source(layer_idx, head).build_queries(member, rows))
            for head in range(shape.num_kv_heads)
            for member in range(shape.group_size)
        ]
        return torch.stack(queries).to(dtype)

    def _shape(self, layer_idx: int) -> LayerShape:
        return self._shapes[layer_idx]

    def _number(self, layer_idx: int, head: int) -> int:
        return (layer_idx + head) % len(self._made)

    def _source(self, layer_idx: int, head: int) -> SyntheticHead:
        return self._made[self._number(layer_idx, head)]

    def _turned(self, layer_idx: int, head: int, vectors: Tensor) -> Tensor:
        """Channels permuted and flipped, alike for all vectors of a layer's KV head."""
        generator = torch.Generator().manual_seed(_TURNS * layer_idx + head)
        order = torch.randperm(vectors.shape[-1], generator=generator)
        signs = 2.0 * torch.randint(2, order.shape, generator=generator) - 1
        return vectors[..., order] * signs


class FilledKV(KVCache):
    """A cache whose decode steps ask with the queries of a synthetic context."""

    def __init__(self, info: ModelInfo, config: HybridConfig, context: SyntheticContext) -> None:
        super().__init__(info, config)
        self._context = context

    def _decode(
        self, layer: LayerKV, q: Tensor, scale: float, softcap: float | None
    ) -> PartialAttention:
        step = layer.lengths[0] - self._context.num_tokens - 1
        if q.shape[0] != 1 or q.shape[2] != 1 or not 0 <= step < self._context.max_steps:
            raise ConfigError(
                f"a filled context takes one row and up to {self._context.max_steps} tokens, one "
                f"at a time, got {q.shape[0]} rows of {q.shape[2]} at step {step}"
            )
        asked = self._context.query(layer.shape.layer_idx, step)
        return super()._decode(layer, asked.to(q.device, q.dtype), scale, softcap)


def filled_cache(runtime: Attachment, context: SyntheticContext) -> HybridCache:
    """A cache of the attachment that holds the context in all its layers, sealed, indexes built.

    Continue it with `generate` on N + 1 token ids, of which only the last is computed.

    Raises:
        ConfigError: the model has layers that are not tiered.
    """
    config = runtime.config.replace(index_build="wait")
    cache, dtype = runtime.cache(config), runtime.model.dtype
    cache.kv = FilledKV(runtime.info, config, context)
    cache.kv.reserve(context.num_tokens + context.max_steps)
    needs = cache.kv.method.needs
    for layer_idx, layer in enumerate(cache.layers):
        if not isinstance(layer, HybridLayer):
            raise ConfigError(
                f"layer {layer_idx} keeps a cache of transformers' own and cannot be filled; use a "
                "model whose layers all attend to the whole context"
            )
        evidence = (context.evidence(layer_idx, needs, dtype),) if needs != Needs() else ()
        k, v = (tensor.to(runtime.model.device) for tensor in context.kv(layer_idx, dtype))
        layer.fill(k, v, evidence)
    return cache
