"""CTkvr: lists of the keys that the prompt's last queries scored highest."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hybrid_kv.config import IndexConfig
from hybrid_kv.methods.retrieval import ColdParams, RetrievalAttention, RetrievalParams
from hybrid_kv.plugins import METHODS


class _CTkvrIndex(IndexConfig):
    kind: Literal["query_lists"] = "query_lists"


class _CTkvrCold(ColdParams):
    index: _CTkvrIndex = Field(default="query_lists", validate_default=True)


@METHODS.register("ctkvr", paper="Lu et al. 2025, arXiv:2512.15550")
class CTkvr(RetrievalAttention):
    """Attends the best keys on the lists of those prompt queries that are most like the query.

    The last queries of the prompt are centroids, each with a list of its best keys; the lists of
    the nearest are joined and ranked by true scores (index `query_lists`); nothing is lost, but a
    key on no list is not found.

    Deviations: query heads of a group share their centroids; keys of the answer get on the lists
    too.
    """

    class Params(RetrievalParams):
        """As retrieval_attention, with cold.index of kind query_lists."""

        cold: _CTkvrCold = Field(default_factory=_CTkvrCold)
