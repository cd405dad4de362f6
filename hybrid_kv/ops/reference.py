"""Plain torch arithmetic that defines what every back end must compute.

Scores and sums are float32 whatever the inputs are; log-sum-exp is natural.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hybrid_kv.masses import logits_of
from hybrid_kv.types import KEY_BLOCK, BlockMask, PagedKV, PartialAttention

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


def attend_visible(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    newest: Tensor,
    *,
    new: int,
    scale: float,
    softcap: float | None = None,
    attend: Callable[..., PartialAttention] = attend,
) -> PartialAttention:
    """Attention of every query over the entries at its own position and before.

    Args:
        q: [B, H, M, D], M = G * T with row g * T + t.
        k, v: [B, H, N, D].
        positions: [B, N] int64 of the entries.
        newest: [B] int64 position of each row's newest token; the others come before it.
        new: T.
        attend: what attends with a bias.

    Returns:
        out [B, H, M, D], lse [B, H, M].
    """
    of_queries = newest[:, None] + torch.arange(1 - new, 1, device=positions.device)
    hidden = positions[:, None] > of_queries[:, :, None]
    bias = torch.zeros(hidden.shape, device=positions.device).masked_fill_(hidden, -torch.inf)
    bias = bias.repeat(1, q.shape[2] // new, 1)[:, None]
    return attend(q, k, v, scale=scale, softcap=softcap, bias=bias)


def attend_retrieved(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    attend: Callable[..., PartialAttention] = attend,
) -> PartialAttention:
    """Attention of every query over entries of its own, which are gathered.

    Args:
        q: [H, M, D].
        k, v: [H, N, D].
        ids: [H, M, K] int64 rows of k and v; a negative id is none.
        bias: [H, M, K] float32, added to the logits; None for none.
        attend: what attends the gathered entries.

    Returns:
        out [H, M, D], lse [H, M].
    """
    heads = torch.arange(len(ids), device=ids.device)[:, None, None]
    rows = ids.clamp_min(0)
    added = torch.zeros(ids.shape, device=ids.device) if bias is None else bias
    added = added.masked_fill(ids < 0, -torch.inf)[:, :, None]
    part = attend(
        q[:, :, None], k[heads, rows], v[heads, rows], scale=scale, bias=added, softcap=softcap
    )
    return PartialAttention(part.out[:, :, 0], part.lse[:, :, 0])


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
    attend: Callable[..., PartialAttention] = attend,
) -> PartialAttention:
    """Attention of every query over the rows of its KV head, of which each has its own number.

    Args:
        q: [H, M, D].
        k, v: [N, D] rows of all heads.
        starts, lengths: [H]; head h has the rows starts[h] : starts[h] + lengths[h].
        bias: [N] float32, added to the logits.
        attend: what attends the rows of one head.

    Returns:
        out [H, M, D], lse [H, M]; 0 and -inf for a head without rows.
    """
    outs, lses = [], []
    for head, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        rows = slice(start, start + length)
        part = attend(
            *(q[head][None, None], k[rows][None, None], v[rows][None, None]),
            scale=scale,
            softcap=softcap,
            bias=None if bias is None else bias[rows][None, None, None],
        )
        outs.append(part.out[0, 0])
        lses.append(part.lse[0, 0])
    return PartialAttention(torch.stack(outs), torch.stack(lses))


def attend_pages(
    q: Tensor,
    pages: PagedKV,
    slots: Tensor,
    query_positions: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    count: Tensor | None = None,
    attend: Callable[..., PartialAttention] = attend,
) -> PartialAttention:
    """Attention of each KV head over pages of its own, each query up to its own position.

    Args:
        q: [Hkv, M, D], M = G * T with row g * T + t.
        slots: [Hkv, T, C] int64 slots of `pages`, each once in a list.
        query_positions: [T] int64.
        count: [1] int64, how many of each list are attended, from its begin; None for all.
        attend: what attends the gathered entries.

    Returns:
        out [Hkv, M, D] and lse [Hkv, M] float32.
    """
    if count is not None:
        slots = slots[..., : int(count)]
    heads, new, _ = slots.shape
    head = torch.arange(heads, device=slots.device)[:, None, None]
    k, v = (tensor[head, slots].flatten(2, 3) for tensor in (pages.k, pages.v))
    hidden = pages.positions[slots].flatten(2) > query_positions[None, :, None]
    bias = torch.zeros(hidden.shape, device=q.device).masked_fill_(hidden, -torch.inf)
    # [Hkv, G, T, D] -> [Hkv, T, G, D]: the query heads of a group share the pages of a token.
    by_token = q.unflatten(1, (-1, new)).transpose(1, 2)
    out, lse = attend(by_token, k, v, scale=scale, softcap=softcap, bias=bias[:, :, None])
    return PartialAttention(
        out.transpose(1, 2).reshape(q.shape), lse.transpose(1, 2).reshape(q.shape[:2])
    )


def merge(parts: Sequence[PartialAttention], dtype: torch.dtype) -> PartialAttention:
    """Attention over the union of disjoint parts (at least one), by log-sum-exp.

    Source: online softmax (Milakov and Gimelshein 2018), as in RetrievalAttention, section 3.3.

    Args:
        parts: out [..., D] of any float dtype, lse [...], -inf where a part is empty.

    Returns:
        out [..., D] in `dtype`, computed in float32; lse [...] float32. Where every part is empty
        the result is empty, never NaN.
    """
    lse = torch.stack([part.lse.float() for part in parts])
    total = torch.logsumexp(lse, 0)
    # Where every part is empty, total is -inf and the weights would be NaN; 0 makes them exp(-inf).
    weights = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))
    out = torch.zeros_like(parts[0].out, dtype=torch.float32)
    for weight, part in zip(weights, parts, strict=True):
        out.addcmul_(weight[..., None], part.out.float())
    return PartialAttention(out.to(dtype), total)


def nearest_keys(queries: Tensor, keys: Tensor, count: int) -> Tensor:
    """Exact keys with the highest dot products.

    Args:
        queries: [H, Q, D]; keys: [H, N, D].
        count: K, at most N.

    Returns:
        Ids [H, Q, K] int32, best first; which of equal keys come back is not specified.
    """
    found = torch.empty(*queries.shape[:2], count, dtype=torch.int32, device=queries.device)
    block = max(1, _SCORE_BLOCK_BYTES // max(1, 4 * keys.shape[0] * keys.shape[1]))
    keys = keys.float().transpose(-1, -2)
    for start in range(0, queries.shape[1], block):
        some = queries[:, start : start + block].float()
        found[:, start : start + block] = torch.matmul(some, keys).topk(count, -1).indices
    return found


# Block-sparse prefill: attention over key blocks, and its choice ----------------------------------

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
