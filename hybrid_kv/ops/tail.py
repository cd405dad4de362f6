"""Estimate of the attention over unread entries, from their moments alone.

The entries of a KV head are taken as draws of Gaussians over keys and values, one for each of C
clusters of keys, with means of their own and covariances in common. A query q sees logits
s = scale q . k, which are then normal in cluster c with a mean m_c and a variance w = d^2 that all
share, and values whose mean moves along a line with s. A search that ranks has taken the largest:
the others lie below the lowest logit t that it took. With x standard normal, P its distribution,
h(z) its density over P(z), y_c = (t - m_c) / d, z_c = y_c - d and p_c the share of a cluster in the
entries, the share p_c P(y_c) of all is expected to be unread, and the n - k that are weigh

    (n - k) (sum of p_c exp(m_c + w / 2) P(z_c)) / (sum of p_c P(y_c))

Of a cluster the weighted mean value is mean(v) + cov(v, s) (d - h(z_c)) / d. What is known of the
unread alone corrects the whole: their plain mean value is (n mean(v) - sum of the k) / (n - k),
where the clusters have mean(v) - cov(v, s) h(y_c) / d each, and the difference is added by the
share exp(-W / 2), with W the variance of all logits: wholly where all are alike, so that equal keys
give what attention gives, and little where most of the weight lies close to t, of which a mean over
all of the unread tells little. The whole costs 2 D (D + C) products a query, however many entries
there are.

"first_order" goes without clusters, variance and cut: the unread weigh exp of their mean logit
each, and their value moves by cov(v, s) of all. That is never more than they weigh, and needs no
search that ranks.

Nearest work: MomentKV (arXiv:2606.01563) keeps the moments of all evicted tokens, to first order;
arXiv:2512.07647 has the cut Gaussian mass, without values; Multipole attention (arXiv:2506.13059)
has means by cluster, without variance and cut. docs/decisions.md has the difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hybrid_kv.ops.devices import staged
from hybrid_kv.types import PartialAttention

Form: TypeAlias = Literal["gaussian", "first_order"]
SAMPLES = 8192
"""Entries that the moments of a block are taken from, evenly: the variance of a logit is then known
to 1.6%, far better than logits are normal."""
MOMENTS = ("shares", "keys", "values", "key_key", "key_value")
MOST_CLUSTERS = 64
"""By as many clusters of keys the KL from full attention halves at 1 and 2% of texts; 128 take off
another eighth, and cost as much again as the covariances."""
_CLUSTER_ENTRIES = 16
"""Entries that a cluster has on average, at least: its mean takes as much memory as one of them."""
_LEARNED, _ROUNDS = 2048, 5  # entries that centroids are learned from, and rounds of k-means
_LEAST_GROWTH = 256
_LEAST_VARIANCE, _LEAST_SLOPE, _LEAST_SHARE = 1e-12, 1e-6, 1e-30
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
    """The first `count` entries of a row and layer by KV head: C clusters of keys, all float32.

    shares: [Hkv, C], of a cluster in the entries. keys, values: [Hkv, C, D], their means by
    cluster. key_key: [Hkv, D, D], covariance of the keys about these. key_value: [Hkv, D, D], of
    keys (rows) with values (columns).
    """

    count: int
    shares: Tensor
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
        centroids = _centroids(k, clusters_of(count))
        return cls._around(centroids, count, k, v, without)

    @classmethod
    def _around(
        cls, centroids: Tensor, count: int, k: Tensor, v: Tensor, without: Tensor | None = None
    ) -> Tail:
        """Of k, v [Hkv, n, D], each in the cluster of the nearest of centroids [Hkv, C, D]."""
        clusters, dim = centroids.shape[1:]
        both = torch.cat([k, v], -1).float()
        groups = nearest_of(both[..., :dim], centroids)
        kept = torch.ones(groups.shape, device=k.device) if without is None else (~without).float()
        if without is not None:
            both *= kept[..., None]
        sizes = torch.zeros(len(k), clusters, device=k.device).scatter_add_(1, groups, kept)
        total = sizes.sum(-1, keepdim=True)
        shares = torch.where(total > 0, sizes / total.clamp_min(1), 1 / clusters)
        keys, values = means_of(both, groups, sizes).split(dim, -1)
        keys = torch.where(sizes[..., None] > 0, keys, centroids)
        both -= _each(torch.cat([keys, values], -1), groups)
        if without is not None:
            both *= kept[..., None]
        products = both[..., :dim].mT @ both / total.clamp_min(1)[..., None]
        key_key, key_value = (part.contiguous() for part in products.split(dim, -1))
        return cls(count, shares, keys, values.contiguous(), key_key, key_value)

    @property
    def clusters(self) -> int:
        """C."""
        return self.keys.shape[1]

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
        """Of k, v [Hkv, n, D] on any device, whose first `count` entries are known.

        Others join the nearest cluster; as many clusters as more entries may have are learned from
        them.
        """
        total, more = k.shape[1], k.shape[1] - self.count
        # A step waits for this: of the new ones as many as there are of the old, and no more.
        samples = max(_LEAST_GROWTH, SAMPLES * more // total)
        some = _evenly(more, samples, k.device) + self.count
        k, v = (staged(t[:, some], self.keys.device) for t in (k, v))
        old, added = self, clusters_of(total) - self.clusters
        if added > 0:
            old = self._with_more(_centroids(k, added))
        new = Tail._around(old.keys, more, k, v)
        # Moments of two samples together (Chan, Golub and LeVeque 1983), by cluster.
        share = more / total
        before, after = (1 - share) * old.shares, share * new.shares
        shares = before + after
        part = (after / shares.clamp_min(_LEAST_SHARE))[..., None]
        keys, values = new.keys - old.keys, new.values - old.values
        between = before[..., None] * part * keys
        return Tail(
            *(total, shares, old.keys + part * keys, old.values + part * values),
            key_key=torch.lerp(old.key_key, new.key_key, share) + between.mT @ keys,
            key_value=torch.lerp(old.key_value, new.key_value, share) + between.mT @ values,
        )

    def _with_more(self, centroids: Tensor) -> Tail:
        """The same with a cluster without entries for each of centroids [Hkv, C', D] more."""
        more = (0, centroids.shape[1])
        values = torch.nn.functional.pad(self.values, (0, 0, *more))
        shares = torch.nn.functional.pad(self.shares, more)
        return replace(
            self, shares=shares, keys=torch.cat([self.keys, centroids], 1), values=values
        )

    def filled(self, other: Tail) -> Tail:
        """The moments of another one in the memory of these, which are lost; that one itself where
        it has more clusters.
        """
        if other.clusters != self.clusters:
            return other
        with torch.inference_mode():  # these may have been made so, and the caller not be in it
            for mine, its in zip(self.tensors().values(), other.tensors().values(), strict=True):
                mine.copy_(its)
        return replace(self, count=other.count)

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
        mean = (q @ self.keys.mT).double()  # [Hkv, M, C]
        within = (q @ self.key_key * q).sum(-1, keepdim=True).double().clamp_min(_LEAST_VARIANCE)
        shares = self.shares[:, None].double()
        centre = (shares * mean).sum(-1, keepdim=True)
        variance = within + (shares * (mean - centre).square()).sum(-1, keepdim=True)
        left = (count - attended.num).clamp_min(0).double()[..., None]
        ratio = attended.num[..., None] / left.clamp_min(1)
        if form == "first_order":
            lower = ratio * centre - scale * attended.scores.double()[..., None] / left.clamp_min(1)
            most = _MOST_DEVIATIONS * variance.sqrt()
            dot, (centre, slope) = centre, _capped_normal(centre, softcap)
            weight = centre + slope * lower.clamp(-most, most)
            fade = torch.zeros_like(weight)
            of_means, of_slopes = shares * (1 + ratio + slope * (mean - dot)), slope
        else:
            limits, deviation = limit.double()[..., None], within.sqrt()
            mean, slope = _capped_normal(mean, softcap)
            width = slope * deviation
            cut = (limits - mean) / width
            z = cut - width
            below, cut_below = torch.special.log_ndtr(z), torch.special.log_ndtr(cut)
            mass = shares.log() + mean + width * width / 2 + below
            number = shares.log() + cut_below
            weight = mass.logsumexp(-1, keepdim=True) - number.logsumexp(-1, keepdim=True)
            weight = torch.minimum(weight, limits)
            mass, number = mass.softmax(-1), number.softmax(-1)
            fade = variance / 2
            share = (-fade).exp()
            # (E[s] - m) / w, along which the values move, of the weighed and of the plain mean
            shifts = mass * (width - _hazard(z, below)) + share * number * _hazard(cut, cut_below)
            of_slopes = shifts.sum(-1, keepdim=True) / deviation
            of_means = mass + share * (shares * (1 + ratio) - number)
        lean = q @ self.key_value  # covariance of the values with the logit, of a cluster
        out = of_means.float() @ self.values + lean * of_slopes.float()
        lse = left.log() + weight
        discount = (weight - fade).where(left > 0, -torch.inf)
        return UnreadPart(out, lse[..., 0].float(), discount[..., 0].float())


def clusters_of(count: int) -> int:
    """Clusters that so many entries are divided into."""
    return max(1, min(MOST_CLUSTERS, count // _CLUSTER_ENTRIES))


def sizes_of_moments(heads: int, clusters: int, dim: int) -> dict[str, tuple[int, ...]]:
    """Sizes of the moments by name."""
    means, covariance = (heads, clusters, dim), (heads, dim, dim)
    return dict(
        zip(MOMENTS, [(heads, clusters), means, means, covariance, covariance], strict=True)
    )


def moments_bytes(heads: int, dim: int, count: int) -> int:
    """Bytes of the moments of `count` entries."""
    return 4 * sum(map(math.prod, sizes_of_moments(heads, clusters_of(count), dim).values()))


def _centroids(k: Tensor, count: int) -> Tensor:
    """[Hkv, count, D] float32 of keys [Hkv, n, D], n >= count."""
    if count == 1:
        return k.float().mean(1, keepdim=True)
    if k.shape[1] > _LEARNED:
        k = k[:, _evenly(k.shape[1], _LEARNED, k.device)]
    centroids: Tensor = kmeans(k.float(), count, _ROUNDS)[0]
    return centroids


def _each(means: Tensor, groups: Tensor) -> Tensor:
    """Rows [Hkv, n, D] of means [Hkv, C, D]: the ones that groups [Hkv, n] name."""
    first = torch.arange(len(means), device=means.device)[:, None] * means.shape[1]
    own = means.flatten(0, 1).index_select(0, (groups + first).flatten())
    return own.view(*groups.shape, means.shape[2])


def _capped_normal(mean: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Mean and slope of capped logits, as normal too: their width by the slope at the mean."""
    if softcap is None:
        return mean, torch.ones_like(mean)
    bent = torch.tanh(mean / softcap)
    return softcap * bent, (1 - bent * bent).clamp_min(_LEAST_SLOPE)


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


_BLOCK_BYTES = 64 * 2**20


def kmeans(
    points: Tensor, num_centroids: int, iterations: int, *, spherical: bool = False
) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm, from points that are evenly spread over the set; no random numbers.

    It does not wait for a device, and takes all of its iterations there.

    Args:
        points: [B, N, D] float32, N >= 1; num_centroids: at most N are made.
        spherical: points have length 1, and so have centroids: the largest cosine is nearest.

    Returns:
        centroids [B, C, D] and the nearest one [B, N] int64 of every point. A centroid that lost
        its points stays where it was.
    """
    sets, count, _ = points.shape
    num_centroids, device = min(num_centroids, count), points.device
    first = torch.linspace(0, count - 1, num_centroids, device=device).round().long()
    centroids = points[:, first].clone()
    nearest = nearest_of(points, centroids)
    for _ in range(iterations):
        sizes = torch.zeros(sets, num_centroids, device=device).scatter_add_(
            1, nearest, torch.ones(nearest.shape, device=device)
        )
        means = means_of(points, nearest, sizes)
        means = normalize(means, dim=-1) if spherical else means
        centroids = torch.where(sizes[..., None] > 0, means, centroids)
        moved = nearest_of(points, centroids)
        if device.type == "cpu" and torch.equal(moved, nearest):
            break
        nearest = moved
    return centroids, nearest


def means_of(rows: Tensor, groups: Tensor, sizes: Tensor) -> Tensor:
    """[B, C, D] float32 means of rows [B, N, D] by group [B, N], which have sizes [B, C]."""
    if rows.device.type == "cpu":
        sums = torch.zeros(*sizes.shape, rows.shape[-1])
        for into, some, of in zip(sums, rows, groups, strict=True):
            into.index_add_(0, of, some.float())
    else:  # a device adds rows in no fixed order, and products in one
        sums = members_of(groups, sizes.shape[1]) @ rows.float()
    return sums / sizes.clamp_min(1)[..., None]


def members_of(groups: Tensor, count: int) -> Tensor:
    """[B, count, N] float32: 1 where a point is of a group, of groups [B, N]; else 0."""
    every = torch.arange(count, device=groups.device)[:, None]
    return (groups[:, None] == every).float()


def nearest_of(points: Tensor, centroids: Tensor) -> Tensor:
    """[B, N] int64: which of centroids [B, C, D] is nearest to each of points [B, N, D]."""
    sets, count, _ = points.shape
    less = centroids.square().sum(-1)[:, None] / -2
    block = max(1, _BLOCK_BYTES // (4 * sets * centroids.shape[1]))
    parts = [
        _largest(torch.baddbmm(less, points[:, at : at + block].float(), centroids.mT))
        for at in range(0, count, block)
    ]
    return torch.cat(parts, 1)


def _largest(scores: Tensor) -> Tensor:
    """[...] int64, where the largest of scores [..., C] is."""
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    # Torch's takes two to four times as long for short rows.
    return torch.from_numpy(scores.numpy().argmax(-1))
