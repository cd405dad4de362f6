"""A2SF: H2O that forgets, so that an entry does not lead because it is old."""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from hybrid_kv.methods.following import Moment, RecentShare, RecentShareParams
from hybrid_kv.methods.scores import group_sums
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, Needs

_FORGOTTEN = 1e-7
"""A factor at which a query counts no more, in float32."""


@METHODS.register("a2sf", paper="Jo and Shin 2024, arXiv:2407.20485")
class A2SF(RecentShare):
    """Keeps what recent queries attended most, older ones counting less, and DROPS the rest.

    score[n] = sum over queries q of forgetting ** (now - q) times the softmax weight that q gave
    entry n in a KV head's group.

    Deviations: those of h2o; tokens that come together are of one age; queries of the prompt whose
    factor is below 1e-7 are not looked at; the default of forgetting is of this project, for the
    authors search a factor.
    """

    class Params(RecentShareParams):
        """forgetting: factor of an older query's weights, by token."""

        forgetting: float = Field(default=0.5, ge=0, le=0.99)

    @property
    def needs(self) -> Needs:
        factor = self.params.forgetting
        remembered = math.ceil(math.log(_FORGOTTEN) / math.log(factor)) if factor else 1
        return super().needs | Needs(last_queries=remembered)

    def prompt_scores(self, seen: Evidence, num_kv_heads: int, layer_idx: int) -> Tensor:
        factor, last = float(self.params.forgetting), seen.num_tokens - 1

        def faded(weights: Tensor, asked: Tensor) -> Tensor:
            return weights * torch.pow(factor, (last - asked).float())[:, None]

        return group_sums(seen.mass(each=faded), num_kv_heads)

    def moved(self, old: Tensor, mass: Tensor, moment: Moment) -> Tensor:
        factor = float(self.params.forgetting)
        return old * factor**moment.new + mass
