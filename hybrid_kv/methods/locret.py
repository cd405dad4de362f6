"""Locret: entries by what trained heads foretell of their weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from hybrid_kv.config import BudgetField
from hybrid_kv.entries import Entries
from hybrid_kv.errors import ConfigError
from hybrid_kv.methods.evicting import Evicting, EvictingParams
from hybrid_kv.methods.retaining_heads import NO_HEADS, RetainingHeads
from hybrid_kv.methods.scores import best
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, ModelInfo, Needs

_EVERY = 1 << 40
"""Queries: those of the whole prompt."""
_TOKENS = 4096
"""Scored at once: what the heads read of a token is as large as several KV entries in float32."""


@METHODS.register("locret", paper="Huang et al. 2024, arXiv:2410.01805, section 3")
class Locret(Evicting):
    """Keeps what heads that were trained for it say will be attended, and DROPS the rest.

    score[n] of a KV head is an output of fc2(silu(fc1([q, k, v]))), of all query, key and value
    channels of token n in its layer, before RoPE; the best of a head stay, and everything later.

    Kept: of the prompt the best of each KV head; sinks, window and all of the answer.
    Lost: with demote "drop" the prompt's others; with "offload" nothing.
    Deviations: the authors evict while they read, chunk by chunk, so that later chunks do not see
    what was dropped, and hold the last 2500 tokens back for that; here the prompt is computed
    exactly and chosen from once. Their window is of 100 tokens, ours of 32.
    """

    class Params(EvictingParams):
        """heads: a .safetensors or PyTorch file of the trained heads, fc1 and fc2 by layer."""

        heads: str = ""
        budget_tokens: BudgetField = 6000

    @classmethod
    def lacks(cls, params: Any) -> str | None:
        chooses = params.budget_tokens != "all"
        return NO_HEADS if chooses and not params.heads else None

    @property
    def needs(self) -> Needs:
        scores = Needs(sampled_queries=_EVERY, rotary=True)
        return super().needs | (Needs() if self.params.budget_tokens == "all" else scores)

    def open(self, info: ModelInfo) -> None:
        if self.params.budget_tokens == "all":
            return
        for one in info.layers:
            rotary = info.rotary_of(one.layer_idx)
            if rotary.reason and not rotary.still:
                raise ConfigError(
                    "method 'locret' scores queries and keys before RoPE, got a model whose layer "
                    f"{one.layer_idx} cannot be turned back: {rotary.reason}; choose 'snapkv'"
                )
        self._info, self._heads = info, RetainingHeads.load(self.params.heads, info)

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        if seen is None:
            return (kept or Entries.empty(left)).extended(left)
        count = left.lengths[0]
        if (room := self.room(count)) >= count:
            return left.copied()
        return left.select(best(self._scores(layer_idx, left, seen), room))

    def _scores(self, layer_idx: int, left: Entries, seen: Evidence) -> Tensor:
        """[Hkv, N] of what left the window."""
        at, rotary = left.split("positions")[0], self._info.rotary_of(layer_idx)
        k, v = (torch.stack(left.split(column)) for column in ("k", "v"))
        assert seen.sampled_queries is not None, "all of the prompt's"
        into, out = self._heads.of(layer_idx, k.device)
        scores = k.new_empty(len(out), len(at), dtype=torch.float32)
        for some in torch.arange(len(at)).split(_TOKENS):
            own, of = at[some], slice(int(some[0]), int(some[-1]) + 1)
            q = rotary.turn(seen.sampled_queries[:, own].float(), -own)
            states = torch.cat([q, rotary.turn(k[:, of].float(), -own), v[:, of].float()])
            hidden = silu(states.transpose(0, 1).flatten(1) @ into.mT)  # from [N, (Hq + 2 Hkv) * D]
            scores[:, of] = out @ hidden.mT
        return scores
