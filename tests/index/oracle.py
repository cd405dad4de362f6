"""Data, the exact answer and the settings that index tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybrid_kv.config import IndexConfig
from hybrid_kv.plugins import INDEXES, Index
from hybrid_kv.types import SearchResult

DIM = 72  # divisible by 8 but not by 16 or 64: the tails of vector loops are exercised
SCORE_TOLERANCE = 2e-4  # float32 sums of products of order 10

# Settings under which an approximate kind looks (nearly) everywhere; a kind that is not named here
# must reach the floor with its defaults.
OPENED: dict[str, dict[str, Any]] = {
    "pages": {"page_size": 1},
    "blocks": {"page_size": 1},
    "lsh": {"num_bits": 1},
    "frames": {"page_size": 1, "shared": False},
    "landmarks": {"page_size": 1, "shared": False, "outlier_chunks": 0},
    "clusters": {"cluster_tokens": 1},
    "query_lists": {"num_centroids": 3, "list_tokens": 4096},
    "query_channels": {"num_channels": DIM},
    "label_channels": {"channel_ratio": 1},
    "pca": {"component_ratio": 1},
    "skewed_channels": {"column_ratio": 1},
    "pq": {"num_parts": 24, "num_bits": 6, "iterations": 3, "rerank": 4},
    "ivf": {"nprobe": 4096},
    "hnsw": {"ef_search": 600},
    "graph": {"min_keys": 1, "check_positions": 4},
    "sketch": {"min_keys": 1, "gain": 0},
    "auto": {"sizes": {"min_keys": 1}},
}
# Kinds whose parameters make an index of another nature are tested as kinds of their own.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "flat-int8": ("flat", {"precision": "int8"}),
    "flat-stored": ("flat", {"precision": "stored"}),
}
# As in their papers these score no more keys than they return; the contract wants some to spare.
RERANKED = ("query_channels", "label_channels", "pca", "skewed_channels", "pq")
VARIANTS |= {kind: (kind, {"rerank": 1.5}) for kind in RERANKED}
KINDS = list(dict.fromkeys([*INDEXES, *VARIANTS]))
RECALL_FLOOR = 0.95


def make(kind: str) -> Index:
    return make_default(kind, **OPENED.get(kind, {}))


def make_default(kind: str, **params: Any) -> Index:
    """An index as it comes, but for what makes a variant."""
    kind, own = VARIANTS.get(kind, (kind, {}))
    index: Index = IndexConfig(kind=kind, **{**own, **params}).build()
    return index


def floor(index: Index) -> float:
    return 1.0 if index.exact else RECALL_FLOOR


def clustered(
    rows: int, *, heads: int = 2, queries: int = 9, offset: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Keys [heads, rows, DIM] in ten clusters around a common offset, and queries that look for
    single keys [heads, queries, DIM].
    """
    centres = torch.randn(heads, 10, DIM)
    which = torch.randint(10, (heads, rows))
    keys = centres[torch.arange(heads)[:, None], which] + 0.5 * torch.randn(heads, rows, DIM)
    target = torch.randint(max(rows, 1), (heads, queries))
    wanted = keys[torch.arange(heads)[:, None], target] if rows else torch.zeros(heads, queries, 1)
    return keys + offset * torch.randn(DIM), wanted + 0.5 * torch.randn(heads, queries, DIM)


def true_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """[heads, M, N] float64, one product at a time."""
    return torch.einsum("hmd,hnd->hmn", queries.double(), keys.double())


def recall(result: SearchResult, queries: Tensor, keys: Tensor, top_k: int) -> float:
    """Share of the best `top_k` scores that were found; ties count whichever key was taken."""
    best = true_scores(queries, keys).topk(min(top_k, keys.shape[1]), -1).values
    return (result.scores >= best[..., -1:] - SCORE_TOLERANCE).double().mean().item()


def check_result(
    result: SearchResult, queries: Tensor, keys: Tensor, top_k: int, most: int | None = None
) -> None:
    """Everything that holds for any kind: shapes, dtypes, order, padding, ids, true scores."""
    rows = keys.shape[1]
    assert result.ids.shape[:2] == queries.shape[:2]
    assert min(top_k, rows) <= result.ids.shape[2] <= min(most or top_k, rows)
    assert result.scores.shape == result.ids.shape
    assert (result.ids.dtype, result.scores.dtype) == (torch.int64, torch.float32)
    found = result.ids >= 0
    assert (found == (result.scores > -torch.inf)).all()
    assert (result.ids >= -1).all()
    assert (result.ids < keys.shape[1]).all()
    assert (result.scores.diff(dim=-1)[found[..., 1:]] <= 0).all(), "best first"
    assert (found.int().diff(dim=-1) <= 0).all(), "padding comes last"
    for row, there in zip(result.ids.flatten(0, 1), found.flatten(0, 1), strict=True):
        assert row[there].unique().numel() == int(there.sum()), "no key is returned twice"
    if keys.shape[1]:
        expected = true_scores(queries, keys).gather(-1, result.ids.clamp_min(0))
        error = (expected - result.scores)[found].abs()
        assert error.numel() == 0 or error.max() < SCORE_TOLERANCE
