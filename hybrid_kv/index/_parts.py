"""Heads of one layer that different indexes serve: runs of heads, and results put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hybrid_kv.types import SearchResult


def runs(heads: Iterable[int]) -> list[slice]:
    """Ascending heads as few slices with even steps, so that `keys[slice]` is a view."""
    found: list[list[int]] = []
    for head in heads:
        last = found[-1] if found else []
        if last and (len(last) == 1 or head - last[-1] == last[-1] - last[-2]):
            last.append(head)
        else:
            found.append([head])
    return [slice(run[0], run[-1] + 1, run[1] - run[0] if len(run) > 1 else 1) for run in found]


def joined(
    queries: Tensor, parts: Sequence[tuple[slice | list[int], SearchResult]], rows_read: int | None
) -> SearchResult:
    """What was found for some heads each, for queries [Hkv, M, D]; narrower results are padded."""
    width = max(found.ids.shape[2] for _, found in parts)
    ids = torch.full((*queries.shape[:2], width), -1, dtype=torch.int64)
    scores = torch.full(ids.shape, -torch.inf)
    for heads, found in parts:
        ids[heads, :, : found.ids.shape[2]] = found.ids
        scores[heads, :, : found.ids.shape[2]] = found.scores
    scored = sum(found.scored for _, found in parts)
    read = sum(found.read_bytes or 0 for _, found in parts)
    return SearchResult(ids, scores, scored, rows_read, read_bytes=read)
