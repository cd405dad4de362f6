"""One prefill for many methods: each is handed the KV that full attention computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.models.attach import Attachment
from hybrid_kv.models.cache_layers import HybridLayer
from hybrid_kv.models.forwards import passing
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.types import Evidence, Needs


@dataclass(frozen=True, slots=True)
class PrefilledPrompt:
    """A prompt with its KV and what was seen of its queries.

    layers: one (k, v) of [1, Hkv, N, D] each; evidence: of each layer. others: by number what the
    layers hold that are transformers' own, such as a sliding window; no others have a number there.
    """

    ids: Tensor
    layers: tuple[tuple[Tensor, Tensor], ...]
    evidence: tuple[tuple[Evidence, ...], ...]
    others: Mapping[int, dict[str, Any]] = field(default_factory=dict)

    def of_layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """The (k, v) of a layer of the model."""
        return self.layers[layer_idx - sum(other < layer_idx for other in self.others)]


def prefill(
    runtime: Attachment, context: NDArray[np.int64], needs: Needs = Needs()
) -> PrefilledPrompt:
    """Computes a prompt with full attention, layer by layer.

    Args:
        context: [tokens] ids.
        needs: evidence to keep for indexes that learn from queries.
    """
    ids = torch.from_numpy(np.asarray(context)).reshape(1, -1).to(runtime.model.device)
    cache = runtime.cache(HybridConfig(method="full"))
    cache.kv.means.reserve(ids.shape[1])
    cache.kv.means.watched = needs
    with torch.inference_mode():
        runtime.model(ids, **passing(cache), use_cache=True, logits_to_keep=1)
    views = {idx: layer.resident.view() for idx, layer in sorted(cache.kv.stores.items())}
    return PrefilledPrompt(
        ids,
        tuple((view.k, view.v) for view in views.values()),
        tuple(cache.kv.layers[idx].prompt.evidence() for idx in views),
    )


def open_cache(
    runtime: Attachment, config: HybridConfig, prompt: PrefilledPrompt, *, wait: bool = True
) -> TieredCache:
    """A cache under `config` that holds the prompt.

    Args:
        wait: for its indexes, to compare runs; else as `config` says.
    """
    cache = runtime.cache(config.replace(index_build="wait") if wait else config)
    with torch.inference_mode():
        for layer, (k, v), evidence in zip(
            cache.layers, prompt.layers, prompt.evidence, strict=True
        ):
            if not isinstance(layer, HybridLayer):
                raise TypeError("the needle tasks need a model of full-attention layers only")
            layer.fill(k, v, evidence)
    return cache
