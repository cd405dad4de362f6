"""Evicting methods keep what the formulas of their papers say, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import hybrid_kv
from hybrid_kv.entries import Attended, Entries
from hybrid_kv.errors import ConfigError
from hybrid_kv.methods.evicting import of_window
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Demotion, Needs
from tests.drive_method import drive
from tests.methods.eviction import (
    PROMPT,
    Heads,
    Stepwise,
    ada,
    causal_weights,
    kept_sets,
    method,
    of_groups,
    pyramid,
    run,
    snap_scores,
    snapkv,
)
from tests.tolerances import TOLERANCES

SNAP = ("snapkv", "pyramidkv", "ada_snapkv", "ada_pyramid")
EVICTING = (*SNAP, "headkv", "h2o", "tova", "a2sf", "scissorhands", "d2o")
LAYERS = 5


def scores_of(given: Heads, prompt: int = PROMPT, **settings: Any) -> np.ndarray[Any, Any]:
    q, k, _ = given
    weights = causal_weights(q[:, :prompt], k[:, :prompt], q.shape[-1] ** -0.5)
    return snap_scores(weights, len(k), **settings)


@pytest.mark.parametrize(
    ("sinks", "window", "observed", "pool", "pooling"),
    [(0, 32, 32, 7, "max"), (16, 48, 29, 5, "max"), (0, 16, 32, 7, "mean"), (0, 32, 1, 1, "max")],
)
def test_snapkv_keeps_the_best_pooled_scores_of_every_head(
    given: Heads, sinks: int, window: int, observed: int, pool: int, pooling: str
) -> None:
    tested = method(
        "snapkv",
        sink_tokens=sinks,
        window_tokens=window,
        observed_tokens=observed,
        pool_tokens=pool,
        pooling=pooling,
        budget_tokens=91,
    )
    scores = scores_of(given, window=window, observed=observed, pool=pool, mean=pooling == "mean")
    driven = run(tested, given, new=1)
    expected = snapkv(scores, 91 - sinks - window, sinks)
    assert kept_sets(driven.kept, len(given[1])) == expected


def test_neighbours_of_a_sink_that_is_attended_count_as_much(given: Heads) -> None:
    """Pooling looks at what is kept in any case as well."""
    q, k, v = (one.clone() for one in given)
    q[..., 0], k[..., 0], k[:, 15, 0] = 20.0, 0.0, 20.0
    tested = method("snapkv", sink_tokens=16, budget_tokens=16 + 32 + 9)
    scores = scores_of((q, k, v), window=32, observed=32, pool=7)
    expected = snapkv(scores, 9, 16)
    assert all({16, 17, 18} <= head for head in expected)
    assert kept_sets(run(tested, (q, k, v), new=1).kept, len(k)) == expected


@pytest.mark.parametrize("safeguard", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("sinks", [0, 16])
def test_ada_snapkv_shares_the_budget_of_a_layer_by_its_best_scores(
    given: Heads, sinks: int, safeguard: float
) -> None:
    tested = method("ada_snapkv", sink_tokens=sinks, budget_tokens=83, safeguard=safeguard)
    scores = scores_of(given, window=32, observed=32, pool=7)
    driven = run(tested, given, new=1)
    budget = 83 - 32 - sinks
    kept = kept_sets(driven.kept, len(given[1]))
    assert kept == ada(scores, budget, sinks, safeguard)
    assert sum(map(len, kept)) == len(given[1]) * budget
    if safeguard == 1:
        assert kept == snapkv(scores, budget, sinks)


@pytest.mark.parametrize("name", ["pyramidkv", "ada_pyramid"])
@pytest.mark.parametrize(("budget", "beta"), [(51, 20), (83, 3), (115, 20)])
def test_a_pyramid_gives_layers_budgets_on_a_line_and_the_same_total(
    given: Heads, name: str, budget: int, beta: int
) -> None:
    window, observed = (32, 32) if name == "ada_pyramid" else (16, 8)  # the authors' 8, in pages
    budgets = pyramid(budget - window, LAYERS, PROMPT - window, beta)
    assert sum(budgets) == LAYERS * (budget - window)
    assert budgets == sorted(budgets, reverse=True)
    scores = scores_of(given, window=window, observed=observed, pool=7)
    for layer_idx in range(LAYERS):
        tested = method(name, budget_tokens=budget, beta=beta)
        driven = run(tested, given, new=1, layer_idx=layer_idx, num_layers=LAYERS)
        formula = snapkv(scores, budgets[layer_idx], 0)
        if name == "ada_pyramid":
            formula = ada(scores, budgets[layer_idx], 0, 0.5)
        assert kept_sets(driven.kept, len(given[1])) == formula, layer_idx


def test_a_pyramid_is_flatter_where_the_prompt_is_short() -> None:
    assert pyramid(60, 5, 200, 20) == [117, 89, 60, 31, 3]
    assert pyramid(60, 5, 100, 20) == [100, 80, 60, 40, 20]


@pytest.mark.parametrize("name", SNAP)
def test_what_is_offloaded_changes_nothing_of_what_is_kept(given: Heads, name: str) -> None:
    """Though an index may ask for more queries than the method looks at."""
    offloading = method(name, budget_tokens=83, demote="offload")
    assert offloading.needs.last_queries > 32
    kept, alone = (
        kept_sets(run(tested, given, new=1, num_layers=3).kept, len(given[1]))
        for tested in (offloading, method(name, budget_tokens=83))
    )
    assert kept == alone


@pytest.mark.parametrize("name", SNAP)
def test_what_comes_after_the_prompt_stays(given: Heads, name: str) -> None:
    driven = run(method(name, window_tokens=32, budget_tokens=83), given)
    first, last = driven.steps[0], driven.steps[-1]
    before, after = kept_sets(first, len(given[1])), kept_sets(last, len(given[1]))
    left = set(range(PROMPT - 32, PROMPT - 32 + 32))  # two pages
    assert after == [head | left for head in before]


@pytest.mark.parametrize(("window", "sinks", "page"), [(32, 0, 16), (48, 16, 8), (15, 0, 1)])
@pytest.mark.parametrize("name", ["h2o", "tova"])
def test_every_step_moves_the_scores_by_which_pages_are_evicted(
    given: Heads, name: str, window: int, sinks: int, page: int
) -> None:
    """With pages of one token this is the papers' own loop."""
    q, k, _ = given
    scale = q.shape[-1] ** -0.5
    weights = causal_weights(q[:, :PROMPT], k[:, :PROMPT], scale)
    heavy = name == "h2o"
    score = of_groups(weights.sum(1) if heavy else weights[:, -1], len(k)) * (len(q) // len(k))
    formula = Stepwise(
        q,
        k,
        scale=scale,
        prompt=PROMPT,
        sinks=sinks,
        window=window,
        page=page,
        room=29,
        score=score,
        move=(lambda old, mass: old + mass) if heavy else (lambda _, mass: mass),
        decide=(lambda scores: scores) if heavy else (lambda s: np.broadcast_to(s.sum(0), s.shape)),
    )
    budget = sinks + window + 29
    tested = method(name, page, sink_tokens=sinks, window_tokens=window, budget_tokens=budget)
    driven = run(tested, given, page=page)
    for step, kept in enumerate(driven.steps):
        assert kept_sets(kept, len(k)) == formula.step(PROMPT + step), step


@pytest.mark.parametrize("name", ["h2o", "tova"])
def test_a_token_that_was_cut_off_leaves_no_score_behind(given: Heads, name: str) -> None:
    """Its position is written anew, as assisted decoding does when a guess was wrong."""
    tested = method(name, window_tokens=32, budget_tokens=62)
    driven = run(tested, given, new=4)
    q, k, _ = given
    near = torch.arange(PROMPT - 32, PROMPT + 1)
    lse = (q[:, PROMPT].unflatten(0, (len(k), -1)) @ k[:, near].mT).logsumexp(-1)
    step = Attended(
        q[None, :, PROMPT : PROMPT + 1],
        lse.view(1, -1, 1),
        [driven.kept],
        [PROMPT + 1],
        1.0,
        None,
        lambda _: (k[:, near], near),
    )
    kept = tested.after(0, step)
    assert kept is not None
    assert kept[0] is not None
    again = of_window(kept[0].state, near, len(k))
    mass = step.window_mass(0)[0]
    torch.testing.assert_close(again[:, -1], mass[:, -1])
    if name == "h2o":
        assert (again[:, :-1] > mass[:, :-1]).all()


def test_heads_that_hold_different_numbers_go_on_with_their_best() -> None:
    """Where a crop has left them so."""
    rows = torch.randn(2, 6, 8)
    scores = torch.tensor([[1.0, 9.0, 3.0, 7.0, 5.0, 8.0], [4.0, 2.0, 6.0, 0.0, 0.0, 0.0]])
    every = Entries.of(rows, rows, torch.arange(6), score=scores)
    kept = every.select([torch.arange(6), torch.arange(2)])
    left = Entries.of(rows[:, :1], rows[:, :1], torch.tensor([6]))
    new = method("h2o", window_tokens=16, budget_tokens=30).absorb(0, 0, kept, left, None)
    assert kept_sets(new, 2) == [{1, 5, 6}, {0, 1, 6}]


def test_tova_needs_no_window(given: Heads) -> None:
    driven = run(method("tova", 1, budget_tokens=29), given, page=1)
    assert all(kept is not None and set(kept.lengths) == {29} for kept in driven.steps)


def test_tova_keeps_the_same_tokens_in_all_heads_and_h2o_does_not(given: Heads) -> None:
    num_heads = len(given[1])
    same = kept_sets(run(method("tova", budget_tokens=60), given).kept, num_heads)
    assert all(head == same[0] for head in same)
    if num_heads > 1:
        own = kept_sets(
            run(method("h2o", window_tokens=32, budget_tokens=60), given).kept, num_heads
        )
        assert any(head != own[0] for head in own)


def test_sampled_prompt_scores_are_near_the_exact_ones(given: Heads) -> None:
    """All queries sampled are the exact sums; a third of them choose most of the same tokens."""
    num_heads = len(given[1])
    kept = {}
    for count in (PROMPT, PROMPT // 3):
        tested = method(
            "h2o",
            window_tokens=32,
            budget_tokens=96,
            prompt_scores="sampled",
            sampled_queries=count,
        )
        kept[count] = kept_sets(run(tested, given, new=1).kept, num_heads)
    exact = method("h2o", window_tokens=32, budget_tokens=96)
    expected = kept_sets(run(exact, given, new=1).kept, num_heads)
    assert kept[PROMPT] == expected
    shared = sum(len(a & b) for a, b in zip(kept[PROMPT // 3], expected, strict=True))
    assert 0.6 * 64 * num_heads < shared


@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize("prompt", [5, 37, 173])
def test_a_full_budget_and_a_cold_tier_lose_nothing(name: str, prompt: int) -> None:
    window = {"window_tokens": 32}
    opened = method(name, **window)
    opened.params = type(opened).full_budget(opened.params)
    offloading = method(name, budget_tokens=49, demote="offload", **window)
    dropping = method(name, budget_tokens=49, **window)
    rounding = TOLERANCES[torch.float32]["atol"]
    for tested in (opened, offloading):
        driven = drive(tested, prompt=prompt, num_layers=LAYERS)
        assert not driven.lost.any()
        assert max(driven.error) < rounding
    assert drive(dropping, prompt=173, num_layers=LAYERS).lost.any()


@pytest.mark.parametrize("name", EVICTING)
def test_memory_is_that_of_what_is_kept(name: str) -> None:
    """Not of the prompt, and no room beyond what an answer may need."""
    driven = drive(
        method(name, sink_tokens=0, window_tokens=32, budget_tokens=96), prompt=601, new=1
    )
    kept = driven.kept
    assert kept is not None
    score = {"h2o": 4, "tova": 4, "a2sf": 4, "d2o": 4, "scissorhands": 8}.get(name, 0)
    per_entry = 2 * 72 * 4 + 8 + score
    entries = 2 * 64 * per_entry
    state = score * 2 * 33 + 4
    assert sum(kept.lengths) == 2 * 64
    assert entries <= kept.nbytes <= entries + 2 * state + 64


@pytest.mark.parametrize("name", EVICTING)
def test_evicted_entries_go_where_demote_says(name: str) -> None:
    dropping = method(name)
    place = dropping.seal(0, [])
    assert (place.rest, place.offload, place.index) == (Demotion.ABSORB, False, None)
    assert dropping.read(0, torch.zeros(1)).cold is None
    offloading = method(name, demote="offload", cold={"top_k": 9, "index": {"kind": "flat"}})
    place = offloading.seal(0, [])
    assert (place.rest, place.offload) == (Demotion.ABSORB, True)
    assert place.index is not None
    assert offloading.read(0, torch.zeros(1)).cold == hybrid_kv.types.TokenBudget(9)
    opened = type(offloading).full_budget(offloading.params)
    assert (opened.cold.top_k, opened.budget_tokens) == ("all", 1024)


def test_evidence_is_asked_for_what_scores_and_for_the_index_that_finds_the_rest() -> None:
    assert method("snapkv", observed_tokens=19).needs == Needs(last_queries=19)
    assert method("tova").needs == Needs(last_queries=1)
    assert method("h2o").needs == Needs(column_sums=True)
    sampled = method("h2o", prompt_scores="sampled", sampled_queries=77)
    assert sampled.needs == Needs(sampled_queries=77)
    graph = method("retrieval_attention").needs
    both = method("snapkv", demote="offload").needs
    assert both == graph | Needs(last_queries=32)
    assert both != graph or graph.last_queries >= 32


@pytest.mark.parametrize("name", EVICTING)
def test_an_index_takes_memory_only_where_there_is_one(name: str) -> None:
    shape = hybrid_kv.types.LayerShape(0, 6, 2, 72)
    assert method(name).index_bytes_per_token(shape, 1000) == 0
    offloading = method(name, demote="offload")
    graph = method("retrieval_attention").index_bytes_per_token(shape, 1000)
    assert offloading.index_bytes_per_token(shape, 1000) == graph > 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"budget_tokens": 32}, "budget_tokens must be more than the 32 of sink_tokens and"),
        ({"cold": {"top_k": 7}}, "cold must be left out with demote 'drop'"),
        ({"pool_tokens": 6}, "pool_tokens: must be odd, got 6"),
        ({"demote": "forget"}, "demote: input should be 'drop' or 'offload', got 'forget'"),
        ({"window_tokens": 40}, "window_tokens must be a multiple of page_size 16, got 40"),
    ],
)
def test_a_wrong_setting_is_refused_with_a_sentence(
    settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        method("snapkv", **settings)


def test_all_of_them_are_registered_and_say_what_they_drop() -> None:
    for name in EVICTING:
        assert "DROPS the rest" in METHODS[name].summary
        assert METHODS[name].paper
