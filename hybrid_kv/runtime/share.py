"""Which of the entries that were found are worth attending: by their shares of the softmax.

A share needs everything that is attended beside, sinks and window too: the best cold entry of a
head that looks at its sinks weighs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_kv.types import TokenBudget


def cut(
    logits: Sequence[Tensor], budget: TokenBudget, *, new: int, near: Tensor | None
) -> list[Tensor]:
    """Which entries a budget keeps, by part [Hkv, M, K] bool.

    Args:
        logits: by part [Hkv, M, K] float32 of the entries that were found, -inf for none.
        new: T; query m is that of token m % T, and heads share within a token.
        near: [Hkv, M] log-sum-exp of what is attended beside; None for nothing.
    """
    joined = logits[0] if len(logits) == 1 else torch.cat(list(logits), -1)
    total = joined.logsumexp(-1)
    if near is not None:
        total = torch.logaddexp(total, near)
    # Log shares; a head that found nothing has -inf everywhere, and no total to subtract.
    shares = joined - total.nan_to_num(neginf=0.0)[..., None]
    kept = joined > -torch.inf
    if budget.min_share:
        kept &= shares.exp() >= budget.min_share
    if budget.shared:
        kept &= _best_together(shares.masked_fill(~kept, -torch.inf), budget.top_k, new)
    return list(kept.split([part.shape[-1] for part in logits], -1))


def _best_together(shares: Tensor, top_k: int, new: int) -> Tensor:
    """The best top_k entries a head of each token, on average; [Hkv, M, K] bool."""
    heads, queries, count = shares.shape
    by_token = shares.unflatten(1, (-1, new)).movedim(2, 0)  # [T, Hkv, G, K]
    flat = by_token.flatten(1)
    budget = top_k * heads * (queries // new)
    if budget >= flat.shape[1]:
        return torch.ones_like(shares, dtype=torch.bool)
    kept = torch.zeros_like(flat, dtype=torch.bool)
    kept.scatter_(1, flat.topk(budget, sorted=False).indices, value=True)
    return kept.view(by_token.shape).movedim(0, 2).reshape(heads, queries, count)
