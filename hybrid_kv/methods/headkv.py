"""HeadKV: SnapKV whose heads have budgets by how much each of them matters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from hybrid_kv.methods.head_scores import given_scores
from hybrid_kv.methods.scores import shared_out
from hybrid_kv.methods.snapkv import SnapKV, SnapParams
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import ModelInfo


class HeadKVParams(SnapParams):
    """heads: how much each matters, by layer and KV head, a JSON file of that, or "prompt";
    beta: one beta-th of an even share goes into the pool that they share by it.
    """

    heads: str | tuple[tuple[float, ...], ...] = "prompt"
    beta: float = Field(default=1.2, ge=1, allow_inf_nan=False)


@METHODS.register("headkv", paper="Fu et al. 2024, arXiv:2410.19258")
class HeadKV(SnapKV):
    """SnapKV with a budget for each head, by scores of the model's heads; DROPS the rest.

    Of an even share b every head keeps b - b / beta; the pool of b / beta from all heads of all
    layers is shared in the proportion of their scores.

    Deviations: the paper's scores come from retrieval and reasoning probes of query heads; here
    they are given for KV heads (hybrid-kv heads makes such a file), or, by "prompt", a head's is
    the sum of its SnapKV scores, and heads of a layer share their pool. A head keeps no more than
    there is; 1.2 is one of the values of beta that the authors try (1.005 to 10), who round b /
    beta down.
    """

    Params = HeadKVParams

    def open(self, info: ModelInfo) -> None:
        super().open(info)
        self._scores: dict[int, Tensor] | None = None
        if self.params.heads != "prompt":
            layers = [one.layer_idx for one in info.layers]
            given = given_scores(self.params.heads, info)
            self._scores = dict(zip(layers, given, strict=True))

    def shares(self, layer_idx: int, scores: Tensor, budget: int) -> Sequence[int]:
        known = self._scores or {layer_idx: scores.sum(1).cpu()}
        every = torch.cat(list(known.values())).double()
        pool = budget / self.params.beta
        parts = every / every.sum() if every.any() else torch.full_like(every, 1 / len(every))
        exact = (budget - pool + len(every) * pool * parts).tolist()
        budgets = torch.tensor(shared_out(len(every) * budget, exact))
        own = dict(zip(known, budgets.split([len(one) for one in known.values()]), strict=True))
        kept: list[int] = own[layer_idx].clamp(max=scores.shape[1]).tolist()
        return kept
