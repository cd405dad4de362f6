"""TidalDecode: a few layers choose cold entries, the layers behind them read the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from hybrid_kv.config import BudgetField, LayerList
from hybrid_kv.errors import IntegrityError
from hybrid_kv.index._base import KeyIndex, rank
from hybrid_kv.index.flat import FlatIndex
from hybrid_kv.methods.retrieval import ResidentParams, split_budget
from hybrid_kv.plugins import METHODS, Method, Placement
from hybrid_kv.types import (
    Demotion,
    Evidence,
    LayerShape,
    ModelInfo,
    Read,
    SearchResult,
    Tiers,
    TokenBudget,
)


class Choices:
    """Results of a step's searches in a layer, in their order: the same in every layer."""

    def __init__(self) -> None:
        self._found: list[Tensor] = []
        self._next = 0

    def begin(self, *, anew: bool) -> None:
        """A step of a layer, which chooses (anew) or reads what was chosen, from the first on."""
        self._next = 0
        if anew:
            self._found.clear()

    def note(self, ids: Tensor) -> None:
        """Ids [Hkv, M, K] that a search has found."""
        self._found.append(ids)

    def take(self) -> Tensor:
        """The ids of the search that corresponds to this one."""
        if self._next == len(self._found):
            raise IntegrityError(
                f"search {self._next + 1} of a step must follow one of the layer that chooses, "
                f"which made {len(self._found)}; the layers do not hold the same tokens"
            )
        self._next += 1
        return self._found[self._next - 1]


class SelectingIndex(FlatIndex):
    """Scores every key and notes the best."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(FlatIndex.Params(precision="stored"))
        self._choices = choices

    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        found = super()._find(queries, count, most)
        self._choices.note(found.ids[..., :count])
        return found


class ReusingIndex(KeyIndex):
    """Finds what another layer has chosen, by the true scores of its own keys."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(FlatIndex.Params())
        self._choices = choices

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        """Keys are looked up where they lie."""

    def _append(self, known: int) -> None:
        """As `_rebuild`."""

    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        ids = self._choices.take()
        heads, found = torch.arange(len(ids))[:, None, None], ids >= 0
        keys = self._keys[heads, ids.clamp_min(0)].float()
        scores = torch.matmul(keys, queries[..., None])[..., 0].masked_fill(~found, -torch.inf)
        scores, ids = rank(scores, ids, min(most, ids.shape[-1]))
        scored = int(found.sum())
        return SearchResult(ids, scores, scored, read_bytes=self._key_bytes(scored))


@METHODS.register("tidal_decode", paper="Yang et al. 2024, arXiv:2410.05076")
class TidalDecode(Method):
    """Selection layers choose cold entries by exact scores, later layers read the same ones.

    By query head, the top_k highest q . k; selection layers and those before attend everything.
    Check it on your model: of the best 100 keys of a head of SmolLM2-135M (8K tokens) all heads of
    the layer before together had chosen half, at 24K 42%, so that reuse finds little there.

    Kept: sinks and window on the device, everything else in host memory.
    Lost: nothing; layers behind a selection layer do not see what it did not choose.
    Deviations: entries lie in the cold tier, where the paper keeps them on the device. Under a
    budget (hybrid-kv eval) it is another method: the first layer chooses as well, and layers that
    choose read only what they chose, where the paper's attend everything, which no small budget
    allows.
    """

    class Params(ResidentParams):
        """top_k: cold entries that a head reads; selection_layers: that choose them;
        selection_reads: these read "all", or what they "selected".
        """

        top_k: BudgetField = 256
        selection_layers: LayerList = (2, 13)
        selection_reads: Literal["all", "selected"] = "all"

    def open(self, info: ModelInfo) -> None:
        tiered, self._choices = [one.layer_idx for one in info.layers], Choices()
        later = [[idx for idx in tiered if idx >= one] for one in self.params.selection_layers]
        self._selecting = {idx[0] for idx in later if idx}

    def tiers(self, shape: LayerShape, num_tokens: int) -> Tiers:
        return Tiers(host_tokens=num_tokens)

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        kind = SelectingIndex if layer_idx in self._selecting else ReusingIndex
        make, params = partial(kind, self._choices), self.params
        return Placement(
            *(params.sink_tokens, params.window_tokens),
            rest=Demotion.OFFLOAD,
            index=make,
            in_step=True,
        )

    def read(self, layer_idx: int, q: Tensor) -> Read:
        top_k, selects = self.params.top_k, layer_idx in self._selecting
        if top_k == "all" or layer_idx < min(self._selecting, default=layer_idx + 1):
            return Read(cold="all")
        self._choices.begin(anew=selects)
        every = selects and self.params.selection_reads == "all"
        return Read(cold=TokenBudget(top_k, 2**40 if every else None))

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        sinks, window, top_k = split_budget(tokens, page_size)
        sizes = {"sink_tokens": sinks, "window_tokens": window, "top_k": top_k}
        layers = (0, *filter(None, params.selection_layers))
        return cls.Params(selection_layers=layers, selection_reads="selected", **sizes)
