"""Counts of where decoding looks: the softmax weights of what is attended, added up by position."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_kv.masses import logits_of
from hybrid_kv.types import HIDDEN, PartialAttention
from hybrid_kv.watch.audit import WatchedStep


class Places:
    """Weights of positions, mean over all heads, layers and steps that were seen; for one row.

    Of a row with cold entries those that it attends count, for the others are what every step
    reads; of a row without any all resident ones do.
    """

    def __init__(self) -> None:
        self._weights = torch.zeros(0)
        self._heads = 0

    def wants(self, layer_idx: int, q: Tensor) -> bool:
        """Steps of one token; q [B, Hq, T, D]."""
        return q.shape[2] == 1

    def add(self, step: WatchedStep, part: PartialAttention) -> None:
        """Takes a step of one token, with what it has found, and what it gave."""
        row, q = step.layer.rows[0], step.grouped[0].float()
        lse = part.lse[0].reshape(q.shape[:2])[..., None]
        self._heads += lse.numel()
        how = {"scale": step.scale, "softcap": step.softcap}
        if not row.chain.spans:
            keys, positions = row.resident_keys()
            weights = (logits_of(q, keys, **how) - lse).exp()  # type: ignore[arg-type]
            seen = positions != HIDDEN
            self._book(positions[seen], weights.sum((0, 1))[seen])
            return
        if step.found is not None and 0 in step.found:
            _, found = step.found[0]
            parts = [(part.extent, part.ids) for part in found.parts]
        else:
            every = [torch.arange(span.length).expand(*q.shape[:2], -1) for span in row.chain.spans]
            parts = [(s.extent, ids) for s, ids in zip(row.chain.spans, every, strict=True)]
        for extent, ids in parts:
            there = ids.clamp_min(0)
            heads = torch.arange(len(ids))[:, None, None]
            logits = logits_of(q[:, :, None].cpu(), extent.k[heads, there], **how)[:, :, 0]  # type: ignore[arg-type]
            weights = (logits - lse.cpu()).exp().masked_fill(ids < 0, 0)
            self._book(extent.positions[there].flatten(), weights.flatten())

    def _book(self, positions: Tensor, weights: Tensor) -> None:
        if not len(positions):
            return
        longest = int(positions.max()) + 1
        if longest > len(self._weights):
            grown = torch.zeros(max(longest, 2 * len(self._weights)))
            grown[: len(self._weights)] = self._weights
            self._weights = grown
        self._weights.index_add_(0, positions.cpu().long(), weights.cpu())

    def heaviest(self, count: int, below: int) -> list[tuple[int, float]]:
        """Positions before `below` with their weights, the heaviest first."""
        weights = self._weights[:below] / max(1, self._heads)
        values, positions = weights.topk(min(count, len(weights)))
        pairs = zip(positions.tolist(), values.tolist(), strict=True)
        return [(position, weight) for position, weight in pairs if weight > 0]
