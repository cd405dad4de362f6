"""Loki: the first principal components of the keys choose those that are attended."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hybrid_kv.config import IndexConfig
from hybrid_kv.methods.retrieval import ColdParams, RetrievalAttention, RetrievalParams
from hybrid_kv.plugins import METHODS


class _LokiIndex(IndexConfig):
    kind: Literal["pca"] = "pca"


class _LokiCold(ColdParams):
    index: _LokiIndex = Field(default="pca", validate_default=True)


@METHODS.register("loki", paper="Singhania et al. 2024, arXiv:2406.02542")
class Loki(RetrievalAttention):
    """Attends the keys that score best in their first principal components; nothing is lost.

    (q P) . (k P) with a fourth of the components ranks (index `pca`), and the best top_k are
    attended by their true scores.

    Deviations: components of the prompt's own keys, after RoPE, not of a calibration text; keys
    stay as they are beside their components.
    """

    class Params(RetrievalParams):
        """As retrieval_attention, with cold.index of kind pca."""

        cold: _LokiCold = Field(default_factory=_LokiCold)
