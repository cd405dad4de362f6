"""Retrieval by indexes that others are compared with: exact search, and two of Faiss."""

from __future__ import annotations

from pydantic import Field

from hybrid_kv.config import IndexConfig
from hybrid_kv.methods.retrieval import ColdParams, RetrievalAttention, RetrievalParams
from hybrid_kv.plugins import METHODS


class _FlatCold(ColdParams):
    index: IndexConfig = Field(default="flat", validate_default=True)


@METHODS.register("flat", paper="exact search; baseline of arXiv:2409.10516, section 4")
class Flat(RetrievalAttention):
    """Retrieval by exact top-k over all cold keys, one scan per group of query heads.

    The top_k highest q . k of each query head are attended, beside sinks and window.

    Deviations: none; it is the paper's exact baseline.
    """

    class Params(RetrievalParams):
        """As retrieval_attention, with cold.index of kind flat."""

        cold: _FlatCold = Field(default_factory=_FlatCold)


class _IvfCold(ColdParams):
    index: IndexConfig = Field(default="ivf", validate_default=True)


class _HnswCold(ColdParams):
    index: IndexConfig = Field(default="hnsw", validate_default=True)


@METHODS.register("ivf", paper="Douze et al. 2024 (Faiss), arXiv:2401.08281")
class Ivf(RetrievalAttention):
    """Retrieval by an inverted-file index (Faiss).

    Keys lie in lists by their nearest centroid; the nprobe lists nearest to the query are scored.

    Deviations: none; lists and probes are parameters of Faiss.
    """

    class Params(RetrievalParams):
        """As retrieval_attention, with cold.index of kind ivf."""

        cold: _IvfCold = Field(default_factory=_IvfCold)


@METHODS.register("hnsw", paper="Malkov and Yashunin 2016, arXiv:1603.09320")
class Hnsw(RetrievalAttention):
    """Retrieval by a small-world graph built from keys alone (Faiss).

    A greedy walk from layer to layer of neighbours, with a list of ef_search candidates.

    Deviations: none; degree and widths are parameters of Faiss.
    """

    class Params(RetrievalParams):
        """As retrieval_attention, with cold.index of kind hnsw."""

        cold: _HnswCold = Field(default_factory=_HnswCold)
