"""Plain torch arithmetic that defines what every back end must compute.

Scores and sums are float32 whatever the inputs are; log-sum-exp is natural.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_kv.types import PartialAttention

_SCORE_BLOCK_BYTES = 64 * 2**20


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> PartialAttention:
    """Attention of every query over one set of entries.

    Args:
        q: [B, H, M, D], M may be 0.
        k, v: [B, H, N, D], N may be 0.
        bias: float, broadcastable to [B, H, M, N]; added to the logits, -inf hides an entry.
        softcap: logits become `softcap * tanh(logit / softcap)` before the bias (Gemma 2).

    Returns:
        out [B, H, M, D] float32 and lse [B, H, M] float32.
    """
    batch, heads, rows, _ = q.shape
    if bias is not None:
        bias = bias.expand(batch, heads, rows, k.shape[2])
    block = max(1, _SCORE_BLOCK_BYTES // max(1, 4 * batch * heads * k.shape[2]))
    k, v = k.float(), v.float()
    outs, lses = [], []
    for start in range(0, max(1, rows), block):
        stop = min(rows, start + block)
        logits = torch.matmul(q[:, :, start:stop].float() * scale, k.transpose(-1, -2))
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if bias is not None:
            logits = logits + bias[:, :, start:stop]
        out, lse = _softmax_sum(logits, v)
        outs.append(out)
        lses.append(lse)
    return PartialAttention(torch.cat(outs, 2), torch.cat(lses, 2))


def _softmax_sum(logits: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if logits.shape[-1] == 0:
        shape = logits.shape[:-1]
        return v.new_zeros(*shape, v.shape[-1]), v.new_full(shape, -torch.inf)
    # A row that sees nothing has maximum -inf; subtracting 0 instead keeps it at weight 0, not NaN.
    top = logits.amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    out = torch.matmul(weights, v) / total.clamp_min(torch.finfo(torch.float32).tiny)
    return out, (total.log() + top).squeeze(-1)


def attend_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> PartialAttention:
    """Causal attention of the last T positions over all N, aligned at the lower right.

    Args:
        q: [B, Hq, T, D], the queries of the last T of the N positions; T may be 0.
        k, v: [B, Hkv, N, D], N >= T, oldest first; query head h reads KV head h // (Hq / Hkv).
        window: a query sees this many newest positions up to its own (sliding-window layers).

    Returns:
        out [B, Hq, T, D] float32 and lse [B, Hq, T] float32.
    """
    batch, num_q_heads, new, dim = q.shape
    num_kv_heads, stored = k.shape[1], k.shape[2]
    group = num_q_heads // num_kv_heads
    grouped = q.reshape(batch, num_kv_heads, group, new, dim)
    key_pos = torch.arange(stored, device=q.device)
    block = max(1, _SCORE_BLOCK_BYTES // max(1, 4 * batch * num_q_heads * stored))
    if window is not None:
        block = max(block, window)  # at most two windows of keys are scored per block
    outs, lses = [], []
    for start in range(0, max(1, new), block):
        stop = min(new, start + block)
        query_pos = key_pos[stored - new + start : stored - new + stop]
        # No query of the block sees keys outside first..last.
        last = stored - new + stop
        first = 0 if window is None else max(0, last - (stop - start) - window + 1)
        hidden = key_pos[None, first:last] > query_pos[:, None]
        if window is not None:
            hidden |= key_pos[None, first:last] <= query_pos[:, None] - window
        bias = torch.zeros(hidden.shape, device=q.device).masked_fill(hidden, -torch.inf)
        rows = grouped[:, :, :, start:stop].flatten(2, 3)
        out, lse = attend(
            rows,
            k[:, :, first:last],
            v[:, :, first:last],
            scale=scale,
            bias=bias.repeat(group, 1),
            softcap=softcap,
        )
        outs.append(out.reshape(batch, num_q_heads, stop - start, dim))
        lses.append(lse.reshape(batch, num_q_heads, stop - start))
    return PartialAttention(torch.cat(outs, 2), torch.cat(lses, 2))


def page_digests(k: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest value per channel of each page: k [..., S, D] -> two of [..., D].

    Source: Quest (Tang et al. 2024), section 3.3.
    """
    return k.amin(-2), k.amax(-2)


def page_scores(q: Tensor, key_min: Tensor, key_max: Tensor) -> Tensor:
    """Upper bound of q . k over the keys of each page.

    Args:
        q: [..., M, D].
        key_min, key_max: [..., P, D].

    Returns:
        [..., M, P] float32; never below any score of the page (Quest, section 3.3).
    """
    q = q.float()
    # max(q*lo, q*hi) per channel = relu(q)*hi - relu(-q)*lo: two products instead of [M, P, D].
    high = torch.matmul(q.clamp_min(0), key_max.float().transpose(-1, -2))
    low = torch.matmul(q.clamp_max(0), key_min.float().transpose(-1, -2))
    return high + low
