"""Methods made of others: names of parts, what can be composed, and two that are.

`chain` codes what another one keeps; `share` lets layers use one choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from hybrid_kv.config import LayerList, MethodConfig
from hybrid_kv.config import Params as BaseParams
from hybrid_kv.entries import Entries
from hybrid_kv.errors import ConfigError, MethodError
from hybrid_kv.methods.low_bits import Kivi
from hybrid_kv.methods.low_rank import ThinK
from hybrid_kv.methods.snapkv import SnapKV, ZipVL
from hybrid_kv.plugins import METHODS, Method, Placement
from hybrid_kv.types import Evidence, Foresight, LayerShape, ModelInfo, Needs, Read, Tiers

T = TypeVar("T")
PROMPT_CHOOSERS = (SnapKV, ZipVL)
"""Choose when the prompt ends, merge nothing and keep all of the answer."""
REST = "rest"
_PLACES = re.compile(r"\d+(-\d+)?(,\s*\d+(-\d+)?)*")


def places(parts: Mapping[str, T], what: str) -> dict[str, tuple[tuple[int, int], ...]]:
    """Spans of numbers, both ends included, by name: '0-1', '2,5', none for 'rest'.

    Raises:
        ConfigError: a name is written otherwise, or two of them have a number in common.
    """
    spans: dict[str, tuple[tuple[int, int], ...]] = {}
    for name in parts:
        if name == REST:
            spans[name] = ()
            continue
        if not _PLACES.fullmatch(name):
            raise ConfigError(
                f"{what}s must be named like '0', '0-3', '2,5' or '{REST}', got '{name}'; quote "
                "numbers"
            )
        ends = [[int(end) for end in span.split("-")] for span in name.split(",")]
        spans[name] = tuple((span[0], span[-1]) for span in ends)
    flat = [(span, name) for name, own in spans.items() for span in own]
    for i, ((first, last), name) in enumerate(flat):
        if last < first:
            raise ConfigError(f"{what}s '{name}' must count upwards; swap the ends")
        for (other, end), again in flat[:i]:
            if first <= end and other <= last:
                raise ConfigError(
                    f"{what} {max(first, other)} must have one method, got '{again}' and '{name}'; "
                    "name it once"
                )
    return spans


def named(
    number: int, spans: Mapping[str, Sequence[tuple[int, int]]], what: str, method: str
) -> str:
    """The name under which a number goes.

    Raises:
        ConfigError: none, and there is no rest.
    """
    for name, own in spans.items():
        if any(first <= number <= last for first, last in own):
            return name
    if REST not in spans:
        raise ConfigError(
            f"{method} must say what {what} {number} is given to, got {', '.join(spans)}; add "
            f"'{REST}'"
        )
    return REST


def check_spans(
    spans: Mapping[str, Sequence[tuple[int, int]]], known: Iterable[int], what: str
) -> None:
    """Raises ConfigError where spans begin behind the last number that there is."""
    most = max(known, default=0)
    for name, own in spans.items():
        if any(first > most for first, _ in own):
            raise ConfigError(
                f"{what}s '{name}' must be among the model's, the last of which is {most}; "
                "leave it out"
            )


def needs_of(parts: Iterable[Method]) -> Needs:
    """Needs of all parts together."""
    return reduce(or_, (part.needs for part in parts), Needs())


def of_layers(info: ModelInfo, layers: Iterable[int]) -> ModelInfo:
    """View of a model for a method that serves these layers alone."""
    wanted = set(layers)
    stays = [shape.layer_idx in wanted for shape in info.layers]

    def some(values: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(value for value, keep in zip(values, stays, strict=False) if keep)

    parts = some(info.layers), some(info.rotary), some(info.outputs)
    return replace(info, layers=parts[0], rotary=parts[1], outputs=parts[2])


def each(params: BaseModel, field: str, change: Callable[[type[Method], Any], Any]) -> Any:
    """Parameters whose mapping of methods, or one method, has been changed, by class."""
    value = getattr(params, field)

    def changed(part: MethodConfig) -> MethodConfig:
        new = change(METHODS[part.method].factory, part.params)
        return part.model_copy(update={"params": new})

    if isinstance(value, MethodConfig):
        return params.model_copy(update={field: changed(value)})
    return params.model_copy(update={field: {name: changed(part) for name, part in value.items()}})


def heads_of(shape: LayerShape, heads: Sequence[int]) -> LayerShape:
    """The shape of a layer that has these KV heads alone."""
    return replace(shape, num_q_heads=shape.group_size * len(heads), num_kv_heads=len(heads))


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
