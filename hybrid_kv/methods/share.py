"""Share: layers keep the tokens that another layer chose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field
from torch import Tensor

from hybrid_kv.config import LayerList, MethodConfig
from hybrid_kv.config import Params as BaseParams
from hybrid_kv.entries import Entries
from hybrid_kv.errors import ConfigError, MethodError
from hybrid_kv.methods.composing import PROMPT_CHOOSERS, each
from hybrid_kv.plugins import METHODS, Method, Placement
from hybrid_kv.types import Evidence, Foresight, LayerShape, ModelInfo, Needs, Read, Tiers


@METHODS.register("share", paper="this project; after TidalDecode, arXiv:2410.05076")
class Share(Method):
    """Lets a few layers choose what stays of the prompt, and those behind them keep the same.

    When the prompt ends a choosing layer keeps what `of` says; a layer behind it keeps, by KV head,
    entries of the same positions, and looks at no weights of its own. Layers before the first
    choosing one choose for themselves.

    Kept: the positions that the choosing layer kept; sinks, window and all of the answer.
    Lost: what the method says of the choosing layer, in all that follow it.
    Deviations: none; a combinator.
    """

    class Params(BaseParams):
        """of: a method that chooses when the prompt ends, by name or as a group;
        selection_layers: those that choose.
        """

        of: MethodConfig = Field(default="snapkv", validate_default=True)
        selection_layers: LayerList = (0, 2, 13)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._part = params.of.build()
        if not isinstance(self._part, PROMPT_CHOOSERS):
            raise ConfigError(
                "share must have a method that chooses when the prompt ends, for what follows "
                f"weights differs by layer, got {params.of.method}; choose snapkv or one of its "
                "kin, or zipvl"
            )
        # By chooser and row the positions [K_h] by KV head; wanted until the layers behind it have
        # ended their prompts, which they do before anything else happens to a row.
        self._chosen: dict[tuple[int, int], list[Tensor]] = {}

    @property
    def needs(self) -> Needs:
        return self._part.needs  # type: ignore[no-any-return]

    @property
    def foresight(self) -> Foresight | None:
        return self._part.foresight  # type: ignore[no-any-return]

    def tiers(self, shape: LayerShape, num_tokens: int) -> Tiers:
        return self._part.tiers(shape, num_tokens)  # type: ignore[no-any-return]

    def index_bytes_per_token(self, shape: LayerShape, num_tokens: int) -> int:
        return int(self._part.index_bytes_per_token(shape, num_tokens))

    def open(self, info: ModelInfo) -> None:
        counts = {shape.num_kv_heads for shape in info.layers}
        if len(counts) > 1:
            raise ConfigError(
                f"share needs layers of one number of KV heads, got {sorted(counts)}; choose "
                "by_layer"
            )
        layers = sorted(shape.layer_idx for shape in info.layers)
        self._choosers: dict[int, int] = {}
        chooser: int | None = None
        due = sorted(self.params.selection_layers)
        for idx in layers:
            if any(one <= idx for one in due):
                due, chooser = [one for one in due if one > idx], idx
            self._choosers[idx] = idx if chooser is None else chooser
        self._part.open(info)

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        return self._part.seal(layer_idx, evidence)  # type: ignore[no-any-return]

    def read(self, layer_idx: int, q: Tensor) -> Read:
        return self._part.read(layer_idx, q)  # type: ignore[no-any-return]

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        chooser = self._choosers[layer_idx]
        if seen is None or chooser == layer_idx:
            new: Entries = self._part.absorb(layer_idx, row, kept, left, seen)
            if seen is not None:
                self._chosen[layer_idx, row] = [at.clone() for at in new.split("positions")]
            return new
        at = left.split("positions")[0]
        wanted = self._chosen.get((chooser, row))
        if wanted is None or any(len(one) > len(at) for one in wanted):
            raise MethodError(
                f"layer {layer_idx} of share must end its prompt behind layer {chooser}, whose "
                "choice it keeps, got it before; give both layers the same tokens"
            )
        return left.select([one.to(at.device) - at[:1] for one in wanted])

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        return each(params, "of", lambda kind, own: kind.full_budget(own))

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        sizes = {"context_tokens": context_tokens, "page_size": page_size}
        return each(params, "of", lambda kind, own: kind.at_budget(own, tokens, **sizes))
