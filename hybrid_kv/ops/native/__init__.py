"""The native engine (C++ in `native/`), entered through ctypes, which releases the GIL.

Here is what the dispatch needs: whether the engine serves some tensors, and its ops on tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hybrid_kv.ops.native.attend import (
    FEW_QUERIES,
    ROW_QUERIES,
    Visible,
    attend_retrieved,
    attend_rows,
    merge,
    serves_merge,
)
from hybrid_kv.ops.native.library import Pool, engine_state
from hybrid_kv.ops.native.rows import PageWriter, serves
from hybrid_kv.ops.native.step import LayerPlan
from hybrid_kv.types import PartialAttention

__all__ = [
    "LayerPlan",
    "PageWriter",
    "Visible",
    "attend",
    "attend_retrieved",
    "attend_rows",
    "attend_visible",
    "engine_state",
    "merge",
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
    if q.shape[2] <= ROW_QUERIES:
        return attend_rows(q, k, v, scale=scale, softcap=softcap, pool=pool)
    from hybrid_kv.ops.native.prompt import attend_prompt

    return attend_prompt(q, k, v, scale=scale, softcap=softcap, causal=False, pool=pool)


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
