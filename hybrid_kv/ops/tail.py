"""Estimate of the attention over unread entries, from their moments alone.

The entries of a KV head are taken as draws of one Gaussian over keys and values. A query q sees
logits s = scale q . k, which are then normal with a mean m and a variance w = d^2, and values whose
mean moves along a line with s. A search that ranks has taken the largest: the others lie below the
lowest logit t that it took. With x standard normal, P its distribution and h(z) its density over
P(z), c = (t - m) / d and z = c - d, the n - k that are unread weigh

    (n - k) E[exp(s) | s < t] = (n - k) exp(m + w / 2) P(z) / P(c)

and their weighted mean value is mean(v) + cov(v, s) (d - h(z)) / d, both of all n entries. What
is known of the unread alone corrects it: their plain mean value is (n mean(v) - sum of the k) /
(n - k), where the Gaussian has mean(v) - cov(v, s) h(c) / d, and the difference is added by the
share exp(-w / 2): wholly where all logits are alike, so that equal keys give what attention gives,
and little where most of the weight lies close to t, of which a mean over all of the unread tells
little. The whole costs 2 D^2 products a query, however many entries there are.

"first_order" goes without variance and cut: the unread weigh exp of their mean logit each, and
their value moves by cov(v, s). That is never more than they weigh, and needs no search that ranks.

Nearest work: MomentKV (arXiv:2606.01563) keeps these moments of evicted tokens, to first order;
arXiv:2512.07647 has the cut Gaussian mass, without values. docs/decisions.md has the difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hybrid_kv.ops.upload import staged
from hybrid_kv.types import PartialAttention

Form: TypeAlias = Literal["gaussian", "first_order"]
SAMPLES = 8192
"""Entries that the moments of a block are taken from, evenly: the variance of a logit is then known
to 1.6%, far better than logits are normal."""
MOMENTS = ("keys", "values", "key_key", "key_value")
_LEAST_GROWTH = 256
_LEAST_VARIANCE, _LEAST_SLOPE = 1e-12, 1e-6
_MOST_DEVIATIONS = 3.0
"""Of the mean logit of the unread from that of all, at most: moments from samples err, and more so
for few that are left of many."""


class AttendedSums(NamedTuple):
    """Entries of one extent that each query attends exactly, in sum; [Hkv, M] each.

    num: how many. scores: the sum of their dot products, before scale and softcap.
    """

    num: Tensor
    scores: Tensor


class UnreadPart(NamedTuple):
    """Attention over unread entries, with what the values of attended ones have yet to give up.

    out: [Hkv, M, D] float32. lse: [Hkv, M] float32, -inf where nothing is unread. discount:
    [Hkv, M] float32, the logarithm of the weight that is taken from the value of every attended
    entry; never above the limit, so that a value's weight stays positive.
    """

    out: Tensor
    lse: Tensor
    discount: Tensor

    def without(self, values: Tensor) -> PartialAttention:
        """The same once the sum of the attended values [Hkv, M, D], float32, is taken from it."""
        share = (self.discount - self.lse.masked_fill(self.lse == -torch.inf, 0.0)).exp()
        return PartialAttention(self.out - share[..., None] * values, self.lse)


def _evenly(count: int, most: int, device: torch.device) -> Tensor:
    """At most so many of `count` rows, [n] int64 ascending, the first and the last among them."""
    if count <= most:
        return torch.arange(count, device=device)
    return torch.linspace(0, count - 1, most, dtype=torch.float64, device=device).long()


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """The first `count` entries of a row and layer as one Gaussian per KV head, all float32.

    keys, values: [Hkv, D], their means. key_key: [Hkv, D, D] covariance of the keys. key_value:
    [Hkv, D, D], of keys (rows) with values (columns).
    """

    count: int
    keys: Tensor
    values: Tensor
    key_key: Tensor
    key_value: Tensor

    @classmethod
    def of(
        cls,
        k: Tensor,
        v: Tensor,
        without: Tensor | None = None,
        device: torch.device | None = None,
    ) -> Tail:
        """Of k, v [Hkv, n, D], n >= 1, any float dtypes; `count` is n.

        Args:
            without: [Hkv, n] bool, entries that are left out; None for none.
            device: where the moments are taken, without waiting for it; None for where k, v lie.
        """
        count = k.shape[1]
        if count > SAMPLES:
            some = _evenly(count, SAMPLES, k.device)
            k, v = k[:, some], v[:, some]
            without = None if without is None else without[:, some]
        if device is not None:
            k, v = staged(k, device), staged(v, device)
        k, v = k.float(), v.float()
        if without is None:
            keys, values = k.mean(1), v.mean(1)
            k, v = k - keys[:, None], v - values[:, None]
            share = 1 / k.shape[1]
            return cls(count, keys, values, k.mT @ k * share, k.mT @ v * share)
        kept = (~without).float()[..., None]
        shares = 1 / kept.sum(1).clamp_min(1)
        keys, values = (kept * k).sum(1) * shares, (kept * v).sum(1) * shares
        k, v = kept * (k - keys[:, None]), kept * (v - values[:, None])
        return cls(count, keys, values, k.mT @ k * shares[..., None], k.mT @ v * shares[..., None])

    def tensors(self) -> dict[str, Tensor]:
        """Its moments by name."""
        return {name: getattr(self, name) for name in MOMENTS}

    def to(self, device: torch.device) -> Tail:
        """The same on a device; itself where it lies there."""
        if self.keys.device == device:
            return self
        there = {name: staged(tensor, device) for name, tensor in self.tensors().items()}
        return Tail(self.count, **there)

    @property
    def nbytes(self) -> int:
        """Bytes that an estimate reads."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def is_outgrown(self, count: int) -> bool:
        """Whether so many entries are enough more to learn from."""
        return count - self.count >= max(_LEAST_GROWTH, self.count // 16)

    def grown(self, k: Tensor, v: Tensor) -> Tail:
        """Of k, v [Hkv, n, D] on any device, whose first `count` entries are known."""
        total, more = k.shape[1], k.shape[1] - self.count
        # A step waits for this: of the new ones as many as there are of the old, and no more.
        samples = max(_LEAST_GROWTH, SAMPLES * more // total)
        some = _evenly(more, samples, k.device) + self.count
        new = Tail.of(k[:, some], v[:, some], device=self.keys.device)
        # Moments of two samples together (Chan, Golub and LeVeque 1983).
        share = more / k.shape[1]
        keys, values = new.keys - self.keys, new.values - self.values
        between = share * (1 - share)
        return Tail(
            k.shape[1],
            self.keys + share * keys,
            self.values + share * values,
            torch.lerp(self.key_key, new.key_key, share)
            + between * keys[:, :, None] * keys[:, None],
            torch.lerp(self.key_value, new.key_value, share)
            + between * keys[:, :, None] * values[:, None],
        )

    def filled(self, other: Tail) -> Tail:
        """The moments of another one in the memory of these, which are lost."""
        with torch.inference_mode():  # these may have been made so, and the caller not be in it
            for mine, its in zip(self.tensors().values(), other.tensors().values(), strict=True):
                mine.copy_(its)
        return replace(self, count=other.count)

    def less(self, total: Tensor, count: Tensor, keys: Tensor, values: Tensor) -> Tail:
        """These entries, `total` [Hkv] in number, without some: covariances stay as they were.

        Args:
            count: [Hkv], how many are taken out. keys, values: [Hkv, D] float32, their sums.
        """
        left, total = (total - count).clamp_min(1)[:, None], total[:, None]
        return replace(
            self,
            keys=(total * self.keys - keys) / left,
            values=(total * self.values - values) / left,
        )

    def attend(
        self,
        queries: Tensor,
        count: Tensor | int,
        attended: AttendedSums,
        limit: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        form: Form = "gaussian",
    ) -> UnreadPart:
        """Attention over the entries that are not attended exactly.

        Args:
            queries: [Hkv, M, D], any float dtype.
            count: n, the entries of the extent, the attended ones among them; a number, or a tensor
                that expands to [Hkv, M].
            attended: k of them.
            limit: [Hkv, M], the lowest logit that was attended, +inf for none.
            scale, softcap: what turns a dot product into a logit.
        """
        q = queries.float() * scale
        mean = torch.einsum("hmd,hd->hm", q, self.keys).double()
        variance = (q @ self.key_key * q).sum(-1).double().clamp_min(_LEAST_VARIANCE)
        lean = q @ self.key_value  # [Hkv, M, D], covariance of the values with the logit
        deviation = variance.sqrt()
        left = (count - attended.num).clamp_min(0)
        ratio = attended.num / left.clamp_min(1).double()
        dot, slope = mean, torch.ones_like(mean)
        if softcap is not None:  # capped logits as normal too: their width by the slope at the mean
            bent = torch.tanh(mean / softcap)
            mean, slope = softcap * bent, (1 - bent * bent).clamp_min(_LEAST_SLOPE)
        if form == "first_order":
            lower = ratio * dot - scale * attended.scores.double() / left.clamp_min(1)
            most = _MOST_DEVIATIONS * deviation
            weight = mean + slope * lower.clamp(-most, most)
            shift, cut_shift, fade = slope, torch.zeros_like(mean), torch.zeros_like(mean)
        else:
            width = slope * deviation
            cut = (limit.double() - mean) / width
            z = cut - width
            below, cut_below = torch.special.log_ndtr(z), torch.special.log_ndtr(cut)
            hazard, cut_hazard = _hazard(z, below), _hazard(cut, cut_below)
            weight = mean + width * width / 2 + below - cut_below
            weight = torch.minimum(weight, limit.double())
            shift = (width - hazard) / deviation  # (E[s] - m) / w, along which the values move
            cut_shift, fade = cut_hazard / deviation, variance / 2
        share = (-fade).exp()
        along = (shift + share * cut_shift).float()[..., None]
        out = (1 + share * ratio).float()[..., None] * self.values[:, None] + lean * along
        lse = left.log() + weight
        discount = (weight - fade).where(left > 0, -torch.inf)
        return UnreadPart(out, lse.float(), discount.float())


def _hazard(z: Tensor, below: Tensor) -> Tensor:
    """phi(z) / P(z), of z and log P(z); by its series where these would cancel."""
    near = (-z * z / 2 - below).exp() / math.sqrt(2 * math.pi)
    r = 1 / (z * z)
    return torch.where(z < -20, -z / (1 - r * (1 - r * (3 - 15 * r))), near)


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
    """Attention over the entries of one extent that are not among the best candidates of all.

    Nothing is asked of the device: no thread waits, and no shape hangs on what was found.

    Args:
        known: the extent's moments.
        q: [Hkv, M, D], any float dtype.
        scores: [Hkv, M, C] float32, exact dot products of the candidates of all extents, -inf for
            none; those that reach `limit` [Hkv, M] are attended elsewhere.
        own: which of the C are this extent's, with a start and a stop.
        seen: [] integer, the entries of the extent that are searched.
        scale, softcap: what turns a dot product into a logit.

    Returns:
        As `Tail.attend`.
    """
    kept = (scores >= limit[..., None]) & (scores > -torch.inf)
    lowest = scores.masked_fill(~kept, torch.inf).amin(-1)
    kept, mine = kept[..., own], scores[..., own]
    attended = AttendedSums(kept.sum(-1), mine.masked_fill(~kept, 0.0).sum(-1))
    return known.attend(
        *(q, seen, attended, capped(scale * lowest, softcap)),
        scale=scale,
        softcap=softcap,
        form=form,
    )


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits after the cap of a model that has one; infinite ones, which stand for none, stay."""
    if softcap is None:
        return logits
    return torch.where(logits.isinf(), logits, softcap * torch.tanh(logits / softcap))
