"""KVMerger: neighbours with like keys become one entry, nearest to the one attended most."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from hybrid_kv.config import Tokens
from hybrid_kv.entries import Entries
from hybrid_kv.methods.h2o import HeavyParams
from hybrid_kv.methods.merging_once import MergingOnce
from hybrid_kv.methods.scores import best
from hybrid_kv.plugins import METHODS


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
    return new.with_columns(**columns, bias=sizes.log().flatten())
