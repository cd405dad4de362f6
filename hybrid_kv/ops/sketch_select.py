"""Selection by sketch where the queries are, in torch: what the kernels are held to.

Keys lie in host memory; their codes (`hybrid_kv.ops.sketch_codes`, a row of bytes for each key) and
the keys that came after the codes were made lie on the device of the queries. A search estimates
the score that some rank has from a part of the codes, takes every key above it for any query head
of the group, and ranks those exactly by the stored keys. No shape hangs on what is found, and
nothing is asked of the device: the calls can be recorded once and played again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_kv.ops.devices import staged
from hybrid_kv.ops.sketch_codes import SketchPlan, dims_per_line
from hybrid_kv.types import Candidates, PartialAttention

SAMPLE_RUN = 16
"""Keys that are sampled together: those of one page differ less than others."""
_SAMPLED, _MOST_SAMPLES = 8, 16384
"""One run in so many is sampled, fewer of very many keys."""
MARGIN = 1.25
"""Candidates that are aimed at, of those wanted: the estimated score is off by a fifth."""
_LARGEST = 127.0
_TINY = torch.finfo(torch.float32).tiny
_LAST_ROW = 2**31 - 1


def sample_stride(capacity: int) -> int:
    """The number of runs of `capacity` keys of which one is sampled."""
    return max(_SAMPLED, -(-capacity // _MOST_SAMPLES))


def num_samples(capacity: int) -> int:
    """Rows of `capacity` that are sampled, at most."""
    runs = -(-capacity // SAMPLE_RUN)
    return -(-runs // sample_stride(capacity)) * SAMPLE_RUN


def scratch_bytes(capacity: int, later: int, heads: int, group: int) -> int:
    """Memory of a device that kernels take while they search a layer for one token.

    Lists have room for all keys, in each KV head: their rows, and a score for each query of the
    group. The sample has scores alone.

    Args:
        capacity: rows of codes. later: keys that have none.
    """
    return 4 * heads * ((1 + group) * (capacity + later) + group * num_samples(capacity))


@dataclass(frozen=True, slots=True, eq=False)
class DeviceCodes:
    """The codes of one layer's keys and what makes them, all on one device, in place for good.

    codes: [Hkv, capacity, B] uint8, a row for each key: its B / 4 lines of 4 bytes as in a block.
    recent: [Hkv, R, D] later keys as they are, key n at row n % R.
    key_map, query_map: [Hkv, d, D] float32; start: [Hkv, d] float32, where a code begins.
    mean: [Hkv, D] float32, the keys' mean: codes rank q . (k - mean).
    wanted: [Hkv] int32, candidates of a query.
    state: [2] int32, keys that are searched, and keys that have a code; the rest are recent.
    lost: [Hkv] int64, candidates for which the list had no room, of all searches so far: the
        worst ones.
    """

    plan: SketchPlan
    codes: Tensor
    recent: Tensor
    key_map: Tensor
    start: Tensor
    query_map: Tensor
    mean: Tensor
    wanted: Tensor
    state: Tensor
    lost: Tensor

    @property
    def sample_stride(self) -> int:
        """The number of runs of keys of which one is sampled."""
        return sample_stride(self.codes.shape[1])

    @property
    def num_samples(self) -> int:
        """Rows that are sampled, at most."""
        return num_samples(self.codes.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of the device."""
        parts = (self.codes, self.recent, self.key_map, self.start, self.query_map, self.mean)
        return sum(part.nbytes for part in parts)


class QueryCodes(NamedTuple):
    """Queries [Hkv, M] as the scan sees them: score = half_scale * (2 sum(u * code) - twice_zero).

    codes: [Hkv, M, d] float32, whole numbers up to 127. half_scale, twice_zero: [Hkv, M] float32.
    shift: [Hkv, M] float32, q . mean: what a score by codes lacks of the exact one.
    """

    codes: Tensor
    half_scale: Tensor
    twice_zero: Tensor
    shift: Tensor


# Codes ------------------------------------------------------------------------------------------


def encode(to: DeviceCodes, keys: Tensor, first: int) -> None:
    """Writes the codes of keys [Hkv, n, D] from row `first` on."""
    values = torch.baddbmm(to.start[:, None], keys.float(), to.key_map.mT)
    tops = staged(to.plan.tops, values.device)
    codes = values.round().clamp_min(0).minimum(tops).to(torch.uint8)
    to.codes[:, first : first + keys.shape[1]] = packed(codes, to.plan)


