"""Attention in float64, one logit at a time: what partial results are held against."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [..., M, D] and lse [..., M] in float64; a row that sees nothing gets 0 and -inf.

    Args:
        q: [..., M, D].
        k, v: [..., N, D].
        visible: bool, broadcastable to [..., M, N].
        bias: added to the logits after the softcap.
    """
    logits = torch.einsum("...md,...nd->...mn", q.double(), k.double()) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.double()
    if visible is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    if logits.shape[-1] == 0:
        return torch.zeros_like(q, dtype=torch.float64), logits.new_full(q.shape[:-1], -torch.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("...mn,...nd->...md", weights, v.double()), lse
