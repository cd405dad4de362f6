"""MagicPIG: the cold tier is sampled by hash tables, and a sample weighs 1 / its probability."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from hybrid_kv.config import BudgetField, Count, IndexConfig, Tokens
from hybrid_kv.config import Params as BaseParams
from hybrid_kv.index.hash_tables import tables_that_find
from hybrid_kv.methods.budget import split_budget
from hybrid_kv.methods.retrieval import RetrievalAttention
from hybrid_kv.plugins import METHODS, StandIn
from hybrid_kv.types import TokenBudget


class SamplingIndex(IndexConfig):
    """The kind of index that samples."""

    kind: Literal["lsh"] = "lsh"


class SampledColdParams(BaseParams):
    """max_tokens: of a head's samples only so many, the best by score; top_k: so few cold entries
    are attended whole ("all": any number); index: how they are sampled.
    """

    top_k: BudgetField = 100
    max_tokens: Count = 4096
    index: SamplingIndex = Field(default="lsh", validate_default=True)
    attend: ClassVar[str] = "cpu"
    stand_in: ClassVar[StandIn] = "scan"

    @property
    def budget(self) -> TokenBudget | Literal["all"]:
        top_k, most = self.top_k, self.max_tokens
        return "all" if top_k == "all" else TokenBudget(top_k, max(top_k, most))


@METHODS.register("magic_pig", paper="Chen et al. 2024, arXiv:2410.16179")
class MagicPig(RetrievalAttention):
    """Samples the cold tier by hash tables; a sample weighs 1 / its probability; nothing is lost.

    Attention over the cold tier is estimated by sum(v exp(l) / u) / sum(exp(l) / u), l the logit, u
    the probability of being sampled (see index `lsh`), and merged with sinks and window. num_bits
    and num_tables say how many are sampled. Deviation: no layer is exempt (in the paper two are).
    """

    class Params(BaseParams):
        """sink_tokens, window_tokens: stay on the device (multiples of page_size)."""

        sink_tokens: Tokens = 128
        window_tokens: Tokens = 512
        cold: SampledColdParams = SampledColdParams()

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        """So many tables, and at most so many bits, as if directions were random."""
        sinks, window, rest = split_budget(tokens, page_size)
        share, own = rest / max(1, context_tokens - sinks - window), params.cold.index.params
        bits, tables = tables_that_find(share, own.num_bits, own.num_tables)
        own = own.model_copy(update={"num_bits": bits, "num_tables": tables})
        index = params.cold.index.model_copy(update={"params": own})
        cold = SampledColdParams(index=index, top_k=1, max_tokens=4 * rest)
        return cls.Params(sink_tokens=sinks, window_tokens=window, cold=cold)
