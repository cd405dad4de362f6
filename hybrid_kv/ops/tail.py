"""What attention over entries that a search left probably gives, from their moments alone.

The entries of a KV head are taken as draws of one Gaussian over keys and values. A query q sees
logits s = scale q . k, which are then normal with a mean m and a variance w, and values whose mean
moves along a line with s. A search that ranks has taken the largest: the others lie below the
lowest logit t that it took. With x standard normal, the n that are left weigh

    n E[exp(s) | s < t] = n exp(m + w / 2) P(x < (t - m - w) / sqrt(w)) / P(x < (t - m) / sqrt(w))

and their weighted mean value is mean(v) + cov(v, s) / w (E[s] - m), E by weight. That costs 2 D^2
products a query, however many entries there are. No paper that we know of does it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_kv.types import PartialAttention

SAMPLES = 8192
"""Entries that the moments of a block are taken from, evenly: the variance of a logit is then known
to 1.6%, far better than logits are normal."""
MOMENTS = ("keys", "values", "key_key", "key_value")
_LEAST_GROWTH = 256
_LEAST_VARIANCE, _LEAST_SLOPE = 1e-12, 1e-6


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
    def of(cls, k: Tensor, v: Tensor) -> Tail:
        """Of k, v [Hkv, n, D], n >= 1, any float dtypes."""
        count = k.shape[1]
        if count > SAMPLES:
            even = torch.linspace(0, count - 1, SAMPLES, dtype=torch.float64, device=k.device)
            some = even.long()
            k, v = k[:, some], v[:, some]
        k, v = k.float(), v.float()
        keys, values = k.mean(1), v.mean(1)
        k, v = k - keys[:, None], v - values[:, None]
        share = 1 / k.shape[1]
        return cls(count, keys, values, k.mT @ k * share, k.mT @ v * share)

    def tensors(self) -> dict[str, Tensor]:
        """Its moments by name."""
        return {name: getattr(self, name) for name in MOMENTS}

    def to(self, device: torch.device) -> Tail:
        """The same on a device; itself where it lies there."""
        if self.keys.device == device:
            return self
        return Tail(self.count, **{name: t.to(device) for name, t in self.tensors().items()})

    @property
    def nbytes(self) -> int:
        """Bytes that an estimate reads."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def is_outgrown(self, count: int) -> bool:
        """Whether so many entries are enough more to learn from."""
        return count - self.count >= max(_LEAST_GROWTH, self.count // 16)

    def grown(self, k: Tensor, v: Tensor) -> Tail:
        """Of k, v [Hkv, n, D] on any device, whose first `count` entries are known."""
        more = k.shape[1] - self.count
        new = Tail.of(k[:, self.count :], v[:, self.count :]).to(self.keys.device)
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

    def attend(
        self,
        queries: Tensor,
        left: Tensor,
        limit: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> PartialAttention:
        """Attention over the entries that a search left.

        Args:
            queries: [Hkv, M, D], any float dtype.
            left: [Hkv, M], how many there are.
            limit: [Hkv, M], the lowest logit that was attended, +inf for none.
            scale, softcap: what turns a dot product into a logit.

        Returns:
            out [Hkv, M, D] and lse [Hkv, M], both float32; lse -inf where nothing is left.
        """
        q = queries.float() * scale
        mean = torch.einsum("hmd,hd->hm", q, self.keys).double()
        variance = (q @ self.key_key * q).sum(-1).double().clamp_min(_LEAST_VARIANCE)
        lean = q @ self.key_value  # [Hkv, M, D], covariance of the values with the logit
        deviation = width = variance.sqrt()
        if softcap is not None:  # capped logits as normal too: their width by the slope at the mean
            bent = torch.tanh(mean / softcap)
            mean, width = softcap * bent, width * (1 - bent * bent).clamp_min(_LEAST_SLOPE)
        cut = (limit.double() - mean) / width
        z = cut - width
        below = torch.special.log_ndtr(z)
        lse = left.log() + mean + width * width / 2 + below - torch.special.log_ndtr(cut)
        density = (-z * z / 2 - below).exp() / math.sqrt(2 * math.pi)  # phi(z) / P(z)
        shift = (width - density) / deviation  # (E[s] - m) / w, along which the values move
        out = self.values[:, None] + lean * shift.float()[..., None]
        return PartialAttention(out, lse.float())


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
    attended = (scores >= limit[..., None]) & (scores > -torch.inf)
    lowest = scores.masked_fill(~attended, torch.inf).amin(-1)
    left = (seen - attended[..., own].sum(-1)).clamp_min(0)
    return known.attend(q, left, capped(scale * lowest, softcap), scale=scale, softcap=softcap)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits after the cap of a model that has one; infinite ones, which stand for none, stay."""
    if softcap is None:
        return logits
    return torch.where(logits.isinf(), logits, softcap * torch.tanh(logits / softcap))
