"""Partial attention over the shapes in which entries come: shared, causal, ragged."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hybrid_kv.attention.merge import empty_partial, merge_partials
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
    if stored == new or softcap is not None:
        return ops.attend_causal(q, k, v, scale=scale, softcap=softcap)
    # Older entries are visible to all new ones: a rectangle without mask and a causal square.
    old = stored - new
    grouped = group_queries(q, k.shape[1])
    past = ops.attend(grouped, k[:, :, :old], v[:, :, :old], scale=scale)
    past = PartialAttention(past.out.reshape(q.shape), past.lse.reshape(q.shape[:3]))
    return merge_partials([ops.attend_causal(q, k[:, :, old:], v[:, :, old:], scale=scale), past])


def attend_ragged(
    ops: Ops,
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
    """Every grouped query over as many rows as its KV head has.

    Args:
        q: [Hkv, M, D].
        k, v: [N, D], the rows of all heads.
        starts, lengths: by head its first row, and how many it has.
        bias: [N] float32, added to the logits.

    Returns:
        out [Hkv, M, D], lse [Hkv, M].
    """
    if q.shape[1] == 0 or not any(lengths):
        return empty_partial(q)
    return ops.attend_ragged(q, k, v, starts, lengths, scale=scale, softcap=softcap, bias=bias)
