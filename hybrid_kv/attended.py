"""Attention of a decode step, for methods that follow the attention weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_kv.entries import Entries
from hybrid_kv.masses import logits_of


@dataclass(frozen=True, slots=True)
class Attended:
    """A decode step of one layer that has been computed; its weights are computed when asked for.

    q: [B, Hq, T, D]. lse: [B, Hq, T] float32, over all that the step attended.
    kept: by row what the method kept, as the step attended it.
    lengths: by row the tokens stored, the T new ones included.
    scale, softcap: what turns a score into a logit.
    window: gives a row's resident keys [Hkv, W, D] and their positions [W], HIDDEN where a slot is
        empty.
    """

    q: Tensor
    lse: Tensor
    kept: Sequence[Entries | None]
    lengths: Sequence[int]
    scale: float
    softcap: float | None
    window: Callable[[int], tuple[Tensor, Tensor]]

    def mass(self, row: int) -> Tensor:
        """[capacity] float32, flat as the entries kept: the softmax weights that each got.

        Summed over the query heads of its KV head and the T new tokens; 0 in room for growing.
        Nothing is waited for.
        """
        kept = self.kept[row]
        if kept is None:
            return torch.zeros(0, device=self.q.device)
        masses = torch.zeros(len(kept.positions), device=kept.positions.device)
        dense = kept.dense(masses)
        weights = self.weights(row)
        if isinstance(weights, Tensor) and dense is not None:
            dense.copy_(weights.sum(1))
            return masses
        for into, head in zip(kept.split(masses), weights, strict=True):
            into.copy_(head.sum(0))
        return masses

    def weights(self, row: int) -> Tensor | Sequence[Tensor]:
        """Softmax weights that each of the M = G * T queries of a KV head gave to what is kept.

        [Hkv, M, N] float32 where heads keep equally many; by KV head [M, N_h] where they do not.
        """
        kept = self.kept[row]
        if kept is None:
            return torch.zeros(0, 0, 0, device=self.q.device)
        q, lse = self._grouped(row, kept.num_heads)
        k = kept.read()[0]
        keys = kept.dense(k)
        if keys is not None:
            return self._weights(q, lse, keys, None if kept.bias is None else kept.dense(kept.bias))
        biases = [None] * kept.num_heads if kept.bias is None else kept.split(kept.bias)
        heads = zip(q, lse, kept.split(k), biases, strict=True)
        return [self._weights(*head) for head in heads]

    def window_mass(self, row: int) -> tuple[Tensor, Tensor]:
        """Masses [Hkv, W] float32 of a row's resident entries, the new tokens included, and their
        positions [W].

        Summed as in `mass`; 0 where a slot is empty, whose position is HIDDEN.
        """
        weights, positions = self.window_weights(row)
        return weights.sum(1), positions

    def window_weights(self, row: int) -> tuple[Tensor, Tensor]:
        """As `weights`, [Hkv, M, W], of a row's resident entries, and their positions [W]."""
        keys, positions = self.window(row)
        new = self.q.shape[2]
        asked = torch.arange(self.lengths[row] - new, self.lengths[row], device=positions.device)
        weights = self._weights(*self._grouped(row, len(keys)), keys).unflatten(1, (-1, new))
        return weights.masked_fill_(positions > asked[:, None], 0.0).flatten(1, 2), positions

    def _grouped(self, row: int, num_kv_heads: int) -> tuple[Tensor, Tensor]:
        """Queries [Hkv, M, D] and their log-sum-exp [Hkv, M], M = G * T with row g * T + t."""
        dim = self.q.shape[-1]
        q, lse = self.q[row], self.lse[row]
        return q.reshape(num_kv_heads, -1, dim), lse.reshape(num_kv_heads, -1)

    def _weights(self, q: Tensor, lse: Tensor, keys: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., M, N] softmax weights of q [..., M, D] over keys [..., N, D]."""
        logits = logits_of(q, keys, scale=self.scale, softcap=self.softcap)
        if bias is not None:
            logits += bias[..., None, :]
        return logits.sub_(lse[..., None]).exp_()
