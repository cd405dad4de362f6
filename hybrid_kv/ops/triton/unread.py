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

_BLOCK_CHANNELS = 32


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
def _part_below(mean, width, limit, is_open):
    """Of normal logits s: log E[exp(s) | s < limit], and phi / P at z = c - width and at c, where
    c = (limit - mean) / width; of all of them where it is open.

    The logarithm is m + w^2 / 2 + log P(z) - log P(c). Squares of a negative z and c cancel in it,
    so that they are never formed.
    """
    c = tl.where(is_open, width + 40.0, (limit - mean) / width)
    z = c - width
    half_c, half_z = _log_half(c), _log_half(z)
    bell_c, bell_z = -0.5 * c * c, tl.exp(-0.5 * z * z)
    under = 1.0 - bell_z * tl.exp(half_z)  # P(z) of a positive z
    above = mean + 0.5 * width * width + tl.log(under)
    beyond = limit + tl.where(c > 0, bell_c, 0.0) + half_z
    weight = tl.where(z > 0, above, beyond)
    under_c = 1.0 - tl.exp(half_c + bell_c)  # P(c) of a positive c
    weight -= tl.where(c > 0, tl.log(under_c), half_c)
    hazard = 0.39894228 * tl.where(z > 0, bell_z / under, tl.exp(-half_z))
    return weight, hazard, 0.39894228 * tl.where(c > 0, tl.exp(bell_c) / under_c, tl.exp(-half_c))


@triton.jit
def _weighed(
    mean,
    deviation,
    ratio,
    their,
    lowest,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    FIRST_ORDER: tl.constexpr,
):
    """Of unread entries the logarithm of the weight of one, how far the values move along their
    covariance with the logit, the share of their plain mean, and minus the logarithm of that.

    ratio: attended entries, and their: the sum of their logits before the cap, per unread one.
    """
    lower = ratio * mean - their  # the mean logit of the unread less that of all, to first order
    slope, below = 1.0, lowest * scale
    if HAS_SOFTCAP:  # capped logits as normal too: their width by the slope at the mean
        small = tl.exp(-2.0 * tl.abs(mean) / softcap)
        slope = tl.maximum(4.0 * small / ((1.0 + small) * (1.0 + small)), 1e-6)
        mean, below = capped(mean, softcap), capped(below, softcap)
    if FIRST_ORDER:
        most = 3.0 * deviation
        weight = mean + slope * tl.minimum(tl.maximum(lower, -most), most)
        along, share, fade = slope, 1.0, 0.0
    else:
        width, is_open = slope * deviation, lowest == float("inf")
        weight, hazard, cut_hazard = _part_below(mean, width, below, is_open)
        weight = tl.where(is_open, weight, tl.minimum(weight, below))
        fade = 0.5 * deviation * deviation
        share = tl.exp(-fade)
        along = (width - hazard + share * cut_hazard) / deviation
    return weight, along, share, fade


@triton.jit
def _unread_kernel(
    q,
    scores,
    limit,
    seen,
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

    # The logits of the entries as one Gaussian, and its covariance with their values.
    every = tl.arange(0, BLOCK_DIM)
    in_dim = every < DIM
    query = tl.load(q + row * DIM + every, mask=in_dim, other=0.0).to(tl.float32) * scale
    turned = tl.zeros((BLOCK_DIM,), tl.float32)
    lean = tl.zeros((BLOCK_DIM,), tl.float32)
    for begin in range(0, DIM, CHANNELS):
        channels = begin + tl.arange(0, CHANNELS)
        inside = channels < DIM
        part = tl.load(q + row * DIM + channels, mask=inside, other=0.0).to(tl.float32) * scale
        at = (head * DIM + channels)[:, None] * DIM + every[None, :]
        real = inside[:, None] & in_dim[None, :]
        turned += tl.sum(part[:, None] * tl.load(key_key + at, mask=real, other=0.0), 0)
        lean += tl.sum(part[:, None] * tl.load(key_value + at, mask=real, other=0.0), 0)
    mean = tl.sum(query * tl.load(keys + head * DIM + every, mask=in_dim, other=0.0), 0)
    deviation = tl.sqrt(tl.maximum(tl.sum(turned * query, 0), 1e-12))
    weight, along, share, fade = _weighed(
        mean, deviation, ratio, their, lowest, scale, softcap, HAS_SOFTCAP, FIRST_ORDER
    )
    centre = tl.load(values + head * DIM + every, mask=in_dim, other=0.0)
    tl.store(out + row * DIM + every, (1.0 + share * ratio) * centre + lean * along, mask=in_dim)
    tl.store(lse + row, tl.log(left) + weight)
    tl.store(discount + row, tl.where(left > 0, weight - fade, -float("inf")))
