"""ShadowKV: chunks of the cold tier, found by landmarks, with outliers that are always read."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hybrid_kv.config import BudgetField, IndexConfig, Tokens
from hybrid_kv.methods.retrieval import ColdParams, RetrievalAttention, RetrievalParams
from hybrid_kv.plugins import METHODS


class _ShadowKVIndex(IndexConfig):
    kind: Literal["landmarks"] = "landmarks"


class _ShadowKVCold(ColdParams):
    top_k: BudgetField = 2048
    index: _ShadowKVIndex = Field(default="landmarks", validate_default=True)


@METHODS.register("shadowkv", paper="Sun et al. 2024, arXiv:2410.21465, section 4")
class ShadowKV(RetrievalAttention):
    """Attends the chunks whose mean keys score best, and outlier chunks in every step.

    weight[c] = max over the queries of a KV head of softmax(q . landmark[c] * scale), a landmark
    the mean key of 8 tokens; the best chunks, up to top_k tokens, are attended, among them the 48
    in which some key is least like the landmark by its cosine (index `landmarks`).

    Deviations: keys are attended as they are, from host memory beside the values, where the paper
    rebuilds those it found on the device from 160 of 1024 coefficients (shadowkv_keys has these,
    without a cold tier); so this is at least as exact, and moves twice the bytes. The landmarks'
    softmax has no scale, which changes the choice between query heads alone; outliers count within
    top_k; tokens of one step choose together.
    """

    class Params(RetrievalParams):
        """As retrieval_attention, with cold.index of kind landmarks."""

        window_tokens: Tokens = 32
        cold: _ShadowKVCold = Field(default_factory=_ShadowKVCold)
