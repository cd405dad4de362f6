"""Softmax masses: how much of the attention of some queries each key gets, exactly.

The same quantity is SnapKV's score (over the last queries of the prompt), H2O's (summed over all
queries) and TOVA's (of one query).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

EachQuery: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Weights [Hkv, G, M, N] of queries at positions [M], changed before they are summed."""

_BLOCK_BYTES = 64 * 2**20


def logits_of(q: Tensor, k: Tensor, *, scale: float, softcap: float | None = None) -> Tensor:
    """[..., M, N] float32 for q [..., M, D] and k [..., N, D], of any float dtypes."""
    logits = torch.matmul(q.float() * scale, k.float().transpose(-1, -2))
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def causal_masses(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    lse: Tensor | None = None,
    positions: Tensor | None = None,
    each: EachQuery | None = None,
) -> Tensor:
    """Summed softmax weights of some queries over all keys, each query up to its own.

    Args:
        q: [Hq, M, D].
        k: [Hkv, N, D], oldest first, N >= M.
        positions: [M] int64 of the queries; None where they are those of the last M positions.
        lse: [Hq, M] natural log, where it is known already; None to compute it.
        each: what is summed in the place of the weights; they are 0 behind a query.

    Returns:
        [Hq, N] float32; a row of weights adds up to M.
    """
    (num_q_heads, new, dim), (num_kv_heads, stored, _) = q.shape, k.shape
    group = num_q_heads // num_kv_heads
    grouped = q.reshape(num_kv_heads, group, new, dim)
    key_idx = torch.arange(stored, device=q.device)
    asked = key_idx[stored - new :] if positions is None else positions.to(q.device)
    masses = torch.zeros(num_kv_heads, group, stored, device=q.device)
    block = max(1, _BLOCK_BYTES // max(1, 4 * num_q_heads * stored))
    keys = k.float()
    for start in range(0, new, block):
        stop = min(new, start + block)
        rows = grouped[:, :, start:stop].flatten(1, 2)
        logits = logits_of(rows, keys, scale=scale, softcap=softcap).unflatten(1, (group, -1))
        logits.masked_fill_(key_idx > asked[start:stop, None], -torch.inf)
        if lse is None:
            weights = logits.softmax(-1)
        else:
            known = lse.view(num_kv_heads, group, new)[:, :, start:stop]
            weights = logits.sub_(known[..., None]).exp_()
        if each is not None:
            weights = each(weights, asked[start:stop])
        masses += weights.sum(2)
    return masses.flatten(0, 1)
