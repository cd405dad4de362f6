"""PyramidKV: SnapKV with more room in the first layers than in the last."""

from __future__ import annotations

from typing import Any

from hybrid_kv.config import Count, Tokens
from hybrid_kv.methods.scores import layer_budgets
from hybrid_kv.methods.snapkv import SnapKV, SnapParams
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import ModelInfo


class PyramidParams(SnapParams):
    """window_tokens, observed_tokens: the authors' last 8, which score and stay, in pages;
    beta: the last layer keeps one beta-th of an even share; the steeper the higher.
    """

    window_tokens: Tokens = 16
    observed_tokens: Count = 8
    beta: Count = 20


@METHODS.register("pyramidkv", paper="Cai et al. 2024, arXiv:2406.02069, section 4")
class PyramidKV(SnapKV):
    """SnapKV with budgets on a straight line over the layers, most in the first; DROPS the rest.

    Beside sinks and window the last layer keeps 1/beta of the mean, the first what makes the mean
    come out; where a prompt has not so much, the line is flatter.

    Deviations: the layers' budgets add up exactly, where the authors round the step between two
    layers down. Layers that are not ours to evict (with a sliding window of their own) do not
    count; the window is of whole pages.
    """

    Params = PyramidParams

    def open(self, info: ModelInfo) -> None:
        super().open(info)
        self._layers = [shape.layer_idx for shape in info.layers]

    def budget(self, layer_idx: int, count: int) -> int:
        even = self.room(count)
        if even == count:
            return count
        budgets = layer_budgets(even, len(self._layers), count, self.params.beta)
        return budgets[self._layers.index(layer_idx)]

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        """As `Evicting.at_budget`, with a window of the queries that score."""
        window = max(page_size, params.observed_tokens // page_size * page_size)
        given = params.model_copy(update={"window_tokens": window})
        return super().at_budget(given, tokens, context_tokens=context_tokens, page_size=page_size)
