"""Attention over what a method keeps on the device, as one more part."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hybrid_kv.attention import attend, empty_partial
from hybrid_kv.entries import Entries
from hybrid_kv.ops import Ops
from hybrid_kv.runtime.step import Step, stacked
from hybrid_kv.types import PartialAttention


def attend_kept(step: Step) -> list[PartialAttention]:
    """The part of what the method keeps of the rows, [B, Hkv, M, D]; none where it keeps nothing.

    All of it is older than the new tokens, so that nothing is hidden from them.
    """
    rows = step.layer.rows
    if not any(row.kept is not None and any(row.kept.lengths) for row in rows):
        return []
    begin = step.phases.now()
    parts = []
    for row in rows:
        q = step.grouped[row.number]
        if row.kept is None:
            parts.append(empty_partial(q))
        else:
            kept = row.kept.seen_from(row.length - step.new)
            parts.append(attend_entries(step.ops, q, kept, step.scale, step.softcap))
            step.work.attended += sum(row.kept.lengths) * q.shape[1]
            step.work.resident_bytes += row.kept.read_bytes
    step.phases.book("resident_attention", begin)
    return [stacked(parts)]


def attend_entries(
    ops: Ops, q: Tensor, kept: Entries, scale: float, softcap: float | None
) -> PartialAttention:
    """Grouped queries q [Hkv, M, D] over the entries of their KV heads; lse [Hkv, M]."""
    k, v = kept.read()
    bias = kept.bias
    dense_k, dense_v = kept.dense(k), kept.dense(v)
    if dense_k is None or dense_v is None:
        return attend_ragged(
            *(ops, q, k, v, kept.starts, kept.lengths), scale=scale, softcap=softcap, bias=bias
        )
    dense_bias = None if bias is None else kept.dense(bias)
    part = attend(
        *(ops, q[None], dense_k[None], dense_v[None]),
        scale=scale,
        softcap=softcap,
        bias=None if dense_bias is None else dense_bias[None, :, None],
    )
    return PartialAttention(part.out[0], part.lse[0])


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
