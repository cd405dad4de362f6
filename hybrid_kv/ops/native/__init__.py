"""The native engine (C++ in `native/`), entered through ctypes, which releases the GIL.

Here is what the dispatch needs: whether the engine serves some tensors, and its ops on tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_kv.ops.native import attend as _attend
from hybrid_kv.ops.native.attend import RetrievedAttention, Visible
from hybrid_kv.ops.native.library import engine, engine_state
from hybrid_kv.ops.native.pages import PageDigests
from hybrid_kv.ops.native.rows import DTYPES, is_readable
from hybrid_kv.ops.native.workers import pool_here
from hybrid_kv.types import PartialAttention

__all__ = [
    "Visible",
    "attend_ragged",
    "attend_retrieved",
    "attend_rows",
    "engine_state",
    "merge",
    "page_scores",
    "serves",
    "serves_merge",
]


def serves(k: Tensor, v: Tensor) -> bool:
    """Whether the engine is there and reads [..., N, D], two of one dtype, where they lie."""
    return (
        k.is_cpu
        and k.dtype == v.dtype
        and k.dtype in DTYPES
        and is_readable(k)
        and is_readable(v)
        and engine() is not None
    )


def attend_retrieved(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> PartialAttention:
    """See `Ops.attend_retrieved`; out and lse are float32."""
    attention = RetrievedAttention(k, v)
    return attention.attend(q, ids, scale=scale, softcap=softcap, bias=bias, pool=pool_here())


def attend_ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
    *,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> PartialAttention:
    """See `Ops.attend_ragged`; out and lse are float32."""
    return _attend.attend_ragged(
        *(q, k, v, starts, lengths), scale=scale, softcap=softcap, bias=bias, pool=pool_here()
    )


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    visible: Visible | None = None,
) -> PartialAttention:
    """See `Ops.attend` and `Ops.attend_visible`; out and lse are float32."""
    return _attend.attend_rows(
        q, k, v, scale=scale, softcap=softcap, visible=visible, pool=pool_here()
    )


def serves_merge(parts: Sequence[PartialAttention], dtype: torch.dtype) -> bool:
    """Whether the engine is there and merges parts of these dtypes."""
    for out, lse in parts:
        if not (out.is_cpu and out.dtype in DTYPES and lse.dtype == torch.float32):
            return False
    return dtype in DTYPES and engine() is not None


def merge(parts: Sequence[PartialAttention], dtype: torch.dtype) -> PartialAttention:
    """See `Ops.merge`."""
    return _attend.merge(parts, dtype, pool=pool_here())


def page_scores(q: Tensor, key_min: Tensor, key_max: Tensor) -> Tensor:
    """See `Ops.page_scores`."""
    return PageDigests(key_min, key_max).scores(q.float(), pool=pool_here())
