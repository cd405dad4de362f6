"""PyramidKV: SnapKV with more room in the first layers than in the last."""

from __future__ import annotations

from hybrid_kv.config import Count
from hybrid_kv.methods.scores import layer_budgets
from hybrid_kv.methods.snapkv import SnapKV, SnapParams
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import ModelInfo


class PyramidParams(SnapParams):
    """beta: the last layer keeps one beta-th of an even share; the steeper the higher."""

    beta: Count = 20


@METHODS.register("pyramidkv", paper="Cai et al. 2024, arXiv:2406.02069, section 4")
class PyramidKV(SnapKV):
    """SnapKV with budgets on a straight line over the layers, most in the first; DROPS the rest.

    Beside sinks and window the last layer keeps 1/beta of the mean, the first what makes the mean
    come out; where a prompt has not so much, the line is flatter.

    Deviations: the layers' budgets add up exactly, where the authors round the step between two
    layers down. Layers that are not ours to evict (with a sliding window of their own) do not
    count.
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