def packed(codes: Tensor, plan: SketchPlan) -> Tensor:
    """[..., B] uint8 of codes [..., d] uint8: of a line of several quads the first lies lowest."""
    rows, begin = [], 0
    for num_dims, bits in plan.groups:
        parts = 8 // bits
        lines = num_dims // dims_per_line(bits)
        group = codes[..., begin : begin + num_dims].unflatten(-1, (lines, parts, 4))
        byte = group[..., 0, :].clone()
        for part in range(1, parts):
            byte |= group[..., part, :] << (bits * part)
        rows.append(byte.flatten(-2))
        begin += num_dims
    return torch.cat(rows, -1)


def unpacked(rows: Tensor, plan: SketchPlan) -> Tensor:
    """[..., d] uint8 of rows [..., B]."""
    codes, begin = [], 0
    for num_dims, bits in plan.groups:
        parts, size = 8 // bits, num_dims * bits // 8
        byte = rows[..., begin : begin + size].unflatten(-1, (-1, 1, 4))
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=rows.device)[:, None]
        quads = (byte >> shifts) & ((1 << bits) - 1) if parts > 1 else byte
        codes.append(quads.flatten(-3))
        begin += size
    return torch.cat(codes, -1)


def quantise(by: DeviceCodes, q: Tensor) -> QueryCodes:
    """Codes of queries [Hkv, M, D]."""
    q = q.float()
    x = q @ by.query_map.mT
    scale = x.abs().amax(-1) / _LARGEST
    inverse = torch.where(scale >= _TINY, 1 / scale, 0.0)
    codes = (x * inverse[..., None]).clamp(-_LARGEST, _LARGEST).round()
    twice_zero = (codes * staged(by.plan.tops, q.device)).sum(-1)
    return QueryCodes(codes, 0.5 * scale, twice_zero, (q @ by.mean[..., None])[..., 0])


def code_scores(codes: Tensor, plan: SketchPlan, queries: QueryCodes) -> Tensor:
    """[Hkv, M, n] float32 of the codes [Hkv, n, B]; whole numbers until the last step."""
    products = queries.codes @ unpacked(codes, plan).float().mT
    return (2 * products - queries.twice_zero[..., None]) * queries.half_scale[..., None]


# The search -------------------------------------------------------------------------------------


def find(
    by: DeviceCodes, q: Tensor, k: Tensor, *, new: int, width: int, times: float = 1.0
) -> Candidates:
    """The keys that codes put first for queries q [Hkv, M, D], ranked exactly.

    Where all keys have room they are all ranked, without a look at a code.

    Args:
        k: [Hkv, N, D] on any device, what the codes were made of.
        new: T; query m is that of token m % T.
        width: C, room for candidates of a KV head and token.
        times: so many times `wanted` are aimed at.
    """
    queries = quantise(by, q)
    limit = threshold(by, queries, width, times)
    ids = candidates(by, q, queries, limit, new=new, width=width)
    return Candidates(ids, exact_scores(q, k, ids))


def threshold(by: DeviceCodes, queries: QueryCodes, width: int, times: float) -> Tensor:
    """[Hkv, M] float32: about `wanted` keys of each head score higher by their codes."""
    rows = sampled_rows(by)
    there = rows < torch.minimum(by.state[0], by.state[1])
    scores = code_scores(by.codes[:, rows.clamp_max(by.codes.shape[1] - 1)], by.plan, queries)
    scores = scores.masked_fill(~there, -torch.inf)
    rank = (by.wanted * sampled_share(by, times)).ceil().long().clamp(1, scores.shape[-1])
    ranked = scores.sort(dim=-1, descending=True).values
    at = (rank - 1)[:, None, None].expand(-1, scores.shape[1], 1)
    limit = ranked.gather(-1, at)[..., 0]
    return torch.where(by.state[0] <= width, -torch.inf, limit)


