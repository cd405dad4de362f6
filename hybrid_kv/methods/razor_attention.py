"""RazorAttention: retrieval heads keep everything, the others one entry for what they drop."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybrid_kv.entries import Entries
from hybrid_kv.methods.duo_attention import DuoAttention, DuoParams
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence


@METHODS.register("razor_attention", paper="Tang et al. 2024, arXiv:2407.15891")
class RazorAttention(DuoAttention):
    """Keeps everything of retrieval heads; of the others sinks and window, and DROPS their rest.

    In the place of the n entries that a head dropped stands their mean key and mean value, whose
    logit counts n times (bias log n).

    Kept: everything of the retrieval heads; of the others sinks, window and one mean.
    Lost: with demote "drop" what streaming heads had between these, but for its mean; with
    "offload" nothing.
    Deviations: heads are told apart as by duo_attention, not by echo and induction scores of a
    repeated random text (hybrid-kv heads measures induction on a text of yours); all heads have one
    window of a fixed size, where the paper gives each head one of its own; with demote "offload"
    nothing is dropped and no mean stands for it.
    """

    class Params(DuoParams):
        """As duo_attention; retrieval_ratio: heads kept whole (null: .15)."""

    usual_ratio = 0.15

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        new = super().absorb(layer_idx, row, kept, left, seen)
        drops = [not keeps for keeps in new.state["retrieves"].tolist()]
        if self._offloads or not left.lengths[0] or not any(drops):
            return new
        stood = [int(dropped and n > 0) for dropped, n in zip(drops, new.lengths, strict=True)]
        before = new.state if any(stood) else {}
        sums = dropped_sums(left, before)
        count = sums["dropped_count"]
        at = before.get("dropped_at", left.split("positions")[0][:1].clone())
        k, v = (
            (sums[name] / count).to(left.k.dtype)[:, None] for name in ("dropped_k", "dropped_v")
        )
        means = Entries.of(k, v, at, bias=count.log().expand(len(drops), 1))
        means = means.select([torch.full((1,), dropped) for dropped in drops])
        return new.extended(means).without_first(stood).with_state(**sums, dropped_at=at)


def dropped_sums(left: Entries, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of all that left the window: `dropped_k`, `dropped_v` [Hkv, D] and their `dropped_count`.

    In float32: what is added page by page to a mean in 16 bits would be lost.
    """
    sums = {
        f"dropped_{name}": torch.stack([rows.float().sum(0) for rows in left.split(name)])
        for name in ("k", "v")
    }
    sums["dropped_count"] = torch.full((), float(left.lengths[0]), device=left.k.device)
    return {name: value + before[name] if before else value for name, value in sums.items()}
