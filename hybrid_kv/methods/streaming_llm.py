"""StreamingLLM: attention sinks and a recent window; everything else is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hybrid_kv.config import Params as BaseParams
from hybrid_kv.config import Tokens
from hybrid_kv.methods.budget import NO_END, split_budget
from hybrid_kv.plugins import METHODS, Method, Placement
from hybrid_kv.types import Demotion, Evidence, LayerShape, Read, Tiers


@METHODS.register("streaming_llm", paper="Xiao et al. 2023, arXiv:2309.17453, section 3.2")
class StreamingLLM(Method):
    """Keeps sinks and a recent window and DROPS all other entries.

    A query attends the first sink_tokens and the newest window_tokens, and nothing else.

    Kept: sinks and window.
    Lost: everything between them.
    Deviations: the window leaves by pages; keys keep the rotary positions they were written with,
    where the paper re-numbers them inside the cache, which matters beyond the trained context only.
    """

    class Params(BaseParams):
        """sink_tokens, window_tokens: kept from start and end; multiples of page_size."""

        sink_tokens: Tokens = 16
        window_tokens: Tokens = 1024

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        return params.model_copy(update={"window_tokens": NO_END})

    def tiers(self, shape: LayerShape, num_tokens: int) -> Tiers:
        return Tiers()

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        return Placement(
            sink_tokens=self.params.sink_tokens,
            window_tokens=self.params.window_tokens,
            rest=Demotion.DROP,
        )

    reads_alike = True

    def read(self, layer_idx: int, q: Tensor) -> Read:
        return Read()

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        sinks, window, rest = split_budget(tokens, page_size, least=0)
        window += round(rest / page_size) * page_size
        return params.model_copy(update={"sink_tokens": sinks, "window_tokens": window})