def sampled_rows(by: DeviceCodes) -> Tensor:
    """[S] int64."""
    number = torch.arange(by.num_samples, device=by.codes.device)
    return (number // SAMPLE_RUN * by.sample_stride) * SAMPLE_RUN + number % SAMPLE_RUN


def sampled_share(by: DeviceCodes, times: float) -> float:
    """Sampled keys above the limit that are aimed at, per key wanted."""
    return times * MARGIN / by.sample_stride


def candidates(
    by: DeviceCodes, q: Tensor, queries: QueryCodes, limit: Tensor, *, new: int, width: int
) -> Tensor:
    """[Hkv, T, width] int32: the rows above the limit of any query of the group, -1 behind them.

    Where there are more than `width`, the best of each query, see `best_of_each`.
    """
    count, coded = by.state[0], by.state[1]
    rows = torch.arange(by.codes.shape[1], device=q.device)
    later = coded + torch.arange(by.recent.shape[1], device=q.device)
    recent = by.recent[:, later % by.recent.shape[1]]
    exact = q.float() @ recent.float().mT - queries.shift[..., None]
    scores = torch.cat([code_scores(by.codes, by.plan, queries), exact], -1)
    every = torch.cat([rows, later])
    above = scores >= limit[..., None]
    above &= torch.cat([rows < torch.minimum(count, coded), later < count])
    above = above.unflatten(1, (-1, new)).any(1)  # of the group
    by.lost.add_((above.sum(-1) - width).clamp_min(0).sum(-1))
    above = best_of_each(scores.unflatten(1, (-1, new)), every, above, width)
    place = (above.cumsum(-1) - 1).masked_fill(~above, width).clamp_max(width)
    ids = torch.full((*above.shape[:2], width + 1), -1, dtype=torch.int32, device=q.device)
    return ids.scatter_(-1, place, every.int().expand(above.shape))[..., :width]


def best_of_each(scores: Tensor, rows: Tensor, listed: Tensor, width: int) -> Tensor:
    """[Hkv, T, n] bool: what a list of `width` places takes of what is `listed` [Hkv, T, n].

    All of it where it has room. Else the best `width`, half as many, a quarter, ... for each query
    of the group, down to its share of the list: the first of these for which there is room, as
    queries agree more or less. None is crowded out by another one whose scores are larger.

    Args:
        scores: [Hkv, G, T, n]. rows: [n], of which the first is the better one of equal scores.
    """
    order = in_order(scores, rows).masked_fill(~listed[:, None], -1)
    least = width // scores.shape[1]
    ranked = order.topk(min(width, order.shape[-1]), -1).values
    kept, count = listed, listed.sum(-1, keepdim=True)
    number = width
    while True:
        last = ranked[..., min(number, ranked.shape[-1]) - 1, None]
        fewer = ((order >= last) & listed[:, None]).any(1)
        kept = torch.where(count <= width, kept, fewer)
        count = kept.sum(-1, keepdim=True)
        if number <= max(1, least):
            return kept
        number = max(number // 2, least, 1)


def in_order(scores: Tensor, rows: Tensor) -> Tensor:
    """int64, the larger the better and none of them equal: of equal scores the first row is."""
    bits = scores.contiguous().view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & _LAST_ROW)).long() + _LAST_ROW + 1
    return (ordered << 31) | (_LAST_ROW - rows)


def exact_scores(q: Tensor, k: Tensor, ids: Tensor) -> Tensor:
    """[Hkv, M, C] float32 of queries [Hkv, M, D] with rows ids [Hkv, T, C] of k [Hkv, N, D]."""
    grouped = q.float().unflatten(1, (-1, ids.shape[1]))  # [Hkv, G, T, D]
    scores = torch.einsum("hgtd,htcd->hgtc", grouped, rows_of(k, ids, q.device).float())
    return scores.masked_fill(ids[:, None] < 0, -torch.inf).flatten(1, 2)


def rows_of(tensor: Tensor, ids: Tensor, device: torch.device) -> Tensor:
    """[Hkv, T, C, D]: some row where an id is negative. From the host they are copied, which waits
    for the ids; kernels read page-locked rows where they lie.
    """
    heads = torch.arange(len(ids), device=tensor.device)[:, None, None]
    return staged(tensor[heads, ids.to(tensor.device).long().clamp_min(0)], device)


# Attention --------------------------------------------------------------------------------------


def attend(
    found: Candidates,
    v: Tensor,
    limit: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    discount: Tensor | None = None,
) -> PartialAttention:
    """Attention over the candidates that score `limit` [Hkv, M] at least.

    Args:
        v: [Hkv, N, Dv] on any device.
        discount: [Hkv, M] float32, the logarithm of the weight that each of their values gives up,
            while lse stays as it is; see `tail.UnreadPart`. None for nothing.

    Returns:
        out [Hkv, M, Dv], lse [Hkv, M], float32.
    """
    ids, scores = found
    logits = scores * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    kept = (scores >= limit[..., None]) & (scores > -torch.inf)
    logits = logits.masked_fill(~kept, -torch.inf)
    lse = logits.logsumexp(-1)
    largest = lse.masked_fill(lse == -torch.inf, 0.0)
    weights = (logits - largest[..., None]).exp()
    if discount is not None:
        weights = weights - (discount - largest).exp()[..., None] * kept
    values = rows_of(v, ids, scores.device).float()
    grouped = weights.unflatten(1, (-1, ids.shape[1]))
    return PartialAttention(torch.einsum("hgtc,htcd->hgtd", grouped, values).flatten(1, 2), lse)


def best_limit(scores: Tensor, top_k: int) -> Tensor:
    """[Hkv, M]: the score that the best `top_k` of [Hkv, M, C] reach; -inf where there are fewer.

    Of scores that are equal all are attended, in whatever order they were found.
    """
    return scores.topk(min(top_k, scores.shape[-1]), -1).values[..., -1]
