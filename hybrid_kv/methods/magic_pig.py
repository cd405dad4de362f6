"""MagicPIG: the cold tier is sampled by hash tables, and a sample weighs 1 / its probability."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from hybrid_kv.config import BudgetField, Count, IndexConfig, Params
from hybrid_kv.index.hashing import tables_that_find
from hybrid_kv.methods.budget import ResidentParams, split_budget
from hybrid_kv.methods.retrieval import RetrievalAttention
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import TokenBudget


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
