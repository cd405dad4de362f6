"""The native engine (C++ in `native/`), entered through ctypes, which releases the GIL.

Here is what the dispatch needs: whether the engine serves some tensors, and its ops on tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_kv.ops.native.attend import (
    FEW_QUERIES,
    Visible,
    attend_prompt,
    attend_ragged,
    attend_retrieved,
    attend_rows,
    merge,
    serves,
    serves_merge,
)
from hybrid_kv.ops.native.library import engine_state
from hybrid_kv.ops.native.pages import PageDigests, PageWriter
from hybrid_kv.ops.native.step import LayerPlan
from hybrid_kv.ops.native.workers import Pool
from hybrid_kv.types import PartialAttention

__all__ = [
    "LayerPlan",
    "PageWriter",
    "Visible",
    "attend",
    "attend_causal",
    "attend_prompt",
    "attend_ragged",
    "attend_retrieved",
    "attend_rows",
    "attend_visible",
    "attend_with_masses",
    "engine_state",
    "merge",
    "page_scores",
    "serves",
    "serves_merge",
]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    bias: None = None,
    softcap: float | None = None,
    pool: Pool | None = None,
) -> PartialAttention:
    """See `reference.attend`; without a bias. Out of many queries is in their dtype."""
    if q.shape[2] <= FEW_QUERIES:
        return attend_rows(q, k, v, scale=scale, softcap=softcap, pool=pool)
    return attend_prompt(q, k, v, scale=scale, softcap=softcap, causal=False, pool=pool)


def attend_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    pool: Pool | None = None,
) -> PartialAttention:
    """See `reference.attend_causal`. Out of many queries is in their dtype."""
    batch, num_heads, new, dim = q.shape
    heads, stored = k.shape[1:3]
    if not new or window is not None or num_heads * new > FEW_QUERIES * heads:
        return attend_prompt(q, k, v, scale=scale, softcap=softcap, window=window, pool=pool)
    grouped = q.reshape(batch, heads, num_heads // heads * new, dim)
    visible = Visible(torch.arange(stored).expand(batch, -1), [stored - 1] * batch, new)
    part = attend_rows(grouped, k, v, scale=scale, softcap=softcap, visible=visible, pool=pool)
    shape = *q.shape[:3], v.shape[3]
    return PartialAttention(part.out.reshape(shape), part.lse.reshape(q.shape[:3]))


def attend_with_masses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    pool: Pool | None = None,
) -> tuple[PartialAttention, Tensor]:
    """See `AttentionOps.attend_with_masses`; out in the dtype of q."""
    masses = torch.empty(*q.shape[:2], k.shape[2])
    part = attend_prompt(q, k, v, scale=scale, softcap=softcap, masses=masses, pool=pool)
    return part, masses


def attend_visible(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    newest: Sequence[int],
    *,
    new: int,
    scale: float,
    softcap: float | None = None,
    pool: Pool | None = None,
) -> PartialAttention:
    """See `reference.attend_visible`; for few queries."""
    visible = Visible(positions, newest, new)
    return attend_rows(q, k, v, scale=scale, softcap=softcap, visible=visible, pool=pool)


def page_scores(q: Tensor, key_min: Tensor, key_max: Tensor, *, pool: Pool | None = None) -> Tensor:
    """See `reference.page_scores`."""
    return PageDigests(key_min, key_max).scores(q.float(), pool=pool)
