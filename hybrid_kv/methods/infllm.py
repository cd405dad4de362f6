"""InfLLM: blocks in host memory, found by a few representative keys each."""

from __future__ import annotations

from pydantic import Field

from hybrid_kv.config import BudgetField, IndexConfig
from hybrid_kv.methods.retrieval import ColdParams, RetrievalAttention, RetrievalParams
from hybrid_kv.plugins import METHODS


class _BlocksCold(ColdParams):
    top_k: BudgetField = 2048
    index: IndexConfig = Field(default="blocks", validate_default=True)


@METHODS.register("infllm", paper="Xiao et al. 2024, arXiv:2402.04617")
class InfLLM(RetrievalAttention):
    """Retrieval of whole blocks, by the representative keys of each; nothing is lost.

    Score of a block: mean of q . k over its representatives. cold.top_k 2048 is the paper's 16
    blocks of 128 tokens.

    Deviations: those of the index (`blocks`); keys keep the positions they were written with, where
    the paper gives all that is retrieved one position; what is found is attended on the host;
    sinks and window are this project's; only sampled queries judge which
    keys stand for a block; each query head chooses by itself. A top_k that is no multiple of a
    block, as budgets set it, reads of the blocks it chose the top_k entries that score best; below
    one block these are single entries of one.
    """

    class Params(RetrievalParams):
        """As retrieval_attention, with cold.index of kind blocks."""

        cold: _BlocksCold = Field(default_factory=_BlocksCold)
