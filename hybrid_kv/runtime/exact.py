"""Exact attention of many new tokens over everything stored: prefill and long later turns."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_kv.attention import attend, attend_causal, group_queries, merge_partials
from hybrid_kv.ops import Ops
from hybrid_kv.store import LayerKV, Row
from hybrid_kv.transfer import Executor
from hybrid_kv.types import PartialAttention


def attend_exact(
    ops: Ops,
    executor: Executor,
    layer: LayerKV,
    q: Tensor,
    valid: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> PartialAttention:
    """Causal attention of the newest tokens, already appended, over both tiers.

    Args:
        q: [B, Hq, T, D].
        valid: [B, T] bool, False for padding; None where there is none. Padding gets out 0.

    Returns:
        out [B, Hq, T, D], lse [B, Hq, T].
    """
    untouched = not any(row.gone_tokens for row in layer.rows)
    if valid is None and untouched and layer.resident.in_order:
        view = layer.resident.view()
        return attend_causal(ops, q, view.k, view.v, scale=scale, softcap=softcap)
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    for number, row in enumerate(layer.rows):
        new = slice(None) if valid is None else valid[number]
        part = _attend_row(ops, executor, row, q[number][:, new], scale, softcap)
        out[number][:, new], lse[number][:, new] = part.out.to(out.dtype), part.lse
    return PartialAttention(out, lse)


def _attend_row(
    ops: Ops,
    executor: Executor,
    row: Row,
    q: Tensor,
    scale: float,
    softcap: float | None,
) -> PartialAttention:
    # Table order is the order of positions and the new tokens are its end, so causality holds by
    # place; all cold entries are older than every new token.
    k, v = row.table.view()
    parts = [attend_causal(ops, q[None], k[None], v[None], scale=scale, softcap=softcap)]
    grouped = group_queries(q[None], k.shape[0])
    for span in () if row.shadows else row.chain.spans:
        far = (executor.to_device(t[None], q.device) for t in span.extent.first(span.length))
        part = attend(ops, grouped, *far, scale=scale, softcap=softcap)
        shape = parts[0].out.shape
        parts.append(PartialAttention(part.out.reshape(shape), part.lse.reshape(shape[:-1])))
    # What the method keeps of offloaded entries are copies: the originals are attended.
    offloads = row.placement is not None and row.placement.offloads and not row.shadows
    if row.kept is not None and not offloads:
        from hybrid_kv.runtime.kept import attend_entries

        kept = row.kept.seen_from(row.length - q.shape[1])
        part = attend_entries(ops, grouped[0], kept, scale, softcap)
        shape = parts[0].out.shape
        parts.append(PartialAttention(part.out.reshape(shape), part.lse.reshape(shape[:-1])))
    out, lse = merge_partials(parts)
    return PartialAttention(out[0], lse[0])
