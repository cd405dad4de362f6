"""Budgets of layers that follow their error: who gets how much, and which steps are looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import LayerShape, ModelInfo, PartialAttention, Read, TokenBudget
from hybrid_kv.watch.layer_budgets import LayerBudgets, entries_by_size

LAYERS = tuple(LayerShape(idx, 4, 2, 16) for idx in range(3))
TOP_K = 12
SETTINGS: dict[str, Any] = {
    **{"method": "hybrid", "page_size": 4, "sink_tokens": 4, "window_tokens": 8},
    "index_build": "wait",
}
COLD: dict[str, Any] = {
    "index": {"kind": "flat", "precision": "stored"},
    **{"top_k": TOP_K, "budgets": "by_error"},
}
SPREAD = (0.05, 1.0, 1.0)
"""Of the values by layer about a common mean: one that hardly moves with what is read."""


class Budgets:
    """Takes the budget of every step of every layer."""

    def __init__(self) -> None:
        self.of: dict[int, list[int]] = {}

    def wants(self, layer_idx: int, q: Tensor) -> bool:
        return True

    def add(self, step: Any, part: PartialAttention) -> None:
        budget = step.found[0][0]
        self.of.setdefault(step.layer.shape.layer_idx, []).append(budget.top_k)


def cache(prompt: int = 400, **cold: Any) -> KVCache:
    """A cache that holds a prompt."""
    torch.manual_seed(5)
    kv = KVCache(ModelInfo(LAYERS), HybridConfig(**SETTINGS, cold={**COLD, **cold}))
    feed(kv, prompt)
    kv.layers.seal_all()
    return kv


def feed(kv: KVCache, new: int, sharp: float = 1.0) -> list[Tensor]:
    """More tokens in all layers; by layer what they give.

    Args:
        sharp: times the queries of the second layer, which then looks at few keys.
    """
    outs = []
    for idx in range(len(LAYERS)):
        q, k, v = (torch.randn(1, heads, new, 16) for heads in (4, 2, 2))
        q = q * (sharp if idx == 1 else 1.0)
        outs.append(kv.attend(idx, q, (k, 1 + SPREAD[idx] * v), None, scale=0.5).out)
    return outs


def seen(kv: KVCache, tokens: int, sharp: float = 1.0) -> Budgets:
    """Budgets of so many steps of one token."""
    budgets = Budgets()
    kv.watchers.append(budgets)
    for _ in range(tokens):
        feed(kv, 1, sharp)
    kv.watchers.remove(budgets)
    return budgets


def test_a_layer_that_hardly_moves_gives_entries_to_the_others() -> None:
    of = seen(cache(), 12).of
    first = [of[idx][0] for idx in range(3)]
    last = [of[idx][-1] for idx in range(3)]
    assert first == [TOP_K] * 3
    assert last[0] == TOP_K // 4, "not less than a fourth"
    assert min(last[1:]) > TOP_K
    assert abs(sum(last) - 3 * TOP_K) <= 2, "rounded"


@pytest.mark.parametrize("new", [1, 3])
def test_a_layer_attends_as_if_all_had_its_budget(new: int) -> None:
    kv = cache()
    last = {idx: found[-1] for idx, found in seen(kv, 12).of.items()}
    outs = feed(kv, new)
    assert len(set(last.values())) > 1
    for idx, top_k in last.items():
        equal = cache(budgets="equal", top_k=top_k)
        seen(equal, 12)
        torch.testing.assert_close(outs[idx], feed(equal, new)[idx])


def test_layers_are_alike_unless_asked_otherwise() -> None:
    kv = cache(budgets="equal")
    assert seen(kv, 12).of == {idx: [TOP_K] * 12 for idx in range(3)}
    assert kv.means.budgets is None


@pytest.mark.parametrize("sizes", [(1.0, 2.0, 8.0), (1.0, 1.0, 1e9), (0.0, 1.0, 3.0)])
def test_entries_follow_sizes_within_bounds_and_are_as_many(sizes: tuple[float, ...]) -> None:
    asked = dict.fromkeys(range(3), 100)
    found = entries_by_size(dict(enumerate(sizes)), asked, dict.fromkeys(range(3), 4))
    assert sum(found.values()) == pytest.approx(100 * len(found), abs=2)
    assert all(25 <= one <= 400 for one in found.values())
    assert (0 in found) == (sizes[0] > 0), "of which nothing is known"
    if sizes[2] == 8:
        assert found[2] / found[0] == pytest.approx(8 ** (1 / 3.7), rel=0.03)


def test_a_layer_of_which_nothing_is_known_has_what_is_asked_for() -> None:
    budgets = LayerBudgets(LAYERS)
    assert budgets.read(0, Read(cold=TokenBudget(100, follows=True))) == Read(cold=TokenBudget(100))


def test_the_first_tokens_are_looked_at_and_then_few() -> None:
    budgets = LayerBudgets(LAYERS)
    looked = [length for length in range(401, 500) if budgets.is_due(length)]
    assert looked == [*range(401, 409), 416, 448, 480]


def test_a_step_that_is_looked_at_is_no_joint_step() -> None:
    kv = cache()
    looked = []
    for _ in range(12):
        feed(kv, 1)
        looked.append(kv.is_looked_at(kv.layers[0]))
    assert looked == [True] * 7 + [False] * 5


def test_a_fork_goes_on_from_what_is_known_and_a_new_start_from_nothing() -> None:
    kv = cache()
    last = {idx: found[-1] for idx, found in seen(kv, 12).of.items()}
    fork = kv.fork()
    known = seen(fork, 1).of
    assert {idx: found[0] for idx, found in known.items()} == last
    assert fork.means.budgets is not kv.means.budgets
    kv.start_over()
    assert kv.means.budgets is None


def test_later_looks_move_what_earlier_ones_gave() -> None:
    kv = cache()
    before = {idx: found[-1] for idx, found in seen(kv, 12).of.items()}
    after = {idx: found[-1] for idx, found in seen(kv, 40, sharp=40.0).of.items()}
    assert after[1] < before[1]
    assert after[2] > before[2]
    assert sum(after.values()) == sum(before.values())


def test_a_fork_looks_as_its_origin_would() -> None:
    kv = cache()
    seen(kv, 12)
    found = []
    for one in (kv.fork(), kv):
        torch.manual_seed(7)
        found.append(seen(one, 40, sharp=40.0).of)
    assert found[0] == found[1]
    assert found[0][1][0] != found[0][1][-1], "a look has moved them"


def test_the_mean_of_what_is_attended_stays() -> None:
    works = []
    for how in ("equal", "by_error"):
        kv = cache(budgets=how)
        for _ in range(40):
            feed(kv, 1)
        works.append(kv.work.retrieved)
    assert works[1] == pytest.approx(works[0], rel=0.05)


def test_an_index_that_does_not_rank_has_no_better_half() -> None:
    with pytest.raises(ConfigError, match="budgets 'by_error' takes an index that ranks"):
        HybridConfig(**SETTINGS, cold={**COLD, "index": "clusters"})
