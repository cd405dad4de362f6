"""LOOK-M's text part: heavy hitters of the prompt, into which all that is dropped is merged."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hybrid_kv.config import Tokens
from hybrid_kv.entries import Entries
from hybrid_kv.methods.h2o import HeavyParams
from hybrid_kv.methods.merging import left_out, merged, nearest
from hybrid_kv.methods.merging_once import MergingOnce
from hybrid_kv.methods.scores import best
from hybrid_kv.plugins import METHODS


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
