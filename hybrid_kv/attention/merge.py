"""Exact merge of partial attentions by log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_kv.errors import ShapeError
from hybrid_kv.types import PartialAttention


def merge_partials(parts: Sequence[PartialAttention]) -> PartialAttention:
    """Attention over the union of disjoint parts.

    The parts must not share an entry; who names the parts answers for that. Source: online softmax
    (Milakov and Gimelshein 2018), as used in RetrievalAttention, section 3.3.

    Args:
        parts: at least one; out [..., D] of any float dtype, lse [...] natural log, -inf where a
            part is empty.

    Returns:
        out [..., D] in the dtype of the first part, computed in float32; lse [...] float32. Merging
        only empty parts gives an empty part, never NaN.

    Raises:
        ShapeError: no parts, or parts of different shapes.
    """
    if not parts:
        raise ShapeError("parts must hold at least one partial attention, got none")
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts:
        if part.out.shape != first.out.shape or part.lse.shape != part.out.shape[:-1]:
            raise ShapeError(
                f"parts must have out {tuple(first.out.shape)} and lse without its last axis, "
                f"got out {tuple(part.out.shape)} and lse {tuple(part.lse.shape)}"
            )
    lse = torch.stack([part.lse.float() for part in parts])
    total = torch.logsumexp(lse, 0)
    # Where every part is empty, total is -inf and the weights would be NaN; 0 makes them exp(-inf).
    weights = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))
    out = torch.zeros_like(first.out, dtype=torch.float32)
    for weight, part in zip(weights, parts, strict=True):
        out.addcmul_(weight[..., None], part.out.float())
    return PartialAttention(out.to(first.out.dtype), total)


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
