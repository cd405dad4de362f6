"""SparQ: the largest components of a query choose keys, the mean value stands for the others."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hybrid_kv.config import IndexConfig
from hybrid_kv.methods.retrieval import ColdParams, RetrievalAttention, RetrievalParams
from hybrid_kv.plugins import METHODS


class _SparQIndex(IndexConfig):
    kind: Literal["query_channels"] = "query_channels"


class _SparQCold(ColdParams):
    index: _SparQIndex = Field(default="query_channels", validate_default=True)
    estimate: Literal["none", "gaussian", "first_order", "index"] = "index"


@METHODS.register("sparq", paper="Ribar et al. 2023, arXiv:2312.04985")
class SparQ(RetrievalAttention):
    """Attends the keys that the largest components of the query score best, and a mean value.

    The top_k keys of the highest softmax(q[i] . K[i] / (tau sqrt(D))) are attended, i the
    num_channels largest |q|; the rest is alpha-blended as the mean value (index `query_channels`);
    nothing is lost.

    Deviations: sinks and window are attended exactly, beside that estimate, which is of the cold
    tier alone; keys are not kept by channel, so that all of them are read. Each query head
    chooses by itself, where the authors add up |q| and the scores over a group
    (cold.index.shared=true): alpha, known here of the cold tier alone, is then less certain (KL of
    smollm2 at 5% of 1K tokens .13, by itself .019; without the estimate .027 and .026).
    """

    class Params(RetrievalParams):
        """As retrieval_attention, with cold.index of kind query_channels,
        and cold.estimate.
        """

        cold: _SparQCold = Field(default_factory=_SparQCold)
