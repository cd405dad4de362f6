"""The estimate of what a search left, in one launch: limit, counts and closed form together."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_kv.ops.devices import on
from hybrid_kv.ops.tail import Tail
from hybrid_kv.ops.triton._common import padded
from hybrid_kv.ops.triton.paged import capped
from hybrid_kv.types import PartialAttention

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
) -> PartialAttention:
    """See `tail.attend_unread`; all of it in float32."""
    heads, rows, dim = q.shape
    count = scores.shape[2]
    out = torch.empty(heads, rows, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(heads, rows, dtype=torch.float32, device=q.device)
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
            num_warps=8,
        )
    return PartialAttention(out, lse)


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
    """Of normal logits s: log E[exp(s) | s < limit], and phi(z) / P(z) at z = c - width, where
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
    weight -= tl.where(c > 0, tl.log(1.0 - tl.exp(half_c + bell_c)), half_c)
    return weight, 0.39894228 * tl.where(z > 0, bell_z / under, tl.exp(-half_z))


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
):
    row = tl.program_id(0).to(tl.int64)
    head = row // num_rows

    places = tl.arange(0, BLOCK)
    some = tl.load(scores + row * count + places, mask=places < count, other=-float("inf"))
    attended = (some >= tl.load(limit + row)) & (some > -float("inf"))
    lowest = tl.min(tl.where(attended, some, float("inf")), 0)
    own = attended & (places >= first) & (places < stop)
    left = tl.maximum(tl.load(seen).to(tl.int32) - tl.sum(own.to(tl.int32), 0), 0).to(tl.float32)

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
    width, below = deviation, lowest * scale
    if HAS_SOFTCAP:  # capped logits as normal too: their width by the slope at the mean
        small = tl.exp(-2.0 * tl.abs(mean) / softcap)
        width *= tl.maximum(4.0 * small / ((1.0 + small) * (1.0 + small)), 1e-6)
        mean, below = capped(mean, softcap), capped(below, softcap)

    weight, density = _part_below(mean, width, below, lowest == float("inf"))
    shift = (width - density) / deviation  # (E[s] - m) / w^2, along which the values move
    centre = tl.load(values + head * DIM + every, mask=in_dim, other=0.0)
    tl.store(out + row * DIM + every, centre + lean * shift, mask=in_dim)
    tl.store(lse + row, tl.log(left) + weight)
