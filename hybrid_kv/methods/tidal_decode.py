"""TidalDecode: a few layers choose cold entries, the layers behind them read the same ones."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor

from hybrid_kv.config import BudgetField, LayerList, Params, Tokens
from hybrid_kv.index.reuse import Choices, ReusingIndex, SelectingIndex
from hybrid_kv.methods.budget import split_budget
from hybrid_kv.plugins import METHODS, Method, Placement
from hybrid_kv.types import Demotion, Evidence, ModelInfo, Read, TokenBudget


class TidalParams(Params):
    """sink_tokens, window_tokens: resident, multiples of page_size; top_k: cold entries that a head
    reads; selection_layers: that choose them; selection_reads: "all", or what they "selected".
    """

    sink_tokens: Tokens = 128
    window_tokens: Tokens = 512
    top_k: BudgetField = 256
    selection_layers: LayerList = (2, 13)
    selection_reads: Literal["all", "selected"] = "all"


@METHODS.register("tidal_decode", paper="Yang et al. 2024, arXiv:2410.05076")
class TidalDecode(Method):
    """Selection layers choose cold entries by exact scores, later layers read the same ones.

    Layers up to the first selection layer attend everything, and so do selection layers; others the
    top_k cold entries of the highest q . k that the same query head had in the selection layer
    before. Nothing is lost. Deviation: entries lie in the cold tier. Check it on your model: of a
    SmolLM2-135M head's best 100 keys of 8K, all heads of the layer before had chosen but half.
    """

    Params = TidalParams

    def open(self, info: ModelInfo) -> None:
        layers, wanted = [one.layer_idx for one in info.layers], self.params.selection_layers
        later = ([idx for idx in layers if idx >= least] for least in wanted)
        self._selecting, self._choices = {idx[0] for idx in later if idx}, Choices()

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        kind = SelectingIndex if layer_idx in self._selecting else ReusingIndex
        sizes = self.params.sink_tokens, self.params.window_tokens
        return Placement(*sizes, rest=Demotion.OFFLOAD, index=partial(kind, self._choices))

    def read(self, layer_idx: int, q: Tensor) -> Read:
        top_k, all_of_it = self.params.top_k, self.params.selection_reads == "all"
        if top_k == "all" or layer_idx < min(self._selecting, default=layer_idx + 1):
            return Read(cold="all")
        selects = layer_idx in self._selecting
        self._choices.begin(anew=selects)
        return Read(cold=TokenBudget(top_k, 2**40 if selects and all_of_it else None))

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        """No layer attends everything: it would take a multiple of a small budget."""
        sinks, window, top_k = split_budget(tokens, page_size)
        update: dict[str, Any] = {"sink_tokens": sinks, "window_tokens": window, "top_k": top_k}
        layers = (0, *filter(None, params.selection_layers))
        update |= {"selection_layers": layers, "selection_reads": "selected"}
        return params.model_copy(update=update)
