"""What a query attends of the cold tier, held against scores computed one product at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import IndexConfig
from hybrid_kv.runtime.cold import counted
from hybrid_kv.store import ColdChain, Retrieved
from hybrid_kv.store.search import retrieve
from hybrid_kv.types import LayerShape, TokenBudget

SHAPE = LayerShape(0, 6, 2, 12)
SCALE = 0.4


def stored(
    lengths: list[int], keys: Tensor | None = None, **index: Any
) -> tuple[ColdChain, Tensor]:
    """A row in one extent per length, and its keys [Hkv, N, D], drawn where none are given."""
    chain, others = ColdChain(SHAPE, torch.float32), list[ColdChain]()
    keys = torch.randn(2, sum(lengths), 12) if keys is None else keys
    for part, positions in zip(
        keys.split(lengths, 1), torch.arange(sum(lengths)).split(lengths), strict=True
    ):
        chain.append(part, part, positions, IndexConfig(**index).build)
        others.append(chain.shared())  # read by others now, so that the next part begins an extent
    return chain, keys


def attended(found: Retrieved, lengths: list[int]) -> list[list[set[int]]]:
    """Rows of the whole key array that each query of each head attends."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    heads, queries, _ = found.parts[0][1].shape
    sets: list[list[set[int]]] = [[set() for _ in range(queries)] for _ in range(heads)]
    for start, (_, ids, *_) in zip(starts, found.parts, strict=True):
        for head in range(heads):
            for query in range(queries):
                mine = ids[head, query]
                sets[head][query] |= {start + int(i) for i in mine[mine >= 0]}
    return sets


def expected(
    queries: Tensor,
    keys: Tensor,
    budget: TokenBudget,
    softcap: float | None = None,
    near: Tensor | None = None,
) -> list[list[set[int]]]:
    logits = SCALE * torch.einsum("hmd,hnd->hmn", queries.double(), keys.double())
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    best = logits.topk(min(budget.most, logits.shape[-1]))
    total = best.values.logsumexp(-1)
    if near is not None:
        total = torch.logaddexp(total, near.double())
    shares = (best.values - total[..., None]).exp()
    kept = shares >= (budget.min_share or 0)
    if budget.shared:
        weighed = shares.masked_fill(~kept, -1).flatten()
        most = min(budget.top_k * queries.shape[0] * queries.shape[1], len(weighed))
        kept &= shares >= weighed.topk(most).values[-1]
    rows = zip(best.indices.flatten(0, 1), kept.flatten(0, 1), strict=True)
    sets = [set(ids[mask].tolist()) for ids, mask in rows]
    count = queries.shape[1]
    return [sets[start : start + count] for start in range(0, len(sets), count)]


@pytest.mark.parametrize("lengths", [[97], [40, 57], [3, 90, 4]])
@pytest.mark.parametrize("min_share", [0.0, 1e-3, 0.02, 0.4, None])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("weight", [None, -2.0, 6.0])
def test_shares_count_what_is_attended_beside(
    lengths: list[int], min_share: float | None, softcap: float | None, weight: float | None
) -> None:
    chain, keys = stored(lengths, kind="flat")
    queries, budget = torch.randn(2, 5, 12), TokenBudget(31, 60, min_share)
    near = None if weight is None else weight + torch.randn(2, 5)
    found = retrieve(chain, queries, budget, scale=SCALE, softcap=softcap, near=lambda: near)
    wanted = expected(queries, keys, budget, softcap, near)
    assert attended(found, lengths) == wanted
    counts = [len(ids) for of_head in wanted for ids in of_head]
    assert counted(found.parts) == (sum(counts), max(counts))


@pytest.mark.parametrize("lengths", [[97], [40, 57]])
@pytest.mark.parametrize("min_share", [None, 0.01])
@pytest.mark.parametrize("most", [None, 17])
def test_heads_that_share_attend_the_best_of_all_of_them(
    lengths: list[int], min_share: float | None, most: int | None
) -> None:
    chain, keys = stored(lengths, kind="flat")
    queries, near = torch.randn(2, 3, 12), torch.tensor([[0.0, 9, 3], [5, -torch.inf, 2]])
    budget = TokenBudget(12, most, min_share, shared=True)
    found = retrieve(chain, queries, budget, scale=SCALE, near=lambda: near)
    assert attended(found, lengths) == expected(queries, keys, budget, near=near)
    total, largest = counted(found.parts)
    assert total <= 12 * 6
    assert largest <= budget.most
    if min_share is None:
        assert total == 12 * 6
        assert largest > 12, "heads have unequal needs"
    assert found.ranked is not None
    assert all((part >= 0).any() for part in found.ranked)


def test_new_tokens_do_not_share_with_each_other() -> None:
    chain, _ = stored([97], kind="flat")
    queries, near = torch.randn(2, 6, 12), 4 * torch.randn(2, 6)  # three heads of two tokens
    budget = TokenBudget(7, shared=True)
    both = retrieve(chain, queries, budget, scale=SCALE, new=2, near=lambda: near)
    for token in range(2):
        own = slice(token, None, 2)
        alone = retrieve(
            chain, queries[:, own], budget, scale=SCALE, near=lambda own=own: near[:, own]
        )
        assert attended(both, [97])[0][own] == attended(alone, [97])[0]
        assert attended(both, [97])[1][own] == attended(alone, [97])[1]


