"""Methods that are an index kind with its defaults: the paper's way to find the keys to attend.

Each attends what its index finds, and drops nothing. What its docstring says beyond that is where
it deviates from the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field, create_model

from hybrid_kv.config import BudgetField, Count, IndexConfig, Params
from hybrid_kv.index.hashing import tables_that_find
from hybrid_kv.methods.retrieval import (
    ColdParams,
    ResidentParams,
    RetrievalAttention,
    RetrievalParams,
    split_budget,
)
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import TokenBudget

AnyParams = TypeVar("AnyParams", bound=Params)


def _params(
    kind: str, *, fixed: bool = True, window_tokens: int | None = None, **cold: Any
) -> type[RetrievalParams]:
    """Settings of `retrieval_attention` with an index kind and other defaults.

    Args:
        fixed: no other kind can be chosen.
        window_tokens: its default, where it is another.
        cold: defaults in the group `cold`, by name.
    """
    index: Any = IndexConfig
    if fixed:
        only: Any = Literal[kind]
        index = _made(f"_{kind}_index", IndexConfig, kind=(only, kind))
    fields = _with_defaults(ColdParams, cold)
    fields["index"] = index, Field(default=kind, validate_default=True)
    group: Any = _made(f"_{kind}_cold", ColdParams, **fields)
    outer = {} if window_tokens is None else {"window_tokens": window_tokens}
    fields = _with_defaults(RetrievalParams, outer)
    fields["cold"] = group, Field(default_factory=group)
    made = _made(f"_{kind}_params", RetrievalParams, **fields)
    beside = ", and estimate" if "estimate" in cold else ""
    made.__doc__ = f"As retrieval_attention, with index of kind {kind}{beside}."
    return made


def _made(name: str, base: type[AnyParams], **fields: Any) -> type[AnyParams]:
    """A class under its name in this module, where pickle looks for it."""
    made: type[AnyParams] = create_model(name, __base__=base, __module__=__name__, **fields)
    globals()[name] = made
    return made


def _with_defaults(params: type[Params], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Definitions of fields as `params` has them, with other defaults."""
    fields = {name: copy(params.model_fields[name]) for name in defaults}
    for name, default in defaults.items():
        fields[name].default = default
    return {name: (field.annotation, field) for name, field in fields.items()}


@METHODS.register("flat", paper="exact search; baseline of arXiv:2409.10516, section 4")
class Flat(RetrievalAttention):
    """Retrieval by exact top-k over all cold keys, one scan per group of query heads.

    The top_k highest q . k of each query head are attended, beside sinks and window.

    Deviations: none; it is the paper's exact baseline.
    """

    Params = _params("flat", fixed=False)


@METHODS.register("ivf", paper="Douze et al. 2024 (Faiss), arXiv:2401.08281")
class Ivf(RetrievalAttention):
    """Retrieval by an inverted-file index (Faiss).

    Keys lie in lists by their nearest centroid; the nprobe lists nearest to the query are scored.

    Deviations: none; lists and probes are parameters of Faiss.
    """

    Params = _params("ivf", fixed=False)


@METHODS.register("hnsw", paper="Malkov and Yashunin 2016, arXiv:1603.09320")
class Hnsw(RetrievalAttention):
    """Retrieval by a small-world graph built from keys alone (Faiss).

    A greedy walk from layer to layer of neighbours, with a list of ef_search candidates.

    Deviations: none; degree and widths are parameters of Faiss.
    """

    Params = _params("hnsw", fixed=False)


@METHODS.register("pqcache", paper="Zhang et al. 2024, arXiv:2407.12820")
class PQCache(RetrievalAttention):
    """Attends the keys whose product quantisation scores best; nothing is lost.

    A key is cut into num_parts, each of which stands for one of 2 ** num_bits centroids (index
    `pq`); the best top_k by these are attended themselves.

    Deviations: k-means runs when the prompt is complete, not meanwhile; no cache of blocks; each
    query head chooses by itself.
    """

    Params = _params("pq")


@METHODS.register("loki", paper="Singhania et al. 2024, arXiv:2406.02542")
class Loki(RetrievalAttention):
    """Attends the keys that score best in their first principal components; nothing is lost.

    (q P) . (k P) with a fourth of the components ranks (index `pca`), and the best top_k are
    attended by their true scores.

    Deviations: components of the prompt's own keys, after RoPE, not of a calibration text; keys
    stay as they are beside their components.
    """

    Params = _params("pca")


@METHODS.register("ctkvr", paper="Lu et al. 2025, arXiv:2512.15550")
class CTkvr(RetrievalAttention):
    """Attends the best keys on the lists of those prompt queries that are most like the query.

    The last queries of the prompt are centroids, each with a list of its best keys; the lists of
    the nearest are joined and ranked by true scores (index `query_lists`); nothing is lost, but a
    key on no list is not found.

    Deviations: query heads of a group share their centroids; keys of the answer get on the lists
    too.
    """

    Params = _params("query_lists")


@METHODS.register("double_sparsity", paper="Yang et al. 2024, arXiv:2408.07092")
class DoubleSparsity(RetrievalAttention):
    """Attends the keys that score best in a sixteenth of the channels; nothing is lost.

    Channels are those of the largest |q| |k| (index `label_channels`), held apart as label cache.

    Deviations: calibrated on the prompt by the mean sizes of queries and keys, not offline on a
    text; labels are in the precision of the keys; channels of a KV head, of all its query heads.
    """

    Params = _params("label_channels")


