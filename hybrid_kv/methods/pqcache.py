"""PQCache: product quantisation of the keys chooses those that are attended."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hybrid_kv.config import IndexConfig
from hybrid_kv.methods.retrieval import ColdParams, RetrievalAttention, RetrievalParams
from hybrid_kv.plugins import METHODS


class _PQCacheIndex(IndexConfig):
    kind: Literal["pq"] = "pq"


class _PQCacheCold(ColdParams):
    index: _PQCacheIndex = Field(default="pq", validate_default=True)


@METHODS.register("pqcache", paper="Zhang et al. 2024, arXiv:2407.12820")
class PQCache(RetrievalAttention):
    """Attends the keys whose product quantisation scores best; nothing is lost.

    A key is cut into num_parts, each of which stands for one of 2 ** num_bits centroids (index
    `pq`); the best top_k by these are attended themselves.

    Deviations: k-means runs when the prompt is complete, not meanwhile; no cache of blocks; each
    query head chooses by itself.
    """

    class Params(RetrievalParams):
        """As retrieval_attention, with cold.index of kind pq."""

        cold: _PQCacheCold = Field(default_factory=_PQCacheCold)
