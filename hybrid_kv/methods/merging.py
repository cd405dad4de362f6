"""What methods share that merge what they drop into what they keep."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid_kv.entries import Entries

_BLOCK_NUMBERS = 2**24


def left_out(chosen: Tensor, count: int) -> Tensor:
    """[Hkv, count - K] of `count` places, in order, those not among chosen [Hkv, K]."""
    gone = torch.ones(len(chosen), count, dtype=torch.bool, device=chosen.device)
    gone.scatter_(1, chosen, value=False)
    order = gone.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
    return order[:, : count - chosen.shape[1]]


def nearest(gone: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Of keys gone [H, n, D] the most alike of kept [H, m, D], by cosine: its places, the cosines.

    Both [H, n]; of equals the first.
    """
    unit, others = F.normalize(kept.float(), dim=-1), F.normalize(gone.float(), dim=-1)
    rows = max(1, _BLOCK_NUMBERS // max(1, kept.shape[0] * kept.shape[1]))
    found = [(some @ unit.mT).max(-1) for some in others.split(rows, 1)]
    return torch.cat([one.indices for one in found], 1), torch.cat([one.values for one in found], 1)


def merged(
    kept: Entries,
    gone: Entries,
    into: Tensor,
    own: Tensor,
    weights: Tensor,
    total: Tensor | None = None,
) -> Entries:
    """Kept entries, to each of which a weighted sum of others is added.

    Keys and values become (own * kept + sum of weights * gone) / total, in float32.

    Args:
        kept, gone: as many for all heads. into: [H, n] places among the kept of those gone.
        own: [H, m] weights of the kept. weights: [H, n] of those gone, 0 for one that is lost.
        total: [H, m]; None for own + sum of weights.
    """
    if total is None:
        total = own.scatter_add(1, into, weights)
    columns = {}
    for name in ("k", "v"):
        old, others = (torch.stack(one.split(name)).float() for one in (kept, gone))
        sums = old * own[..., None]
        sums.scatter_add_(1, into[..., None].expand_as(others), others * weights[..., None])
        new = kept.columns[name].clone()
        for rows, head in zip(kept.split(new), sums / total[..., None], strict=True):
            rows.copy_(head)
        columns[name] = new
    return kept.with_columns(**columns)