def test_entries_that_the_row_has_lost_do_not_count_as_the_best() -> None:
    queries, keys = torch.randn(2, 1, 12), torch.randn(2, 97, 12)
    keys[:, 80] = 50 * queries[:, 0]
    chain, _ = stored([97], keys, kind="flat")
    chain.truncate(60)
    budget = TokenBudget(20, 40, 0.01)
    found = retrieve(chain, queries, budget, scale=SCALE)
    assert attended(found, [60]) == expected(queries, keys[:, :60], budget)


@pytest.mark.parametrize(
    "index", [{"kind": "flat", "precision": "int8"}, {"kind": "graph"}, {"kind": "pages"}]
)
def test_the_search_widens_until_the_bound_or_the_last_entry_that_weighs(
    index: dict[str, Any],
) -> None:
    chain, keys = stored([397], **index)
    queries = torch.randn(2, 3, 12)
    all_of_them = TokenBudget(2, 397, 0.0)
    found = retrieve(chain, queries, all_of_them, scale=SCALE)
    assert attended(found, [397]) == expected(queries, keys, all_of_them)
    bounded = retrieve(chain, queries, TokenBudget(2, 90, 0.0), scale=SCALE)
    assert counted(bounded.parts) == (6 * 90, 90)
    once = retrieve(chain, queries, TokenBudget(2, 397, 0.9), scale=SCALE)
    assert counted(once.parts)[1] <= 1
    assert once.scored < bounded.scored < found.scored


def test_a_fixed_budget_searches_once() -> None:
    chain, _ = stored([397], kind="flat", precision="int8")
    queries = torch.randn(2, 3, 12)
    fixed = retrieve(chain, queries, TokenBudget(9), scale=SCALE)
    whole = retrieve(chain, queries, TokenBudget(9, 397), scale=SCALE)
    assert counted(fixed.parts) == (6 * 9, 9)
    assert counted(whole.parts) == (6 * 41, 41), "9 and the 32 that are ranked to be safe"
    assert whole.scored == fixed.scored


def test_log_weights_of_what_was_found_count_in_its_shares() -> None:
    """A sample that stands for many entries weighs as much as they do."""
    index = {"kind": "lsh", "num_bits": 4, "num_tables": 9}
    chain, keys = stored([97], **index)
    queries = torch.randn(2, 5, 12)
    sampled = IndexConfig(**index).build()
    sampled.build(keys, None)
    result = sampled.search(queries, 60, 97)
    shares = (SCALE * result.scores + result.bias).softmax(-1)
    lighter = (SCALE * result.scores).softmax(-1)
    assert not torch.equal(shares >= 0.05, lighter >= 0.05)
    found = retrieve(chain, queries, TokenBudget(60, 97, 0.05), scale=SCALE)
    ids = found.parts[0].ids
    assert torch.equal(ids, result.ids.masked_fill(shares < 0.05, -1))
    assert found.parts[0].bias is not None


@pytest.mark.parametrize("lengths", [[97], [40, 57], [3, 90, 4]])
@pytest.mark.parametrize("gone", [0, 11])
@pytest.mark.parametrize("which", ["best", "some", "all but a few", "all"])
@pytest.mark.parametrize("min_share", [None, 0.001])
@pytest.mark.parametrize("new", [1, 2])
def test_copies_take_nobodys_place(
    lengths: list[int], gone: int, which: str, min_share: float | None, new: int
) -> None:
    """Of what a method keeps elsewhere, nothing is found, and as much of the rest as is asked for,
    where copies are what an index finds first, and where a row has lost its last entries too.
    """
    chain, keys = stored(lengths, kind="flat")
    chain.truncate(sum(lengths) - gone)
    keys = keys[:, : sum(lengths) - gone]
    queries = torch.randn(2, 4, 12)
    order = torch.einsum("hmd,hnd->hmn", queries, keys).amax(1).argsort(-1, descending=True)
    count = {"best": 40, "some": 9, "all but a few": keys.shape[1] - 3, "all": keys.shape[1]}[which]
    among = torch.stack([torch.randperm(keys.shape[1]) for _ in keys])
    chosen = (among if which == "some" else order)[:, :count]
    copied = torch.zeros(keys.shape[:2], dtype=torch.bool).scatter_(1, chosen, value=True)
    budget = TokenBudget(top_k=5, min_share=min_share, max_tokens=8 if min_share else None)
    found = retrieve(chain, queries, budget, new=new, scale=SCALE, copied=copied)
    sets = attended(found, lengths[: len(found.parts)])
    logits = SCALE * torch.einsum("hmd,hnd->hmn", queries.double(), keys.double())
    logits = logits.masked_fill(copied[:, None], -torch.inf)
    shares = logits.sort(-1, descending=True)
    for head in range(2):
        left = int((~copied[head]).sum())
        for query in range(4):
            ids = shares.indices[head, query, : min(budget.most, left)]
            weights = logits[head, query, ids].softmax(-1)
            kept = ids if min_share is None else ids[weights >= min_share]
            assert sets[head][query] == set(kept.tolist())
