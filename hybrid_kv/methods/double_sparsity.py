"""Double Sparsity: a few channels, the same for all tokens, choose the keys that are attended."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hybrid_kv.config import IndexConfig
from hybrid_kv.methods.retrieval import ColdParams, RetrievalAttention, RetrievalParams
from hybrid_kv.plugins import METHODS


class _DoubleSparsityIndex(IndexConfig):
    kind: Literal["label_channels"] = "label_channels"


class _DoubleSparsityCold(ColdParams):
    index: _DoubleSparsityIndex = Field(default="label_channels", validate_default=True)


@METHODS.register("double_sparsity", paper="Yang et al. 2024, arXiv:2408.07092")
class DoubleSparsity(RetrievalAttention):
    """Attends the keys that score best in a sixteenth of the channels; nothing is lost.

    Channels are those of the largest |q| |k| (index `label_channels`), held apart as label cache.

    Deviations: calibrated on the prompt by the mean sizes of queries and keys, not offline on a
    text; labels are in the precision of the keys; channels of a KV head, of all its query heads.
    """

    class Params(RetrievalParams):
        """As retrieval_attention, with cold.index of kind label_channels."""

        cold: _DoubleSparsityCold = Field(default_factory=_DoubleSparsityCold)
