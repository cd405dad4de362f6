"""Attention in float64, one logit at a time: what every partial result is held against."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_kv.testing import softmax_attention

__all__ = ["causal", "softmax_attention", "spread"]


def spread(k: Tensor, num_q_heads: int) -> Tensor:
    """[B, Hkv, N, D] -> [B, Hq, N, D]: every query head with a key head of its own."""
    return k.repeat_interleave(num_q_heads // k.shape[1], dim=1)


def causal(new: int, stored: int, window: int | None = None) -> Tensor:
    """[T, N] bool: what the last `new` of `stored` positions see."""
    query = torch.arange(stored - new, stored)[:, None]
    key = torch.arange(stored)[None]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)
