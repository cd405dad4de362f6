"""One prefill for all methods: the context computed exactly, and each question behind it.

Each method is handed the KV that full attention computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.models.attach import Attachment
from hybrid_kv.models.cache_layers import HybridLayer, copied_state
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.rollback import ReturnPoint
from hybrid_kv.runtime import KVCache, LayerCache
from hybrid_kv.runtime.layer_prompt import PromptMark
from hybrid_kv.types import Evidence, LayerShape, Needs


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


class _OpenLayer(LayerCache):
    """A layer whose prompt never ends: everything stays resident and is attended exactly."""

    def seal(self, evidence: tuple[Evidence, ...] | None = None) -> None:
        """Nothing: more of the prompt may come, however short."""

    def watched(self) -> PromptMark:
        """Evidence that has been collected so far, to go back to."""
        return self.prompt.mark()

    def unwatch(self, before: PromptMark) -> None:
        """Forgets what was collected since."""
        self.prompt.go_back(before)


class _OpenPrompt(KVCache):
    """A cache of such layers."""

    def _new_layer(self, shape: LayerShape) -> LayerCache:
        return _OpenLayer(shape, self.info.rotary_of(shape.layer_idx), self.means)

    @property
    def open_layers(self) -> list[_OpenLayer]:
        return [layer for layer in self.layers.values() if isinstance(layer, _OpenLayer)]


class SharedPrompt:
    """A context [tokens], computed once with full attention.

    Args:
        needs: evidence that the methods ask for, all of it together.

    Layers of transformers' own, such as those of a sliding window, are copied to every method.
    """

    def __init__(self, runtime: Attachment, context: Sequence[int], needs: Needs) -> None:
        self._model, self._count = runtime.model, len(context)
        self._ids: list[int] = []
        self._cache = runtime.cache(HybridConfig(method="full"))
        self._cache.kv = self._kv = _OpenPrompt(runtime.info, HybridConfig(method="full"))
        self._kv.means.watched = needs
        self._kv.means.reserve(self._count)
        self._feed(context)

    def context(self) -> PrefilledPrompt:
        """The prompt as it stands: no question yet."""
        stores, ids = self._kv.stores, torch.tensor([self._ids], device=self._model.device)
        views = {idx: store.resident.view() for idx, store in sorted(stores.items())}
        return PrefilledPrompt(
            ids,
            tuple((view.k, view.v) for view in views.values()),
            tuple(self._kv.layers[idx].prompt.evidence() for idx in views),
            {
                idx: copied_state(layer)
                for idx, layer in enumerate(self._cache.layers)
                if not isinstance(layer, HybridLayer)
            },
        )

    def with_question(self, ids: Sequence[int]) -> tuple[PrefilledPrompt, int]:
        """The prompt with a question behind the context, and the first token of the answer.

        Good until the next question.
        """
        before, place = (
            [layer.watched() for layer in self._kv.open_layers],
            ReturnPoint(self._cache),
        )
        try:
            logits = self._feed(ids)
            return self.context(), int(logits[0, -1].argmax())
        finally:
            place.go_back()
            del self._ids[self._count :]
            for layer, collected in zip(self._kv.open_layers, before, strict=True):
                layer.unwatch(collected)

    def close(self) -> None:
        """Gives the memory back."""
        self._cache.close()

    def _feed(self, ids: Sequence[int]) -> Tensor:
        self._ids += ids
        step = torch.tensor([list(ids)], device=self._model.device)
        with torch.inference_mode():
            logits: Tensor = self._model(
                step, **passing(self._cache), use_cache=True, logits_to_keep=1
            ).logits
        return logits
