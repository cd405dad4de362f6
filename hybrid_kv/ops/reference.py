"""Plain torch arithmetic that defines what every back end must compute.

Scores and sums are float32 whatever the inputs are; log-sum-exp is natural.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybrid_kv.types import HIDDEN, PagedKV, PartialAttention

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


def choose_pages(
    q: Tensor,
    key_min: Tensor,
    key_max: Tensor,
    *,
    new: int,
    oldest: int,
    newest: int,
    count: int,
    page_scores: Callable[[Tensor, Tensor, Tensor], Tensor] = page_scores,
) -> Tensor:
    """Pages that the query heads of a KV head attend together: pinned ones and the best others.

    A page is as good as its best query head says. Source: Quest, algorithm 1, with one list for
    each KV head and token.

    Args:
        q: [Hkv, M, D], M = G * T with row g * T + t.
        key_min, key_max: [Hkv, P, D], oldest page first.
        new: T.
        oldest, newest: how many pages at the two ends are always chosen; newest is at least 1.
        count: C, at least oldest + newest, at most P.
        page_scores: what bounds the pages.

    Returns:
        [Hkv, T, C] int64 indices into P; the newest page, which may be filled in part, comes last.
    """
    scores = page_scores(q, key_min, key_max)
    shared = scores.unflatten(1, (-1, new)).amax(1)
    return best_pages(shared, oldest, newest, count)


def listed_page_scores(
    q: Tensor, key_min: Tensor, key_max: Tensor, table: Tensor, numbers: Tensor, oldest: int
) -> Tensor:
    """Scores of the pages of a table for one new token, by what the device is told of it.

    Args:
        q: [Hkv, G, D].
        key_min, key_max: [Hkv, slots, D], the digests of all pages of the pool.
        table: [C] int64 slots of the row's pages, oldest first; behind them there is anything.
        numbers: [5] int64: place and position of the token, pages in the table, how many of them
            are always chosen as the newest ones, how many are chosen in all.
        oldest: how many pages at the begin of the table are always chosen.

    Returns:
        [Hkv, 1, C] float32: inf where a page is always chosen, -inf behind the table's pages.
    """
    pages, newest = int(numbers[2]), int(numbers[3])
    scores = page_scores(q, key_min[:, table[:pages]], key_max[:, table[:pages]])
    shared = scores.amax(1, keepdim=True)
    shared[..., :oldest] = torch.inf
    shared[..., pages - newest :] = torch.inf
    return torch.nn.functional.pad(shared, (0, len(table) - pages), value=-torch.inf)


def append_at(pages: PagedKV, k: Tensor, v: Tensor, numbers: Tensor, table: Tensor) -> None:
    """Stores one token's k, v [Hkv, D] by numbers, keeps its page's digest, and lists its page.

    Args:
        numbers, table: see `listed_page_scores`; the page becomes the last one of the table.
    """
    place, position, listed = numbers[:1], numbers[1:2], int(numbers[2])
    append(pages, k[:, None], v[:, None], place, position)
    slot = place // pages.k.shape[2]
    update_digests(pages, slot)
    table[listed - 1 : listed] = slot


def best_pages(scores: Tensor, oldest: int, newest: int, count: int) -> Tensor:
    """The choice of `choose_pages` from scores [Hkv, T, P], which it overwrites."""
    last = scores.shape[-1] - 1
    scores[..., :oldest] = torch.inf
    scores[..., last + 1 - newest :] = torch.inf
    chosen = scores[..., :last].topk(count - 1, -1, sorted=False).indices
    return torch.nn.functional.pad(chosen, (0, 1), value=last)


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


def append(pages: PagedKV, k: Tensor, v: Tensor, places: slice | Tensor, positions: Tensor) -> None:
    """Stores new tokens; their pages' digests are left as they are.

    Args:
        k, v: [Hkv, n, D].
        places: the tokens' `slot * S + offset`, n of them; a page is filled from its first slot on.
        positions: [n].
    """
    heads, _, _, dim = pages.k.shape
    pages.k.view(heads, -1, dim)[:, places] = k
    pages.v.view(heads, -1, dim)[:, places] = v
    pages.positions.view(-1)[places] = positions


def update_digests(pages: PagedKV, slots: Tensor) -> None:
    """Writes key_min and key_max of slots [n] from the keys that are filled there."""
    if pages.key_min is None or pages.key_max is None:
        return
    empty = (pages.positions[slots] == HIDDEN)[None, :, :, None]
    keys = pages.k[:, slots]
    # An unfilled slot takes part in neither bound: the first slot of a used page is filled.
    lows, highs = page_digests(torch.where(empty, keys[:, :, :1], keys))
    pages.key_min[:, slots], pages.key_max[:, slots] = lows, highs


def copy_pages(
    source: PagedKV, target: PagedKV, source_slots: Tensor, target_slots: Tensor
) -> None:
    """Copies K and V of pages into another pool of the same dtype; its places are free.

    Args:
        source: on the device of the target, or on the host.
        source_slots, target_slots: [Hkv, C] int64; a pair with a negative one is left out.
    """
    wanted = (source_slots >= 0) & (target_slots >= 0)
    head, column = wanted.nonzero(as_tuple=True)
    from_, to = source_slots[head, column], target_slots[head, column]
    for old, new in ((source.k, target.k), (source.v, target.v)):
        rows = old[head.to(old.device), from_.to(old.device)]
        new[head.to(new.device), to.to(new.device)] = rows.to(new.device)


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
