"""Ada-SnapKV: SnapKV whose heads share the budget of their layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field
from torch import Tensor

from hybrid_kv.config import Params as BaseParams
from hybrid_kv.methods.scores import head_budgets
from hybrid_kv.methods.snapkv import SnapKV, SnapParams
from hybrid_kv.plugins import METHODS


class Safeguarded(BaseParams):
    """safeguard: of an even share so much is certain for every head."""

    safeguard: float = Field(default=0.5, ge=0, le=1)


class Shared:
    """Mixed into SnapKV or what derives from it: heads get what the best scores of all ask for."""

    params: Any

    def shares(self, layer_idx: int, scores: Tensor, budget: int) -> Sequence[int]:
        """By KV head the entries that stay, Hkv * budget of scores [Hkv, N] together."""
        return head_budgets(scores, budget, self.params.safeguard)


@METHODS.register("ada_snapkv", paper="Feng et al. 2024, arXiv:2407.11550, sections 3.3 and 3.4")
class AdaSnapKV(Shared, SnapKV):
    """SnapKV where a layer's heads share their budgets by the scores; DROPS the rest.

    The best Hkv * B scores of all heads together say how many each head would keep, B_h; it keeps
    the best safeguard * B + (1 - safeguard) * B_h of its own. Held flat and ragged, never padded.

    Deviations: what heads keep adds up to Hkv * B; the authors' code rounds each by itself.
    """

    class Params(Safeguarded, SnapParams):
        """As snapkv, with safeguard."""
