"""DuoAttention: retrieval heads keep everything, streaming heads only sinks and window."""

import math
from typing import Annotated, Any

import torch
from pydantic import Field

from hybrid_kv.config import Count, Tokens
from hybrid_kv.entries import Entries
from hybrid_kv.methods.demoting import Demoting, DemotingParams
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
