"""ReKV: frames of a stream, found by their mean key for all heads of a layer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hybrid_kv.config import BudgetField, IndexConfig
from hybrid_kv.methods.retrieval import ColdParams, RetrievalAttention, RetrievalParams
from hybrid_kv.plugins import METHODS


class _ReKVIndex(IndexConfig):
    kind: Literal["frames"] = "frames"


class _ReKVCold(ColdParams):
    top_k: BudgetField = 64 * 196
    index: _ReKVIndex = Field(default="frames", validate_default=True)


@METHODS.register("rekv", paper="Di et al. 2025, arXiv:2503.00540")
class ReKV(RetrievalAttention):
    """Attends the frames whose mean key is most like the mean query of a layer; nothing is lost.

    A frame is a block of cold.index.page_size tokens; its vector is the mean of its keys, all heads
    behind each other, and the cosine with the mean query decides for all of them (index `frames`).
    cold.top_k 12544 is the authors' 64 frames of 196 tokens.

    Deviations: chosen anew in every step, by its query, not once a question; frames begin where the
    cold tier does; the prompt is attended whole, not in a sliding window; no disk. A top_k that is
    no multiple of a frame, as budgets set it, reads of the frames it chose the top_k entries that
    score best, for each query head its own; below one frame these are single entries of one.
    """

    class Params(RetrievalParams):
        """As retrieval_attention, with cold.index of kind frames."""

        cold: _ReKVCold = Field(default_factory=_ReKVCold)
