"""ByLayer: layers are given to different methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator
from torch import Tensor

from hybrid_kv.config import MethodConfig
from hybrid_kv.config import Params as BaseParams
from hybrid_kv.entries import Entries
from hybrid_kv.methods.composing import check_spans, each, named, needs_of, of_layers, places
from hybrid_kv.plugins import METHODS, Method, Placement
from hybrid_kv.types import Evidence, Foresight, LayerShape, ModelInfo, Needs, Read, Tiers


@METHODS.register("by_layer", paper="this project; Quest, arXiv:2406.10774, keeps two layers dense")
class ByLayer(Method):
    """Gives layers to different methods; what is kept and LOST is what these say.

    layers: {"0-1": "full", "rest": {"method": "snapkv", "budget_tokens": 512}} keeps the first two
    layers whole. A method of several layers knows of these alone: pyramidkv builds its pyramid over
    them. Layers are searched ahead where all methods say the same about it.

    Kept: by layer what its method keeps.
    Lost: by layer what its method loses.
    Deviations: none; a combinator.
    """

    class Params(BaseParams):
        """layers: by layers ("0", "0-3", "2,5", "rest") a method, by name or as a group."""

        layers: dict[str, MethodConfig] = Field(
            default={"0-1": "streaming_llm", "rest": "snapkv"}, min_length=1, validate_default=True
        )

        @model_validator(mode="after")
        def _layers_are_named(self) -> Any:
            places(self.layers, "layer")
            return self

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._spans = places(params.layers, "layer")
        self._parts: dict[str, Method] = {n: part.build() for n, part in params.layers.items()}

    def of_layer(self, layer_idx: int) -> Method:
        return self._parts[named(layer_idx, self._spans, "layer", "by_layer")].of_layer(layer_idx)

    @property
    def needs(self) -> Needs:
        return needs_of(self._parts.values())

    @property
    def foresight(self) -> Foresight | None:
        found = {part.foresight for part in self._parts.values()}
        return found.pop() if len(found) == 1 else None

    def tiers(self, shape: LayerShape, num_tokens: int) -> Tiers:
        return self.of_layer(shape.layer_idx).tiers(shape, num_tokens)

    def index_bytes_per_token(self, shape: LayerShape, num_tokens: int) -> int:
        return self.of_layer(shape.layer_idx).index_bytes_per_token(shape, num_tokens)

    def open(self, info: ModelInfo) -> None:
        layers = [shape.layer_idx for shape in info.layers]
        check_spans(self._spans, layers, "layer")
        owners = {idx: named(idx, self._spans, "layer", "by_layer") for idx in layers}
        for name, part in self._parts.items():
            own = of_layers(info, [idx for idx, owner in owners.items() if owner == name])
            if own.layers:
                part.open(own)

    def write(
        self, layer_idx: int, k: Tensor, v: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.of_layer(layer_idx).write(layer_idx, k, v, positions)

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        return self.of_layer(layer_idx).seal(layer_idx, evidence)

    def read(self, layer_idx: int, q: Tensor) -> Read:
        return self.of_layer(layer_idx).read(layer_idx, q)

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries | None:
        return self.of_layer(layer_idx).absorb(layer_idx, row, kept, left, seen)

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        return each(params, "layers", lambda kind, own: kind.full_budget(own))

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        """Every layer gets the budget; those of a method that attends everything do not keep it."""
        sizes = {"context_tokens": context_tokens, "page_size": page_size}
        return each(params, "layers", lambda kind, own: kind.at_budget(own, tokens, **sizes))
