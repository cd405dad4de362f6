"""Methods that merge entries into their neighbours instead of dropping them.

KVMerger, LOOK-M, D2O and ElasticCache; the functions on top are shared by them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from hybrid_kv.config import Tokens
from hybrid_kv.entries import Entries
from hybrid_kv.methods.evicting import Evicting, best, group_sums
from hybrid_kv.methods.h2o import H2O, HeavyParams, heavy_needs
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, Needs

_BLOCK_NUMBERS = 2**24


def left_out(chosen: Tensor, count: int) -> Tensor:
    """[Hkv, count - K] of `count` places, in order, those not among chosen [Hkv, K]."""
    gone = torch.ones(len(chosen), count, dtype=torch.bool, device=chosen.device)
    gone.scatter_(1, chosen, value=False)
    order = gone.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
    return order[:, : count - chosen.shape[1]]


def nearest(gone: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Of keys gone [H, n, D] the most alike of kept [H, m, D], by cosine: its places, the cosines.

    Both [H, n]; of equals the first.
    """
    unit, others = F.normalize(kept.float(), dim=-1), F.normalize(gone.float(), dim=-1)
    rows = max(1, _BLOCK_NUMBERS // max(1, kept.shape[0] * kept.shape[1]))
    found = [(some @ unit.mT).max(-1) for some in others.split(rows, 1)]
    return torch.cat([one.indices for one in found], 1), torch.cat([one.values for one in found], 1)


def merged(
    kept: Entries,
    gone: Entries,
    into: Tensor,
    own: Tensor,
    weights: Tensor,
    total: Tensor | None = None,
) -> Entries:
    """Kept entries, to each of which a weighted sum of others is added.

    Keys and values become (own * kept + sum of weights * gone) / total, in float32.

    Args:
        kept, gone: as many for all heads. into: [H, n] places among the kept of those gone.
        own: [H, m] weights of the kept. weights: [H, n] of those gone, 0 for one that is lost.
        total: [H, m]; None for own + sum of weights.
    """
    if total is None:
        total = own.scatter_add(1, into, weights)
    columns = {}
    for name in ("k", "v"):
        old, others = (torch.stack(one.split(name)).float() for one in (kept, gone))
        sums = old * own[..., None]
        sums.scatter_add_(1, into[..., None].expand_as(others), others * weights[..., None])
        new = kept.columns[name].clone()
        for rows, head in zip(kept.split(new), sums / total[..., None], strict=True):
            rows.copy_(head)
        columns[name] = new
    return kept.with_columns(**columns).with_state(merged_end=gone.positions.max() + 1)


class MergingOnce(Evicting):
    """Merges what leaves the window as the prompt ends, up to a budget; keeps all of the answer."""

    Params = HeavyParams

    @property
    def needs(self) -> Needs:
        return super().needs | heavy_needs(self.params)

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        if seen is None:
            return (kept or Entries.empty(left)).extended(left)
        first, count = self.params.sink_tokens, left.lengths[0]
        room = self.room(count)
        if room == count:
            return left.copied()
        scores = group_sums(seen.total_mass(), left.num_heads)
        return self.merged_into(left, scores[:, first : first + count], room)

    @abstractmethod
    def merged_into(self, left: Entries, scores: Tensor, room: int) -> Entries:
        """`room` entries of each head of `left`, the others merged into them where nothing else has
        them; scores [Hkv, N]: the weights that each got.
        """


@METHODS.register("kvmerger", paper="Wang et al. 2024, arXiv:2407.08454, section 4")
class KVMerger(MergingOnce):
    """Merges neighbours of the prompt whose keys are alike, up to a budget; MERGES, drops nothing.

    Neighbours are joined in the order of the cosine of their keys until a KV head has as many sets
    as its budget (that cosine is the paper's threshold). The pivot p of a set is the token that all
    queries of the prompt attended most; g[i] = exp(-|k[p] - k[i]|^2 / (2 s^2)), s the mean distance
    from p over sqrt 2; key and value become sum(g k) / sum(g) and sum(g v) / sum(g). The tokens of
    the highest sums, protected_ratio of the budget, are sets of their own.

    Kept: of the prompt one entry for each set; sinks, window and all of the answer.
    Lost: with demote "drop" what tells the tokens of a set apart; with "offload" nothing.
    Deviations: a merged entry counts as many times as it has tokens (bias log n), where the paper
    multiplies its value by their number; sets end where the budget says so, not at a fixed cosine;
    s is of the distances, for the paper's own is defined by g; how many are protected is ours; all
    layers merge, the paper leaves the first two and the last alone (see by_layer); with demote
    "offload" nothing is merged: pivots are kept.
    """

    class Params(HeavyParams):
        """protected_ratio: of the budget, tokens that are never merged."""

        window_tokens: Tokens = 32
        protected_ratio: float = Field(default=0.2, ge=0, le=0.5)

    def merged_into(self, left: Entries, scores: Tensor, room: int) -> Entries:
        keys = torch.stack(left.split("k")).float()
        sets = self._sets(keys, scores, room)
        pivots = _first_of_largest(scores, sets, room)
        new = left.select(pivots)
        return new if self._offloads else _merged(new, left, keys, sets, pivots)

    def _sets(self, keys: Tensor, scores: Tensor, room: int) -> Tensor:
        """[Hkv, N] number of the set of each token, 0 to `room` - 1 from left to right."""
        count = keys.shape[1]
        guarded = min(int(self.params.protected_ratio * room), (room - 1) // 2)
        alone = torch.zeros_like(scores, dtype=torch.bool)
        alone.scatter_(1, best(scores, guarded), value=True)
        unit = F.normalize(keys, dim=-1)
        alike = (unit[:, 1:] * unit[:, :-1]).sum(-1)
        alike = alike.masked_fill(alone[:, 1:] | alone[:, :-1], -torch.inf)
        joined = torch.zeros_like(alone)
        joined[:, 1:].scatter_(1, best(alike, count - room), value=True)  # to the one before
        return (~joined).cumsum(1) - 1


def _first_of_largest(scores: Tensor, sets: Tensor, room: int) -> Tensor:
    """[Hkv, room] the token of the highest score of each set; of equals the first."""
    order = scores.sort(dim=1, descending=True, stable=True).indices
    by_set = sets.gather(1, order).sort(dim=1, stable=True)
    starts = torch.searchsorted(
        by_set.values, torch.arange(room, device=sets.device).expand(len(sets), -1).contiguous()
    )
    return order.gather(1, by_set.indices.gather(1, starts))


def _merged(new: Entries, left: Entries, keys: Tensor, sets: Tensor, pivots: Tensor) -> Entries:
    """Pivots, as the Gaussian average of their sets; keys [Hkv, N, D] and sets [Hkv, N]."""
    room, dim = pivots.shape[1], keys.shape[-1]
    middle = keys.gather(1, pivots.gather(1, sets)[..., None].expand(-1, -1, dim))
    far = (keys - middle).square().sum(-1)

    def summed(numbers: Tensor) -> Tensor:
        shape = (len(sets), room, *numbers.shape[2:])
        at = sets if numbers.dim() == 2 else sets[..., None].expand_as(numbers)
        return numbers.new_zeros(shape).scatter_add_(1, at, numbers)

    sizes = summed(torch.ones_like(far))
    twice = (summed(far.sqrt()) / sizes).square().clamp_min(1e-20)  # 2 s^2
    weights = (-far / twice.gather(1, sets)).exp()
    total = summed(weights)[..., None]
    columns = {}
    for name in ("k", "v"):
        rows = torch.stack(left.split(name)).float()
        means = summed(rows * weights[..., None]) / total
        columns[name] = means.flatten(0, 1).to(left.columns[name].dtype)
    positions = torch.stack(left.split("positions")).gather(1, left_out(pivots, len(keys[0])))
    new = new.with_columns(**columns, bias=sizes.log().flatten())
    return new.with_state(merged_end=positions.max() + 1)


@METHODS.register("look_m", paper="Wan et al. 2024, arXiv:2406.18139, section 3")
class LookM(MergingOnce):
    """Keeps what all queries of the prompt attended most, and merges the others into it; DROPS.

    Each entry e that is not kept goes to the kept c of the nearest key by cosine s. Of n that go to
    c: "averaged", c becomes (c + sum e) / (n + 1); "pivotal", (c + sum (c + e) / 2) / (n + 1);
    "weighted", (c + sum s e) / (n + 1); of keys and of values.

    Kept: of the prompt the best of each KV head, with what was merged into it; sinks, window and
    all of the answer.
    Lost: with demote "drop" what tells merged entries apart; with "offload" nothing.
    Deviations: the part of it that is about text: no token is known to be of an image, so that none
    is preferred; sinks and window take nothing in; with demote "offload" nothing is merged.
    """

    class Params(HeavyParams):
        """merging: how, "averaged", "pivotal" or "weighted"."""

        window_tokens: Tokens = 32
        merging: Literal["averaged", "pivotal", "weighted"] = "pivotal"

    def merged_into(self, left: Entries, scores: Tensor, room: int) -> Entries:
        chosen = best(scores, room).sort().values
        new = left.select(chosen)
        if self._offloads:
            return new
        gone = left.select(left_out(chosen, scores.shape[1]))
        return self._merged(new, gone)

    def _merged(self, new: Entries, gone: Entries) -> Entries:
        into, alike = nearest(*(torch.stack(one.split("k")) for one in (gone, new)))
        ones = torch.ones_like(alike)
        taken = alike.new_zeros(new.num_heads, new.lengths[0])
        taken.scatter_add_(1, into, ones)  # how many go to each
        own, weights = {
            "averaged": (torch.ones_like(taken), ones),
            "pivotal": (1 + taken / 2, ones / 2),  # half of every e, and half of c for each
            "weighted": (torch.ones_like(taken), alike),
        }[self.params.merging]
        return merged(new, gone, into, own, weights, 1 + taken)


@METHODS.register("d2o", paper="Wan et al. 2024, arXiv:2406.13035")
class D2O(H2O):
    """H2O that merges what it evicts into the most alike of what it keeps, or DROPS the rest.

    The cosine u of an evicted key and the nearest kept one must reach a threshold: at first the
    mean u of what is evicted, then mean_ratio of each later mean, the rest the one before. A kept
    entry becomes the average of itself with weight e and of those merged with weights exp(u). The
    first sink_tokens stay, and nothing is merged into them.

    Lost: with demote "drop" what is not alike enough, and of what is merged its own weight; with
    "offload" nothing.
    Deviations: layers have even budgets (the paper's follow the variance of their attention, which
    is known of all layers too late here); entries of the window take part once they have left it;
    with demote "offload" nothing is lost and nothing merged; sinks are a page, where the authors
    keep 4 tokens; the weights e and exp(u) are not confirmed by a text that we have.
    """

    class Params(HeavyParams):
        """As h2o; mean_ratio: how much of the threshold a new mean is."""

        sink_tokens: Tokens = 16
        mean_ratio: float = Field(default=0.5, ge=0, le=1)

    def settled(self, new: Entries, both: Entries, chosen: Tensor) -> Entries:
        count = both.lengths[0]
        if self._offloads or chosen.shape[1] in (0, count):
            return new
        gone = both.select(left_out(chosen, count))
        into, alike = nearest(*(torch.stack(one.split("k")) for one in (gone, new)))
        mean, old = alike.mean(1), new.state.get("threshold")
        ratio = self.params.mean_ratio
        threshold = mean if old is None else ratio * mean + (1 - ratio) * old
        weights = alike.exp() * (alike >= threshold[:, None])
        own = torch.full_like(alike[:, :1], math.e).expand(-1, chosen.shape[1])
        return merged(new, gone, into, own, weights).with_state(threshold=threshold)


@METHODS.register("elastic_cache", paper="Liu et al. 2024, arXiv:2407.18121")
class ElasticCache(Evicting):
    """Keeps anchors of the prompt, with which their neighbours are averaged, and DROPS the rest.

    Anchors are the tokens that all queries of the prompt together attended most, in all heads
    together; each other token is averaged into the anchor nearest by position, of two the earlier.
    Into the first sink_tokens, which stay as they are, nothing is averaged.
    In the answer, what leaves the window enters at the end, and as much leaves at a fixed place,
    elastic_tokens before it, unmerged.

    Lost: with demote "drop" what tells merged tokens of the prompt apart, and of the answer as much
    as leaves the window; with "offload" nothing.
    Deviations: the window is that of all methods here (the paper keeps the last token alone); with
    demote "offload" nothing is lost and nothing merged; sinks are a page.
    """

    class Params(HeavyParams):
        """elastic_tokens: where an answer evicts, counted from the end of what is kept."""

        sink_tokens: Tokens = 16
        window_tokens: Tokens = 32
        elastic_tokens: Tokens = 25

    @property
    def needs(self) -> Needs:
        return super().needs | heavy_needs(self.params)

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        if seen is None:
            return self._moved_on(left if kept is None else kept.extended(left))
        first, count = self.params.sink_tokens, left.lengths[0]
        if self.room(count) == count:
            return left.copied()
        scores = seen.total_mass().sum(0)[first : first + count]
        chosen = best(scores, self.room(count)).sort().values.expand(left.num_heads, -1)
        new = left.select(chosen)
        if self._offloads:
            return new
        gone = left_out(chosen, count)
        into = _nearest_places(chosen[0], gone[0]).expand_as(gone)
        ones = torch.ones(left.num_heads, 1, device=left.k.device)
        return merged(new, left.select(gone), into, ones.expand_as(chosen), ones.expand_as(gone))

    def _moved_on(self, both: Entries) -> Entries:
        count = both.lengths[0]
        room = self.room(count)
        stays = max(0, room - self.params.elastic_tokens)
        ids = torch.arange(room, device=both.k.device)
        ids[stays:] += count - room
        return both.select(ids.expand(both.num_heads, -1))


def _nearest_places(chosen: Tensor, gone: Tensor) -> Tensor:
    """[n] places in chosen [K], ascending, of what lies nearest to gone [n]; of two the earlier."""
    after = torch.searchsorted(chosen, gone).clamp(max=len(chosen) - 1)
    before = (after - 1).clamp(min=0)
    nearer = (chosen[after] - gone).abs() < (chosen[before] - gone).abs()
    return torch.where(nearer, after, before)
