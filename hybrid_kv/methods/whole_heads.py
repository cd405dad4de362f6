"""DuoAttention and RazorAttention: some heads keep all entries, the others sinks and window."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from hybrid_kv.config import Count, Tokens
from hybrid_kv.entries import Entries
from hybrid_kv.methods.evicting import Demoting, DemotingParams
from hybrid_kv.methods.head_scores import HeadChoice
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, ModelInfo, Needs


class DuoParams(DemotingParams):
    """heads: scores or masks by layer and KV head, a JSON file of them, or "prompt";
    observed_tokens: its queries that score then; retrieval_ratio: heads kept whole (null: half).
    """

    sink_tokens: Tokens = 64
    window_tokens: Tokens = 256
    heads: str | tuple[tuple[float, ...], ...] = "prompt"
    observed_tokens: Count = 64
    retrieval_ratio: Annotated[float, Field(ge=0, le=1)] | None = None

    def without_effect(self) -> dict[str, str]:
        given = self.heads != "prompt"
        return {"observed_tokens": "with heads that are given"} if given else {}


@METHODS.register("duo_attention", paper="Xiao et al. 2024, arXiv:2410.10819, section 2")
class DuoAttention(Demoting):
    """Keeps everything of retrieval heads, of all others sinks and window; DROPS their rest.

    score[h] = share of its attention that head h gives to what lies between sinks and window, in
    the last observed_tokens queries; the best retrieval_ratio of heads retrieve. Given scores
    compete over all layers, those of a prompt within a layer.

    Kept: everything of the retrieval heads; of the others sinks and window.
    Lost: with demote "drop" what streaming heads had between these; with "offload" nothing.
    Deviations: the paper trains a gate for each head on synthetic passkeys; here attention is
    looked at, at the end of a calibration text (hybrid-kv heads) or of the prompt; a prompt that
    fits in the window keeps all heads whole; sinks and window are those of all heads.
    """

    Params = DuoParams
    whole = ("retrieval_ratio", 1.0)
    usual_ratio = 0.5

    @property
    def needs(self) -> Needs:
        asked = self.params.observed_tokens if self.params.heads == "prompt" else 0
        return super().needs | Needs(last_queries=asked)

    def kept_tokens(self, num_tokens: int) -> int:
        params = self.params
        if params.retrieval_ratio is None and params.heads != "prompt":
            return num_tokens  # masks say how many heads, once they are read
        ratio = self.usual_ratio if params.retrieval_ratio is None else params.retrieval_ratio
        return math.ceil(ratio * num_tokens)

    def open(self, info: ModelInfo) -> None:
        ratio = self.params.retrieval_ratio
        self._heads = HeadChoice(self.params.heads, ratio, info, self.usual_ratio)

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        first, count = self.params.sink_tokens, left.lengths[0]
        state = kept.state if kept else self._heads.judge(layer_idx, left, seen, first)
        new = left.select([torch.full((count,), keeps) for keeps in state["retrieves"].tolist()])
        return kept.extended(new) if kept else new.with_state(**state)

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        params, kept = cls.split(params, tokens, page_size)
        stored = max(1, context_tokens - params.sink_tokens - params.window_tokens)
        return params.model_copy(update={"retrieval_ratio": min(1.0, kept / stored)})


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
