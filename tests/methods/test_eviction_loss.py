"""Ada-SnapKV loses no more of a layer's output than SnapKV does with as many entries."""

from __future__ import annotations

import pytest

from benchmarks.eviction_loss.run import measure


def test_shared_budgets_cost_200_heads_of_mixed_concentration_less_than_even_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = measure(heads=200, tokens=601, budget=128)
    even, shared = rows["snapkv"], rows["ada_snapkv"]
    margin = even["l1_error"] - shared["l1_error"]
    with capsys.disabled():
        print(f"margin {margin:.3f} of an L1 error of {even['l1_error']:.3f}")
    assert shared["kept"] == even["kept"] == 96
    assert shared["lost_mass"] <= even["lost_mass"]  # theorem 4, on the next query
    assert margin >= 0
