"""What a decode step costs in Python, as a count: times depend on who else is at work."""

from __future__ import annotations

import pytest

from benchmarks.common.step_cost import StepCost, counted, step_cost, step_costs
from hybrid_kv.config import HybridConfig
from hybrid_kv.ops.native import engine_state

MOST = {"hybrid": (29, 11), "full": (23, 9), "quest": (23, 9)}
"""By method: Python calls of one step of one layer, and files of the package that they are in."""
MOST_OF_A_PAGE = 81
"""Calls of the package beyond those of quiet steps."""


@pytest.mark.parametrize("method", MOST)
def test_a_step_of_a_layer_is_short(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYBRID_KV_CHECK_PLANS")
    if engine_state().isa is None:
        pytest.skip("no engine: torch computes, in more words")
    cost, (calls, files) = step_cost(HybridConfig(method=method)), MOST[method]
    assert cost.calls <= calls, "\n".join(sorted(cost.functions.elements()))
    assert len(cost.files) <= files, sorted(cost.files)


def test_a_page_that_leaves_and_the_plan_that_follows_are_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One page begins and one leaves in as many steps as a page has tokens."""
    monkeypatch.delenv("HYBRID_KV_CHECK_PLANS")
    if engine_state().isa is None:
        pytest.skip("no engine: torch computes, in more words")
    costs = [cost.own_calls for cost in step_costs(HybridConfig())]
    quiet = min(costs)
    beyond = sum(cost - quiet for cost in costs)
    assert 30 < beyond <= MOST_OF_A_PAGE, costs


def test_a_step_of_hybrid_searches_an_index_and_attends_what_it_found() -> None:
    """Or the count would be of something else."""
    functions = step_cost(HybridConfig()).functions
    assert functions["store/live_index.py:LiveIndex.note"] == 1
    assert functions["runtime/engine_plan.py:SearchedEntries.take_up"] == 1
    assert functions["ops/native/step.py:LayerPlan.run"] == 1
    assert functions["runtime/decode.py:decode"] == 0


def test_what_is_counted_is_what_is_entered() -> None:
    def inner() -> int:
        return sum(value for value in (1, 2))  # resumed twice, and once more to end

    assert counted(lambda: (inner(), inner())) == StepCost(8, frozenset(), {})  # type: ignore[arg-type]
