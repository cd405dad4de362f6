"""ShadowKV's landmarks, by loops over chunks in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybrid_kv.config import IndexConfig

DIM, SIZE = 72, 8


def chosen(keys: np.ndarray, queries: np.ndarray, top_k: int, outliers: int) -> set[int]:
    """Tokens that the queries [G, D] of a KV head read of its keys [N, D]."""
    chunks = [keys[a : a + SIZE] for a in range(0, len(keys), SIZE)]
    marks = np.stack([chunk.mean(0) for chunk in chunks])
    wanted = min(-(-top_k // SIZE), len(chunks))

    def worst(c: int) -> float:
        norms = np.linalg.norm(chunks[c], axis=1) * np.linalg.norm(marks[c])
        return float((chunks[c] @ marks[c] / norms).min())

    whole = range(len(keys) // SIZE)
    always = sorted(whole, key=lambda c: (worst(c), c))[:outliers][: wanted // 2]
    logits = queries @ marks.T / DIM**0.5
    weights = np.exp(logits - logits.max(1, keepdims=True))
    best = (weights / weights.sum(1, keepdims=True)).max(0)
    others = sorted(set(range(len(chunks))) - set(always), key=lambda c: -best[c])
    pages = [*always, *others[: wanted - len(always)]]
    return {n for c in pages for n in range(c * SIZE, min((c + 1) * SIZE, len(keys)))}


@pytest.mark.parametrize("outliers", [0, 2, 48])
@pytest.mark.parametrize("count", [9, 37, 203])
@pytest.mark.parametrize("top_k", [1, 40, 500])
def test_chunks_are_chosen_by_landmarks_behind_outliers(
    outliers: int, count: int, top_k: int
) -> None:
    draw = torch.Generator().manual_seed(count)
    keys = torch.randn(2, count + 5, DIM, generator=draw) + torch.randn(DIM, generator=draw)
    queries = 2 * torch.randn(2, 3, DIM, generator=draw)  # far from one weight by head of the group
    index = IndexConfig(kind="landmarks", outlier_chunks=outliers).build()
    index.build(keys[:, :count].contiguous(), None)
    for rows in (count, count + 5):
        known = keys[:, :rows].contiguous()
        if rows > count:
            index.add(known)
        most = -(-rows // SIZE) * SIZE
        found = index.search(queries, top_k, max(top_k, most))
        for h in range(2):
            read = chosen(keys[h, :rows].double().numpy(), queries[h].double().numpy(), top_k, 0)
            if outliers and rows == count:
                read = chosen(
                    keys[h, :rows].double().numpy(), queries[h].double().numpy(), top_k, outliers
                )
            if outliers and rows > count:
                continue  # outliers are those of the build
            for ids in found.ids[h]:
                assert set(ids[ids >= 0].tolist()) == read


def test_outliers_are_those_of_the_build_and_are_read_by_every_query() -> None:
    draw = torch.Generator().manual_seed(1)
    keys = 1 + torch.randn(1, 160, DIM, generator=draw) / 10
    keys[0, 83] = -keys[0, 83]
    index = IndexConfig(kind="landmarks", outlier_chunks=1).build()
    index.build(keys, None)
    assert index.memory_bytes > 0
    grown = torch.cat([keys, keys], 1)
    grown[0, 200] = -grown[0, 200]
    index.add(grown)
    for query in torch.randn(7, 1, 2, DIM, generator=draw):
        ids = index.search(query, 4 * SIZE, 4 * SIZE).ids
        assert all(set(range(80, 88)) <= set(row.tolist()) for row in ids[0])
