"""Methods made of two: `chain` codes what another one keeps, `share` lets layers use one choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from hybrid_kv.config import LayerList, MethodConfig
from hybrid_kv.config import Params as BaseParams
from hybrid_kv.entries import Entries
from hybrid_kv.errors import ConfigError, MethodError
from hybrid_kv.methods.composing import PROMPT_CHOOSERS, each
from hybrid_kv.methods.kivi import Kivi
from hybrid_kv.methods.think import ThinK
from hybrid_kv.plugins import METHODS, Method, Placement
from hybrid_kv.types import Evidence, Foresight, LayerShape, ModelInfo, Needs, Read, Tiers

CODECS = (Kivi, ThinK)
"""Methods whose codes of a token depend neither on other heads' tokens nor on its position."""


@METHODS.register("chain", paper="this project; ThinK, arXiv:2407.21018, is put behind SnapKV so")
class Chain(Method):
    """Keeps what the first method chooses of the prompt, in the codes of the second; DROPS, ROUNDS.

    When the prompt ends `first` chooses; what it keeps is coded by `then`, and later all of the
    answer as it leaves the window, which is the first method's. Groups of codes are of what is
    kept. Heads of different lengths are coded as if they repeated their last entry.

    Kept: what the first method keeps, as codes of the second.
    Lost: what the first method loses, and precision as the second says.
    Deviations: none; a combinator. What chooses again as an answer grows has codes alone to choose
    from and is refused; so are codecs that look at all heads of a token together, or at positions,
    and demote "offload", whose copies would be worse than the originals.
    """

    class Params(BaseParams):
        """first: a method that chooses when the prompt ends, by name or as a group; then: kivi,
        gear or think, by name or as a group.
        """

        first: MethodConfig = Field(default="snapkv", validate_default=True)
        then: MethodConfig = Field(default="kivi", validate_default=True)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._first, self._then = params.first.build(), params.then.build()
        if not isinstance(self._first, PROMPT_CHOOSERS) or params.first.params.demote != "drop":
            raise ConfigError(
                "chain must begin with a method that chooses when the prompt ends and drops the "
                f"rest, got {params.first.method}; choose snapkv or one of its kin, or zipvl"
            )
        if not isinstance(self._then, CODECS):
            raise ConfigError(
                "chain must end with a codec whose codes hang on one head alone, got "
                f"{params.then.method}; choose kivi, gear or think"
            )

    @property
    def needs(self) -> Needs:
        return self._first.needs | self._then.needs  # type: ignore[no-any-return]

    def tiers(self, shape: LayerShape, num_tokens: int) -> Tiers:
        return self._first.tiers(shape, num_tokens)  # type: ignore[no-any-return]

    def open(self, info: ModelInfo) -> None:
        self._first.open(info)
        self._then.open(info)

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        return self._first.seal(layer_idx, evidence)  # type: ignore[no-any-return]

    def read(self, layer_idx: int, q: Tensor) -> Read:
        return Read()

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        chosen = left if seen is None else self._first.absorb(layer_idx, row, None, left, seen)
        most = max(chosen.lengths)
        if not most:
            return kept or chosen
        k, v, at = (_even(chosen.split(name), most) for name in ("k", "v", "positions"))
        old = kept if kept is not None and any(kept.lengths) else None
        new = self._then.code(k, v, at, old, seen)
        if len(set(chosen.lengths)) > 1:
            masks = [torch.arange(most, device=k.device) < count for count in chosen.lengths]
            new = new.select(masks)
        return old.extended(new).with_tables(**new.tables) if old is not None else new

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        for field in ("first", "then"):
            params = each(params, field, lambda kind, own: kind.full_budget(own))
        return params

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        sizes = {"context_tokens": context_tokens, "page_size": page_size}
        return each(params, "first", lambda kind, own: kind.at_budget(own, tokens, **sizes))


def _even(heads: Sequence[Tensor], most: int) -> Tensor:
    """[Hkv, most, ...]: shorter heads repeat their last row, empty ones are 0."""
    rows = []
    for head in heads:
        count = len(head)
        if count == most:
            rows.append(head)
        elif count:
            ids = torch.arange(most, device=head.device).clamp(max=count - 1)
            rows.append(head[ids])
        else:
            rows.append(head.new_zeros(most, *head.shape[1:]))
    return torch.stack(rows)


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
