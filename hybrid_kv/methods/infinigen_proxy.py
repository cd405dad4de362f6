"""InfiniGen's selection, as a plain proxy: a part of the turned columns chooses keys."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hybrid_kv.config import IndexConfig
from hybrid_kv.methods.retrieval import ColdParams, RetrievalAttention, RetrievalParams
from hybrid_kv.plugins import METHODS


class _InfiniGenProxyIndex(IndexConfig):
    kind: Literal["skewed_channels"] = "skewed_channels"


class _InfiniGenProxyCold(ColdParams):
    index: _InfiniGenProxyIndex = Field(default="skewed_channels", validate_default=True)


@METHODS.register("infinigen_proxy", paper="after InfiniGen, Lee et al. 2024, arXiv:2406.19707")
class InfiniGenProxy(RetrievalAttention):
    """Attends the keys that score best in the heaviest columns after a rotation; A PLAIN PROXY.

    InfiniGen turns the weights of queries and keys offline, and guesses the queries of a layer from
    the input of the layer before, to fetch ahead. Here the prompt's queries give the rotation
    (index `skewed_channels`), the true query asks, and top_k entries are attended, not those within
    a margin of the best. So its choice is better than the paper's, and nothing is fetched ahead.

    Deviations: all of these.
    """

    class Params(RetrievalParams):
        """As retrieval_attention, with cold.index of kind skewed_channels."""

        cold: _InfiniGenProxyCold = Field(default_factory=_InfiniGenProxyCold)
