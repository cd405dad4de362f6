"""D2O: heavy hitters, into which what is dropped is merged where it is alike."""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from hybrid_kv.config import Tokens
from hybrid_kv.entries import Entries
from hybrid_kv.methods.h2o import H2O, HeavyParams
from hybrid_kv.methods.merging import left_out, merged, nearest
from hybrid_kv.plugins import METHODS


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
