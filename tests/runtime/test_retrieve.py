"""What a query attends of the cold tier, held against scores computed one product at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import IndexConfig
from hybrid_kv.runtime.retrieve import Retrieved, retrieve
from hybrid_kv.store import ColdStore
from hybrid_kv.types import LayerShape, TokenBudget

SHAPE = LayerShape(0, 6, 2, 12)
SCALE = 0.4


def store(lengths: list[int], **index: Any) -> tuple[ColdStore, Tensor]:
    """Row 0 in one extent per length, and its keys [Hkv, N, D]."""
    cold = ColdStore(SHAPE, torch.float32, 1)
    keys = torch.randn(2, sum(lengths), 12)
    start = 0
    for length in lengths:
        part = keys[:, start : start + length]
        positions = torch.arange(start, start + length)
        cold.append(0, part, part, positions, IndexConfig(**index).build)
        cold.fork([0, 0])  # shared from now on, so that the next part begins a new extent
        start += length
    return cold, keys


def attended(found: Retrieved, lengths: list[int]) -> list[list[set[int]]]:
    """Rows of the whole key array that each query of each head attends."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    heads, queries, _ = found.parts[0][1].shape
    sets: list[list[set[int]]] = [[set() for _ in range(queries)] for _ in range(heads)]
    for start, (_, ids) in zip(starts, found.parts, strict=True):
        for head in range(heads):
            for query in range(queries):
                mine = ids[head, query]
                sets[head][query] |= {start + int(i) for i in mine[mine >= 0]}
    return sets


def expected(
    queries: Tensor, keys: Tensor, budget: TokenBudget, softcap: float | None = None
) -> list[list[set[int]]]:
    logits = SCALE * torch.einsum("hmd,hnd->hmn", queries.double(), keys.double())
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    sets = []
    for of_head in logits:
        best = [row.topk(min(budget.most, len(row))) for row in of_head]
        beta = torch.inf if budget.beta is None else budget.beta
        sets.append([set(b.indices[b.values >= b.values[0] - beta].tolist()) for b in best])
    return sets


@pytest.mark.parametrize("lengths", [[97], [40, 57], [3, 90, 4]])
@pytest.mark.parametrize("beta", [0.0, 0.9, 2.1, 1e6, None])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_beta_counts_logits_from_the_best_of_all_extents(
    lengths: list[int], beta: float | None, softcap: float | None
) -> None:
    cold, keys = store(lengths, kind="flat")
    queries, budget = torch.randn(2, 5, 12), TokenBudget(31, 60, beta)
    found = retrieve(cold, 0, queries, budget, scale=SCALE, softcap=softcap)
    wanted = expected(queries, keys, budget, softcap)
    assert attended(found, lengths) == wanted
    counts = [len(ids) for of_head in wanted for ids in of_head]
    assert found.counted() == (sum(counts), max(counts))


def test_entries_that_the_row_has_lost_do_not_count_as_the_best() -> None:
    cold, keys = store([97], kind="flat")
    queries = torch.randn(2, 1, 12)
    keys_of_row = keys[:, :60]
    cold.rows[0][0].extent.k[:, 80] = 50 * queries[:, 0]
    cold.truncate(0, 60)
    budget = TokenBudget(20, 40, 1.0)
    found = retrieve(cold, 0, queries, budget, scale=SCALE)
    assert attended(found, [60]) == expected(queries, keys_of_row, budget)


@pytest.mark.parametrize(
    "index", [{"kind": "flat", "precision": "int8"}, {"kind": "graph"}, {"kind": "pages"}]
)
def test_the_search_widens_until_the_bound_or_the_last_entry_within_beta(
    index: dict[str, Any],
) -> None:
    cold, keys = store([397], **index)
    queries = torch.randn(2, 3, 12)
    all_of_them = TokenBudget(2, 397, 1e6)
    found = retrieve(cold, 0, queries, all_of_them, scale=SCALE)
    assert attended(found, [397]) == expected(queries, keys, all_of_them)
    bounded = retrieve(cold, 0, queries, TokenBudget(2, 90, 1e6), scale=SCALE)
    assert bounded.counted() == (6 * 90, 90)
    once = retrieve(cold, 0, queries, TokenBudget(2, 397, 0.0), scale=SCALE)
    assert once.counted() == (6 * 1, 1)
    assert once.scored < bounded.scored < found.scored


def test_a_fixed_budget_searches_once() -> None:
    cold, _ = store([397], kind="flat", precision="int8")
    queries = torch.randn(2, 3, 12)
    fixed = retrieve(cold, 0, queries, TokenBudget(9), scale=SCALE)
    whole = retrieve(cold, 0, queries, TokenBudget(9, 397), scale=SCALE)
    assert fixed.counted() == (6 * 9, 9)
    assert whole.counted() == (6 * 41, 41), "9 and the 32 that are ranked to be safe"
    assert whole.scored == fixed.scored
