"""Stateless attention: partial results over parts of the entries, and their exact merge."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_kv.errors import ShapeError
from hybrid_kv.ops import Ops
from hybrid_kv.types import PartialAttention


def group_queries(q: Tensor, num_kv_heads: int) -> Tensor:
    """[B, Hq, T, D] -> [B, Hkv, M, D], M = G * T with row g * T + t; a view where q allows it."""
    batch, num_q_heads, new, dim = q.shape
    if num_q_heads % num_kv_heads:
        raise ShapeError(
            f"query heads must be a multiple of the {num_kv_heads} KV heads, got {num_q_heads}"
        )
    return q.reshape(batch, num_kv_heads, num_q_heads // num_kv_heads * new, dim)


def attend(
    ops: Ops,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> PartialAttention:
    """Every grouped query over every entry of its KV head.

    Args:
        q: [B, Hkv, M, D].
        k, v: [B, Hkv, N, D]; N = 0 gives an empty part.
        bias: additive logits, broadcastable to [B, Hkv, M, N].
    """
    if k.shape[2] == 0:
        return empty_partial(q)
    return ops.attend(q, k, v, scale=scale, bias=bias, softcap=softcap)


def attend_causal(
    ops: Ops, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None
) -> PartialAttention:
    """The newest T positions over all N, each up to itself.

    Args:
        q: [B, Hq, T, D].
        k, v: [B, Hkv, N, D] oldest first, N >= T.

    Returns:
        out [B, Hq, T, D], lse [B, Hq, T].
    """
    new, stored = q.shape[2], k.shape[2]
    if stored < new:
        raise ShapeError(f"k must hold the {new} new positions at least, got {stored}")
    if new == 1:  # nothing is hidden from the newest token
        grouped = group_queries(q, k.shape[1])
        out, lse = ops.attend(grouped, k, v, scale=scale, softcap=softcap)
        return PartialAttention(out.reshape(q.shape), lse.reshape(q.shape[:3]))
    return ops.attend_causal(q, k, v, scale=scale, softcap=softcap)


def merge_partials(
    parts: Sequence[PartialAttention],
    *,
    dtype: torch.dtype | None = None,
    ops: Ops | None = None,
) -> PartialAttention:
    """Attention over the union of disjoint parts.

    The parts must not share an entry; who names the parts answers for that.

    Args:
        parts: at least one; out [..., D] of any float dtype, lse [...] natural log, -inf where a
            part is empty.
        dtype: of out; that of the first part if None.
        ops: what computes it; the best back end if None.

    Returns:
        out [..., D] in `dtype`, computed in float32; lse [...] float32. Merging only empty parts
        gives an empty part, never NaN.

    Raises:
        ShapeError: no parts, or parts of different shapes.
    """
    if not parts:
        raise ShapeError("parts must hold at least one partial attention, got none")
    first = parts[0]
    dtype = dtype or first.out.dtype
    if len(parts) == 1:
        return PartialAttention(first.out.to(dtype), first.lse)
    for part in parts:
        if part.out.shape != first.out.shape or part.lse.shape != part.out.shape[:-1]:
            raise ShapeError(
                f"parts must have out {tuple(first.out.shape)} and lse without its last axis, "
                f"got out {tuple(part.out.shape)} and lse {tuple(part.lse.shape)}"
            )
    return (ops or Ops()).merge(parts, dtype)


def empty_partial(like: Tensor) -> PartialAttention:
    """The part that changes nothing when merged, for queries `like` [..., D]."""
    lse = torch.full(like.shape[:-1], -torch.inf, dtype=torch.float32, device=like.device)
    return PartialAttention(torch.zeros_like(like), lse)


def apply_sink(part: PartialAttention, sink_logits: Tensor) -> Tensor:
    """Output with one learned sink logit per query head in the softmax denominator (gpt-oss).

    Args:
        part: out [B, Hq, T, D], lse [B, Hq, T], already merged.
        sink_logits: [Hq], natural-log units.
    """
    keep = torch.sigmoid(part.lse - sink_logits.float()[None, :, None])
    return part.out * keep[..., None].to(part.out.dtype)
