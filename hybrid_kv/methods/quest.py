"""Quest: all entries resident, the best pages read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hybrid_kv.config import BudgetField, Tokens
from hybrid_kv.config import Params as BaseParams
from hybrid_kv.methods.budget import split_budget
from hybrid_kv.plugins import METHODS, Method, Placement
from hybrid_kv.types import Evidence, Read


@METHODS.register("quest", paper="Tang et al. 2024, arXiv:2406.10774, section 3")
class Quest(Method):
    """Keeps everything resident and reads the pages with the highest upper bound on the score.

    bound[page] = sum over channels i of max(q[i] min[page, i], q[i] max[page, i]), the most that
    any key of the page can score; the page_budget pages of the highest bounds are read. As in the
    paper the first two layers are dense and the newest page is always read.

    Kept: everything on the device, and the smallest and largest number of each page's channels.
    Lost: nothing; a step does not see the pages that it does not read.
    Deviations: pages are chosen per KV head, by the largest bound in its group of query heads (the
    paper's models have one query head per KV head); sinks and window are on top of page_budget.
    """

    class Params(BaseParams):
        """page_budget: pages read beside sinks and window; dense_layers: layers read whole;
        sink_tokens, window_tokens: read by every step, multiples of page_size.
        """

        page_budget: BudgetField = 128
        dense_layers: Tokens = 2
        sink_tokens: Tokens = 0
        window_tokens: Tokens = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._dense, self._chosen = Read(), Read(params.page_budget)

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        return params.model_copy(update={"page_budget": "all"})

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        return Placement(
            sink_tokens=self.params.sink_tokens,
            window_tokens=self.params.window_tokens,
            digests=layer_idx >= self.params.dense_layers,
        )

    reads_alike = True

    def read(self, layer_idx: int, q: Tensor) -> Read:
        return self._dense if layer_idx < self.params.dense_layers else self._chosen

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        """No layer is dense: two of them would take a multiple of a small budget."""
        sinks, window, rest = split_budget(tokens, page_size, least=page_size)
        split = {
            "sink_tokens": sinks,
            "window_tokens": window,
            "page_budget": round(rest / page_size),
        }
        return params.model_copy(update={**split, "dense_layers": 0})
