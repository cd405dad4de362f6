"""Elastic Cache: anchors of the prompt take in their neighbours; an answer leaves at one place."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_kv.config import Tokens
from hybrid_kv.entries import Entries
from hybrid_kv.methods.evicting import Evicting
from hybrid_kv.methods.h2o import HeavyParams, heavy_needs
from hybrid_kv.methods.merging import left_out, merged
from hybrid_kv.methods.scores import best
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, Needs


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
