"""RetroInfer: clusters of keys, the best attended and the others estimated."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hybrid_kv.config import IndexConfig
from hybrid_kv.methods.retrieval import ColdParams, RetrievalAttention, RetrievalParams
from hybrid_kv.plugins import METHODS


class _RetroInferIndex(IndexConfig):
    kind: Literal["clusters"] = "clusters"


class _RetroInferCold(ColdParams):
    index: _RetroInferIndex = Field(default="clusters", validate_default=True)
    estimate: Literal["none", "gaussian", "first_order", "index"] = "index"


@METHODS.register("retroinfer", paper="Chen et al. 2025, arXiv:2505.02922")
class RetroInfer(RetrievalAttention):
    """Attends the best clusters of keys, and of the others an estimate by their centroids.

    A cluster that is not read counts as s exp(scale q . c) with its mean value, c the mean of its s
    keys (index `clusters`), merged by log-sum-exp with what was read; nothing is lost.

    Deviations: all clusters are estimated, in the paper the next best fourth; of the last cluster
    the best keys are read, up to top_k in all, and the others estimated; no block cache on the
    device.
    """

    class Params(RetrievalParams):
        """As retrieval_attention, with cold.index of kind clusters,
        and cold.estimate.
        """

        cold: _RetroInferCold = Field(default_factory=_RetroInferCold)
