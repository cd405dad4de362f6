"""Definitions of block-sparse prefill: attention over key blocks, and what chooses these.

Scores and sums are float32 whatever the inputs are; log-sum-exp is natural.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hybrid_kv.masses import logits_of
from hybrid_kv.ops.reference import attend
from hybrid_kv.types import KEY_BLOCK, BlockMask, PartialAttention

SCORE_BYTES = 64 * 2**20


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    *,
    scale: float,
    softcap: float | None = None,
) -> PartialAttention:
    """`reference.attend_causal` over the key blocks of a mask: block-sparse attention.

    Args:
        q: [B, Hq, T, D], k, v: [B, Hkv, N, D], as there.
    """
    batch, new = q.shape[0], q.shape[2]
    num_kv_heads, old = k.shape[1], k.shape[2] - new
    out = torch.zeros(*q.shape[:3], v.shape[3], device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, device=q.device)
    group = q.shape[1] // num_kv_heads if num_kv_heads else 0
    by_group = (batch, num_kv_heads, group)
    grouped = q.reshape(*by_group, *q.shape[2:])
    outs, lses = out.view(*by_group, *out.shape[2:]), lse.view(*by_group, new)
    for block, first in enumerate(range(0, new, mask.tokens)):
        last, past = min(new, first + mask.tokens), (old + first) // KEY_BLOCK
        own = torch.arange(past * KEY_BLOCK, old + last, device=q.device)
        for row in range(batch):
            for head in range(num_kv_heads):
                blocks = mask.listed[row, head, block, :past].nonzero()
                inside = torch.arange(KEY_BLOCK, device=q.device)
                ids = torch.cat([(blocks * KEY_BLOCK + inside).flatten(), own])
                hidden = ids > torch.arange(old + first, old + last, device=q.device)[:, None]
                bias = torch.zeros(hidden.shape, device=q.device).masked_fill(hidden, -torch.inf)
                part = attend(
                    grouped[row, head, :, first:last][None],
                    *(t[row, head, ids].expand(1, group, -1, -1) for t in (k, v)),
                    scale=scale,
                    bias=bias,
                    softcap=softcap,
                )
                outs[row, head, :, first:last] = part.out[0]
                lses[row, head, :, first:last] = part.lse[0]
    return PartialAttention(out, lse)


def attend_at(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> PartialAttention:
    """Causal attention of some tokens of a prompt: each sees the entries up to its own.

    Args:
        q: [B, Hq, M, D]. k, v: [B, Hkv, N, D], oldest first, as in `reference.attend_causal`.
        positions: [M] int64 places of the queries among the entries, ascending.
    """
    out = torch.empty(*q.shape[:3], v.shape[3], device=q.device)
    lse = torch.empty(q.shape[:3], device=q.device)
    for head, heads, rows, logits in _logits(q, k, positions, scale, softcap):
        lse[:, heads, rows] = logits.logsumexp(-1)
        weights = logits.softmax(-1).flatten(1, 2)
        mixed = torch.matmul(weights, v[:, head].float())
        out[:, heads, rows] = mixed.unflatten(1, logits.shape[1:3])
    return PartialAttention(out, lse)


def _logits(
    q: Tensor, k: Tensor, positions: Tensor, scale: float, softcap: float | None
) -> Iterator[tuple[int, slice, slice, Tensor]]:
    """Logits [B, G, m, N] of some of the queries at a time, -inf behind each, with the KV head and
    the slices of query heads and queries.
    """
    num_kv_heads, stored = k.shape[1:3]
    group = q.shape[1] // max(1, num_kv_heads)
    some = max(1, SCORE_BYTES // max(1, 4 * q.shape[0] * group * stored))
    places = torch.arange(stored, device=q.device)
    for head in range(num_kv_heads):
        heads, keys = slice(head * group, (head + 1) * group), k[:, head].float()
        for start in range(0, q.shape[2], some):
            rows = slice(start, start + some)
            asked = q[:, heads, rows]
            logits = logits_of(asked.flatten(1, 2), keys, scale=scale, softcap=softcap)
            hidden = places > positions[rows, None]
            logits = logits.unflatten(1, asked.shape[1:3]).masked_fill_(hidden, -torch.inf)
            yield head, heads, rows, logits


def block_masses(
    q: Tensor, k: Tensor, positions: Tensor, *, scale: float, softcap: float | None = None
) -> Tensor:
    """[B, Hq, M, N // KEY_BLOCK] float32 softmax weights that each whole key block got from each
    query of `attend_at`.
    """
    blocks = k.shape[2] // KEY_BLOCK
    masses = torch.empty(*q.shape[:3], blocks, device=q.device)
    for _, heads, rows, logits in _logits(q, k, positions, scale, softcap):
        whole = logits.softmax(-1)[..., : blocks * KEY_BLOCK]
        masses[:, heads, rows] = whole.unflatten(-1, (blocks, KEY_BLOCK)).sum(-1)
    return masses
