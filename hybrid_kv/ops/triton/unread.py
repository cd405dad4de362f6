"""The estimate of what a search left, in one launch: limit, counts and closed form together."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_kv.ops.devices import on
from hybrid_kv.ops.tail import Form, Tail, UnreadPart
from hybrid_kv.ops.triton._common import padded
from hybrid_kv.ops.triton.paged import capped

_BLOCK_CHANNELS = 16  # more take registers, and the stack on sm_89


def attend_unread(
    known: Tail,
    q: Tensor,
    scores: Tensor,
    limit: Tensor,
    own: slice,
    seen: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    form: Form = "gaussian",
) -> UnreadPart:
    """See `tail.attend_unread`; all of it in float32."""
    heads, rows, dim = q.shape
    count = scores.shape[2]
    out = torch.empty(heads, rows, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(heads, rows, dtype=torch.float32, device=q.device)
    discount = torch.empty_like(lse)
    with on(q):
        _unread_kernel[(heads * rows,)](
            q.contiguous(),
            scores.contiguous(),
            limit.contiguous(),
            seen,
            known.shares.contiguous(),
            known.keys.contiguous(),
            known.values.contiguous(),
            known.key_key.contiguous(),
            known.key_value.contiguous(),
            out,
            lse,
            discount,
            scale,
            softcap or 0.0,
            rows,
            count,
            own.start,
            own.stop,
            CLUSTERS=known.clusters,
            BLOCK_CLUSTERS=padded(known.clusters),
            DIM=dim,
            BLOCK_DIM=padded(dim),
            CHANNELS=_BLOCK_CHANNELS,
            BLOCK=padded(count),
            HAS_SOFTCAP=softcap is not None,
            FIRST_ORDER=form == "first_order",
            num_warps=8,
        )
    return UnreadPart(out, lse, discount)


@triton.jit
def _log_half(x):
    """Log of P(-|x|), plus x^2 / 2, of the normal distribution P, within 5e-7 for every x.

    With t = 1 / (1 + |x| / sqrt(8)) that is log(t) and a smooth function of t, here a polynomial
    that was fitted for it.
    """
    t = 1.0 / (1.0 + 0.35355339 * tl.abs(x))
    p = -0.8133247 + t * 0.1687606
    p = -0.18396665 + t * (0.27135259 + t * (-1.1211007 + t * (1.4732551 + t * p)))
    return tl.log(t) - 1.9586594 + t * (1.0000227 + t * (0.37412503 + t * (0.096388239 + t * p)))


@triton.jit
def _capped_normal(mean, softcap, HAS_SOFTCAP: tl.constexpr):
    """Mean and slope of capped logits, as normal too: their width by the slope at the mean."""
    slope = mean * 0.0 + 1.0
    if HAS_SOFTCAP:
        small = tl.exp(-2.0 * tl.abs(mean) / softcap)
        slope = tl.maximum(4.0 * small / ((1.0 + small) * (1.0 + small)), 1e-6)
        mean = capped(mean, softcap)
    return mean, slope


@triton.jit
def _below(mean, width, shares, limit, is_open):
    """Of normal logits s by cluster [C]: log E[exp(s) | s < limit]; the shares [C] of clusters in
    these weights, and in the entries below the limit; and phi / P at z = c - width and at c, [C],
    where c = (limit - mean) / width. Of all entries where it is open.

    A cluster's weight is exp(m + w^2 / 2) P(z), and its entries P(c). Where z and c are negative
    the first is exp(limit - c^2 / 2) by what `_log_half` gives, and the second exp(-c^2 / 2): the
    largest of these squares is left out of both, where they would cancel.
    """
    c = tl.where(is_open, width + 40.0, (limit - mean) / width)
    z = c - width
    half_c, half_z = _log_half(c), _log_half(z)
    bell_c, bell_z = tl.exp(-0.5 * c * c), tl.exp(-0.5 * z * z)
    under = 1.0 - bell_z * tl.exp(half_z)  # P(z) of a positive z
    under_c = 1.0 - bell_c * tl.exp(half_c)  # P(c) of a positive c
    is_cluster = shares > 0
    fallen = tl.where(c > 0, 0.0, -0.5 * c * c)
    fallen -= tl.max(tl.where(is_cluster, fallen, -float("inf")), 0)  # of 0 where a c is positive
    fallen = tl.where(is_cluster, fallen, -float("inf"))
    numbers = shares * tl.where(c > 0, under_c, tl.exp(fallen + half_c))
    above = mean + 0.5 * width * width + tl.log(under)
    beyond = limit + tl.where(c > 0, -0.5 * c * c, fallen) + half_z
    weight = tl.where(z > 0, above, beyond) + tl.log(tl.maximum(shares, 1e-30))
    weight = tl.where(is_cluster, weight, -float("inf"))
    heaviest = tl.max(weight, 0)
    masses = tl.exp(weight - heaviest)
    mass, number = tl.sum(masses, 0), tl.sum(numbers, 0)
    hazard = 0.39894228 * tl.where(z > 0, bell_z / under, tl.exp(-half_z))
    cut_hazard = 0.39894228 * tl.where(c > 0, bell_c / under_c, tl.exp(-half_c))
    log_weight = heaviest + tl.log(mass) - tl.log(number)
    return log_weight, masses / mass, numbers / number, hazard, cut_hazard


@triton.jit
def _weighed(
    means,
    shares,
    deviation,
    ratio,
    their,
    lowest,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    FIRST_ORDER: tl.constexpr,
):
    """Of unread entries the logarithm of the weight of one, by how much the mean value of each
    cluster counts [C] and their covariance with the logit, and minus the logarithm of the share of
    their plain mean.

    deviation: of the logits of a cluster. ratio: attended entries, and their: the sum of their
    logits before the cap, per unread one.
    """
    centre = tl.sum(shares * means, 0)
    variance = deviation * deviation + tl.sum(shares * (means - centre) * (means - centre), 0)
    if FIRST_ORDER:
        lower = ratio * centre - their  # the mean logit of the unread less that of all
        most = 3.0 * tl.sqrt(variance)
        mean, slope = _capped_normal(centre, softcap, HAS_SOFTCAP)
        weight, fade = mean + slope * tl.minimum(tl.maximum(lower, -most), most), 0.0
        of_slopes, of_means = slope, shares * (1.0 + ratio + slope * (means - centre))
    else:
        below, is_open = lowest * scale, lowest == float("inf")
        if HAS_SOFTCAP:
            below = capped(below, softcap)
        mean, slope = _capped_normal(means, softcap, HAS_SOFTCAP)
        width = slope * deviation
        weight, masses, numbers, hazard, cut_hazard = _below(mean, width, shares, below, is_open)
        weight = tl.where(is_open, weight, tl.minimum(weight, below))
        fade = 0.5 * variance
        share = tl.exp(-fade)
        of_slopes = tl.sum(masses * (width - hazard) + share * numbers * cut_hazard, 0) / deviation
        of_means = masses + share * (shares * (1.0 + ratio) - numbers)
    return weight, of_means, of_slopes, fade


@triton.jit
def _tile(matrix, rows, is_row, columns, is_column, DIM: tl.constexpr):
    """Some rows and columns of a matrix [rows, DIM], 0 where they are none."""
    at = rows[:, None] * DIM + columns[None, :]
    return tl.load(matrix + at, mask=is_row[:, None] & is_column[None, :], other=0.0)


@triton.jit
def _unread_kernel(
    q,
    scores,
    limit,
    seen,
    shares,
    keys,
    values,
    key_key,
    key_value,
    out,
    lse,
    discount,
    scale,
    softcap,
    num_rows,
    count,
    first,
    stop,
    CLUSTERS: tl.constexpr,
    BLOCK_CLUSTERS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FIRST_ORDER: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = row // num_rows

    places = tl.arange(0, BLOCK)
    some = tl.load(scores + row * count + places, mask=places < count, other=-float("inf"))
    attended = (some >= tl.load(limit + row)) & (some > -float("inf"))
    lowest = tl.min(tl.where(attended, some, float("inf")), 0)
    own = attended & (places >= first) & (places < stop)
    num_own = tl.sum(own.to(tl.int32), 0)
    left = tl.maximum(tl.load(seen).to(tl.int32) - num_own, 0).to(tl.float32)
    ratio = num_own.to(tl.float32) / tl.maximum(left, 1.0)
    their = scale * tl.sum(tl.where(own, some, 0.0), 0) / tl.maximum(left, 1.0)

    # The logits of the clusters as Gaussians.
    every = tl.arange(0, BLOCK_DIM)
    in_dim = every < DIM
    cluster = tl.arange(0, BLOCK_CLUSTERS)
    is_cluster = cluster < CLUSTERS
    query = tl.load(q + row * DIM + every, mask=in_dim, other=0.0).to(tl.float32) * scale
    turned = tl.zeros((BLOCK_DIM,), tl.float32)
    means = tl.zeros((BLOCK_CLUSTERS,), tl.float32)
    for begin in range(0, DIM, CHANNELS):
        channels = begin + tl.arange(0, CHANNELS)
        inside = channels < DIM
        part = tl.load(q + row * DIM + channels, mask=inside, other=0.0).to(tl.float32) * scale
        own_key_key = _tile(key_key, head * DIM + channels, inside, every, in_dim, DIM)
        turned += tl.sum(part[:, None] * own_key_key, 0)
        own_keys = _tile(keys, head * CLUSTERS + cluster, is_cluster, channels, inside, DIM)
        means += tl.sum(part[None, :] * own_keys, 1)
    share = tl.load(shares + head * CLUSTERS + cluster, mask=is_cluster, other=0.0)
    deviation = tl.sqrt(tl.maximum(tl.sum(turned * query, 0), 1e-12))
    weight, of_means, of_slopes, fade = _weighed(
        means, share, deviation, ratio, their, lowest, scale, softcap, HAS_SOFTCAP, FIRST_ORDER
    )
    # Some channels at a time, by the means of the clusters and the covariance with the logit.
    for begin in range(0, DIM, CHANNELS):
        channels = begin + tl.arange(0, CHANNELS)
        inside = channels < DIM
        own_values = _tile(values, head * CLUSTERS + cluster, is_cluster, channels, inside, DIM)
        own_key_value = _tile(key_value, head * DIM + every, in_dim, channels, inside, DIM)
        value = tl.sum(of_means[:, None] * own_values, 0)
        value += of_slopes * tl.sum(query[:, None] * own_key_value, 0)
        tl.store(out + row * DIM + channels, value, mask=inside)
    tl.store(lse + row, tl.log(left) + weight)
    tl.store(discount + row, tl.where(left > 0, weight - fade, -float("inf")))
