"""The driver of single methods: full budgets are exact, and what is lost shows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import Params as BaseParams
from hybrid_kv.entries import Attended, Entries
from hybrid_kv.plugins import Method, Placement
from hybrid_kv.types import Demotion, Evidence, Read
from tests.drive_method import drive


class Newest(Method):
    """Keeps the newest `budget` entries that left the window, and counts what they weighed."""

    class Params(BaseParams):
        """budget: entries of a head; offload: whether the rest is kept on the host."""

        budget: int = 1000
        offload: bool = False

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        return Placement(16, 16, rest=Demotion.ABSORB, offload=self.params.offload)

    def absorb(
        self,
        layer_idx: int,
        row: int,
        kept: Entries | None,
        left: Entries,
        seen: Evidence | None,
    ) -> Entries:
        kept = (kept or Entries.empty(left)).extended(left)
        count = kept.lengths[0]
        newest = torch.arange(max(0, count - self.params.budget), count)
        return kept.select(newest.repeat(kept.num_heads, 1), room=16)

    def read(self, layer_idx: int, q: Tensor) -> Read:
        return Read()

    def after(self, layer_idx: int, attended: Attended) -> Sequence[Entries | None]:
        kept = attended.kept[0]
        if kept is None:
            return [None]
        return [kept.with_columns(mass=kept.columns.get("mass", 0) + attended.mass(0))]


@pytest.mark.parametrize("prompt", [5, 37, 173])
@pytest.mark.parametrize("settings", [{}, {"budget": 7, "offload": True}])
def test_nothing_is_lost_at_a_full_budget_or_with_a_cold_tier(
    prompt: int, settings: dict[str, int]
) -> None:
    driven = drive(Newest(Newest.Params(**settings)), prompt=prompt)
    assert not driven.lost.any()
    assert max(driven.error) < 1e-6


def test_what_a_method_drops_is_lost() -> None:
    driven = drive(Newest(Newest.Params(budget=7)))
    assert driven.kept is not None
    assert driven.kept.lengths == (7, 7)
    assert driven.lost[:, :16].sum() == 0
    assert driven.lost.sum(1).tolist() == [int(driven.kept.positions[0]) - 16] * 2
    assert min(driven.error[-20:]) > 1e-3
    assert 0 < driven.kept.columns["mass"].min() < driven.kept.columns["mass"].max() < 40 * 3