@METHODS.register("infinigen_proxy", paper="after InfiniGen, Lee et al. 2024, arXiv:2406.19707")
class InfiniGenProxy(RetrievalAttention):
    """Attends the keys that score best in the heaviest columns after a rotation; A PLAIN PROXY.

    InfiniGen turns the weights of queries and keys offline, and guesses the queries of a layer from
    the input of the layer before, to fetch ahead. Here the prompt's queries give the rotation
    (index `skewed_channels`), the true query asks, and top_k entries are attended, not those within
    a margin of the best. So its choice is better than the paper's, and nothing is fetched ahead.

    Deviations: all of these.
    """

    Params = _params("skewed_channels")


@METHODS.register("infllm", paper="Xiao et al. 2024, arXiv:2402.04617")
class InfLLM(RetrievalAttention):
    """Retrieval of whole blocks, by the representative keys of each; nothing is lost.

    Score of a block: mean of q . k over its representatives. top_k 2048 is the paper's 16
    blocks of 128 tokens.

    Deviations: those of the index (`blocks`); keys keep the positions they were written with, where
    the paper gives all that is retrieved one position; what is found is attended on the host;
    sinks and window are this project's; only sampled queries judge which
    keys stand for a block; each query head chooses by itself. A top_k that is no multiple of a
    block, as budgets set it, reads of the blocks it chose the top_k entries that score best; below
    one block these are single entries of one.
    """

    Params = _params("blocks", fixed=False, top_k=2048)


@METHODS.register("rekv", paper="Di et al. 2025, arXiv:2503.00540")
class ReKV(RetrievalAttention):
    """Attends the frames whose mean key is most like the mean query of a layer; nothing is lost.

    A frame is a block of index.page_size tokens; its vector is the mean of its keys, all heads
    behind each other, and the cosine with the mean query decides for all of them (index `frames`).
    top_k 12544 is the authors' 64 frames of 196 tokens.

    Deviations: chosen anew in every step, by its query, not once a question; frames begin where the
    cold tier does; the prompt is attended whole, not in a sliding window; no disk. A top_k that is
    no multiple of a frame, as budgets set it, reads of the frames it chose the top_k entries that
    score best, for each query head its own; below one frame these are single entries of one.
    """

    Params = _params("frames", top_k=64 * 196)


@METHODS.register("retroinfer", paper="Chen et al. 2025, arXiv:2505.02922")
class RetroInfer(RetrievalAttention):
    """Attends the best clusters of keys, and of the others an estimate by their centroids.

    A cluster that is not read counts as s exp(scale q . c) with its mean value, c the mean of its s
    keys (index `clusters`), merged by log-sum-exp with what was read; nothing is lost.

    Deviations: all clusters are estimated, in the paper the next best fourth; of the last cluster
    the best keys are read, up to top_k in all, and the others estimated; no block cache on the
    device.
    """

    Params = _params("clusters", estimate="index")


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

    Params = _params("landmarks", window_tokens=32, top_k=2048)


@METHODS.register("sparq", paper="Ribar et al. 2023, arXiv:2312.04985")
class SparQ(RetrievalAttention):
    """Attends the keys that the largest components of the query score best, and a mean value.

    The top_k keys of the highest softmax(q[i] . K[i] / (tau sqrt(D))) are attended, i the
    num_channels largest |q|; the rest is alpha-blended as the mean value (index `query_channels`);
    nothing is lost.

    Deviations: sinks and window are attended exactly, beside that estimate, which is of the cold
    tier alone; keys are not kept by channel, so that all of them are read. Each query head
    chooses by itself, where the authors add up |q| and the scores over a group
    (index.shared=true): alpha, known here of the cold tier alone, is then less certain (KL of
    smollm2 at 5% of 1K tokens .13, by itself .019; without the estimate .027 and .026).
    """

    Params = _params("query_channels", estimate="index")


class _SamplingIndex(IndexConfig):
    kind: Literal["lsh"] = "lsh"


class SampledColdParams(Params):
    """max_tokens: of a head's samples only so many, the best by score; top_k: so few cold entries
    are attended whole ("all": any number); index: how they are sampled.
    """

    top_k: BudgetField = 100
    max_tokens: Count = 4096
    index: _SamplingIndex = Field(default="lsh", validate_default=True)
    select: ClassVar[str] = "auto"
    why_host: ClassVar[str] = "has no hash tables; they lie on the host"
    estimate: ClassVar[str] = "none"  # samples stand for the others
    foresight: ClassVar[None] = None  # a sample is one of the query that drew it

    @property
    def budget(self) -> TokenBudget | Literal["all"]:
        top_k = self.top_k
        return "all" if top_k == "all" else TokenBudget(top_k, max(top_k, self.max_tokens))


@METHODS.register("magic_pig", paper="Chen et al. 2024, arXiv:2410.16179")
class MagicPig(RetrievalAttention):
    """Samples the cold tier by hash tables; a sample weighs 1 / its probability; nothing is lost.

    Attention over the cold tier is estimated by sum(v exp(l) / u) / sum(exp(l) / u), l the logit, u
    the probability of being sampled (see index `lsh`), and merged with sinks and window. num_bits
    and num_tables say how many are sampled.

    Lost: nothing; a step sees the entries that it sampled.
    Deviations: no layer is exempt (in the paper two are); one draw (seed) serves a cache;
    max_tokens cuts to the best; after a fourth more keys all are hashed again in one step.
    """

    class Params(ResidentParams):
        """cold: everything but sinks and window."""

        cold: SampledColdParams = Field(default_factory=SampledColdParams)

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        sinks, window, rest = split_budget(tokens, page_size)
        share, own = rest / max(1, context_tokens - sinks - window), params.cold.index.params
        bits, tables = tables_that_find(share, own.num_bits, own.num_tables)
        index = {"kind": "lsh", "num_bits": bits, "num_tables": tables, "seed": own.seed}
        cold = SampledColdParams(index=index, top_k=1, max_tokens=4 * rest)
        return cls.Params(sink_tokens=sinks, window_tokens=window, cold=cold)
