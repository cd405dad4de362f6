"""One prefill for all methods: the context computed exactly, and each question behind it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.eval.prefilled import PrefilledPrompt
from hybrid_kv.models.attach import Attachment
from hybrid_kv.models.cache_layers import HybridLayer, copied_state
from hybrid_kv.models.forwards import passing
from hybrid_kv.models.rollback import ReturnPoint
from hybrid_kv.runtime import KVCache, LayerCache
from hybrid_kv.runtime.layer_prompt import PromptMark
from hybrid_kv.types import Evidence, LayerShape, Needs


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
