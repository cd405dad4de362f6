"""What is chosen at the prompt's end beside SnapKV's own kin: by formulas, with sets and loops."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hybrid_kv.errors import ConfigError
from hybrid_kv.models.weight_kinds import find_outputs
from hybrid_kv.types import LayerShape, ModelInfo
from tests.drive_method import drive
from tests.methods.eviction import (
    PROMPT,
    Array,
    Heads,
    Kept,
    ada,
    causal_weights,
    kept_sets,
    method,
    run,
    snap_scores,
    top,
    whole,
)

WINDOW, LAYERS = 32, 5


def mean_scores(given: Heads, **settings: Any) -> Array:
    q, k, _ = given
    weights = causal_weights(q[:, :PROMPT], k[:, :PROMPT], q.shape[-1] ** -0.5)
    return snap_scores(weights, len(k), window=WINDOW, observed=32, pool=7, **settings)


def output_norms(given: Heads, output: Tensor | None) -> Array:
    """[Hkv, N] L1 norms of values, or of what they add to the output by a query head on average."""
    q, _, v = (one.double().numpy() for one in given)
    if output is None:
        return np.abs(v).sum(-1)
    group, dim = len(q) // len(v), q.shape[-1]
    weight = output.double().numpy()
    found = np.zeros(v.shape[:2])
    for h in range(len(q)):
        added = v[h // group] @ weight[:, h * dim : (h + 1) * dim].T
        found[h // group] += np.abs(added).sum(-1) / group
    return found


def critical(scores: Array, norms: Array, budgets: list[int], ratio: float, sinks: int) -> Kept:
    found = []
    for head, norm, budget in zip(scores, norms, budgets, strict=True):
        sure = top(head, int(ratio * budget), range(sinks, len(head)))
        others = [n for n in range(sinks, len(head)) if n not in sure]
        weighed = (head + 1e-4) * norm[: len(head)]
        found.append(sure | set(sorted(others, key=lambda n: -weighed[n])[: budget - len(sure)]))
    return found


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("weighting", ["values", "projected"])
def test_criticalkv_fills_a_share_by_weights_and_the_rest_by_what_values_add(
    given: Heads, weighting: str, ratio: float
) -> None:
    q, k, _ = given
    output = torch.randn(88, len(q) * q.shape[-1])
    tested = method("snapkv", budget_tokens=83, value_weighting=weighting, sure_ratio=ratio)
    driven = run(tested, given, new=1, outputs=output)
    norms = output_norms(given, output if weighting == "projected" else None)
    scores, budget = mean_scores(given), 83 - WINDOW
    expected = critical(scores, norms, [budget] * len(k), ratio, 0)
    assert kept_sets(driven.kept, len(k)) == expected
    plain = run(method("snapkv", budget_tokens=83), given, new=1)
    assert (kept_sets(plain.kept, len(k)) == expected) == (ratio == 1)


def test_heads_that_share_weigh_values_within_their_own_budgets(given: Heads) -> None:
    tested = method("ada_snapkv", budget_tokens=83, sink_tokens=16, value_weighting="values")
    scores, heads = mean_scores(given), len(given[1])
    budgets = [len(head) for head in ada(scores, 83 - WINDOW - 16, 16, 0.5)]
    expected = critical(scores, output_norms(given, None), budgets, 0.5, 16)
    assert kept_sets(run(tested, given, new=1).kept, heads) == expected


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "ada_snapkv", "ada_pyramid", "headkv"])
def test_all_that_score_as_snapkv_can_weigh_values(given: Heads, name: str) -> None:
    heads = len(given[1])
    kept = [
        kept_sets(
            run(method(name, budget_tokens=83, value_weighting=how), given, new=1).kept, heads
        )
        for how in ("none", "values")
    ]
    assert kept[0] != kept[1]
    assert [len(head) for head in kept[0]] == [len(head) for head in kept[1]]


def test_an_output_projection_that_is_not_known_is_asked_for() -> None:
    tested = method("pyramidkv", value_weighting="projected")
    assert tested.needs.outputs
    assert not method("pyramidkv", value_weighting="values").needs.outputs
    with pytest.raises(ConfigError, match="must know the output projection of layer 0 as a plain"):
        drive(tested)


def test_output_projections_are_those_of_the_model() -> None:
    class Attention(nn.Module):
        def __init__(self, idx: int, part: nn.Module) -> None:
            super().__init__()
            self.layer_idx, self.o_proj = idx, part

    parts = [nn.Linear(432, 88), nn.Linear(432, 88, device="meta"), nn.Linear(430, 88)]
    model = nn.ModuleList(Attention(idx, part) for idx, part in enumerate([*parts, nn.ReLU()]))
    info = ModelInfo(tuple(LayerShape(idx, 6, 2, 72) for idx in range(5)))
    found = find_outputs(model, info)  # type: ignore[arg-type]
    assert found[0] is not None
    assert found[0].data_ptr() == parts[0].weight.data_ptr()
    assert found[1:] == (None,) * 4


def head_budgets(scores: list[list[float]], even: int, beta: float) -> list[list[int]]:
    every = [Fraction(score) for layer in scores for score in layer]
    pool = Fraction(even) / Fraction(beta)
    shares = [even - pool + pool * len(every) * one / sum(every) for one in every]
    flat = iter(whole(shares, even * len(every)))
    return [[next(flat) for _ in layer] for layer in scores]


@pytest.mark.parametrize("beta", [1.0, 1.25, 4.0])
def test_headkv_gives_heads_budgets_by_their_scores(given: Heads, beta: float) -> None:
    heads = len(given[1])
    importance = [[0.125 * (1 + (layer + h) % 3) for h in range(heads)] for layer in range(LAYERS)]
    budgets = head_budgets(importance, 51, beta)
    assert sum(map(sum, budgets)) == 51 * heads * LAYERS
    scores = mean_scores(given)
    for layer_idx in range(LAYERS):
        tested = method("headkv", budget_tokens=83, heads=importance, beta=beta)
        driven = run(tested, given, new=1, layer_idx=layer_idx, num_layers=LAYERS)
        expected = [
            top(head, budget, range(len(head)))
            for head, budget in zip(scores, budgets[layer_idx], strict=True)
        ]
        assert kept_sets(driven.kept, heads) == expected


def test_headkv_reads_its_scores_from_a_file_or_from_the_prompt(
    tmp_path: Path, given: Heads
) -> None:
    heads = len(given[1])
    path = tmp_path / "heads.json"
    path.write_text(json.dumps({"heads": [[0.25 * (h + 1) for h in range(heads)]]}))
    driven = run(method("headkv", budget_tokens=83, heads=str(path)), given, new=1)
    assert driven.kept is not None
    expected = head_budgets([[0.25 * (h + 1) for h in range(heads)]], 51, 1.2)
    assert [list(driven.kept.lengths)] == expected
    prompt = run(method("headkv", budget_tokens=83), given, new=1).kept
    assert prompt is not None
    sums = [float(head.sum()) for head in mean_scores(given)]
    assert [list(prompt.lengths)] == head_budgets([sums], 51, 1.2)
    with pytest.raises(ConfigError, match="must be a JSON file of scores by layer, got none"):
        drive(method("headkv", heads="nowhere.json"))


def test_a_head_keeps_no_more_than_there_is() -> None:
    driven = drive(method("headkv", budget_tokens=102, heads=[[1.0, 0.0]], beta=1.0))
    assert driven.kept is not None
    assert len([at for at in driven.kept.split("positions")[0] if at < 173 - 32]) == 140


@pytest.mark.parametrize("sinks", [0, 16])
@pytest.mark.parametrize("ratio", [0.02, 0.3, 0.7, 0.95, 1.0])
def test_zipvl_keeps_what_holds_so_much_of_a_layers_attention(
    given: Heads, ratio: float, sinks: int
) -> None:
    q, k, _ = given
    weights = causal_weights(q[:, :PROMPT], k[:, :PROMPT], q.shape[-1] ** -0.5)
    mass = weights[:, -64:].sum((0, 1))
    first = PROMPT - WINDOW
    ranked = sorted(range(sinks, first), key=lambda n: (-mass[n], n))
    held, kept = mass[:sinks].sum() + mass[first:].sum(), set()
    for n in ranked:
        if held >= ratio * mass.sum() and ratio < 1:
            break
        held += mass[n]
        kept.add(n)
    driven = run(method("zipvl", mass_ratio=ratio, sink_tokens=sinks), given, new=1)
    assert kept_sets(driven.kept, len(k)) == [kept] * len(k)
    few = run(method("zipvl", mass_ratio=ratio, sink_tokens=sinks, budget_tokens=83), given, new=1)
    some = set(ranked[: min(len(kept), 83 - WINDOW - sinks)])
    assert kept_sets(few.kept, len(k)) == [some] * len(k)


def test_zipvl_with_an_open_budget_keeps_everything() -> None:
    opened = method("zipvl", budget_tokens=83)
    opened.params = type(opened).full_budget(opened.params)
    assert not drive(opened).lost.any()


def unlike_the_mean(k: Tensor) -> Array:
    """[Hkv, N] of keys [Hkv, N, D]: how unlike the mean of the unit keys each is."""
    keys = k.double().numpy()
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    anchor = unit.mean(1)
    return -np.einsum("hnd,hd->hn", unit, anchor / np.linalg.norm(anchor, axis=-1)[:, None])


@pytest.mark.parametrize("sinks", [0, 16])
def test_keydiff_keeps_the_keys_that_are_least_like_their_mean(given: Heads, sinks: int) -> None:
    tested = method("keydiff", budget_tokens=83, sink_tokens=sinks)
    scores = unlike_the_mean(given[1][:, :PROMPT])[:, : PROMPT - WINDOW]
    expected = [top(head, 83 - WINDOW - sinks, range(sinks, len(head))) for head in scores]
    assert kept_sets(run(tested, given, new=1).kept, len(given[1])) == expected
