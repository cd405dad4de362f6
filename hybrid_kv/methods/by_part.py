"""Another method for each layer, or for each KV head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hybrid_kv.config import MethodConfig
from hybrid_kv.config import Params as BaseParams
from hybrid_kv.entries import Attended, Entries
from hybrid_kv.errors import ConfigError
from hybrid_kv.methods.combining import (
    check_spans,
    each,
    heads_of,
    named,
    needs_of,
    of_layers,
    places,
)
from hybrid_kv.methods.evicting import Evicting
from hybrid_kv.methods.windows import Full, StreamingLLM
from hybrid_kv.plugins import METHODS, Method, Placement
from hybrid_kv.rotary import Rotary
from hybrid_kv.types import Demotion, Evidence, Foresight, LayerShape, ModelInfo, Needs, Read, Tiers

Heads = tuple[int, ...]

_COMMON = ("k", "v", "positions", "bias")
"""Columns that mean the same to all; others get the number of their part in front."""


@METHODS.register("by_head", paper="this project; after DuoAttention, arXiv:2410.10819")
class ByHead(Method):
    """Gives the KV heads of all layers to different methods; what is kept and LOST is theirs.

    heads: {"0,3": "full", "rest": {"method": "snapkv", "budget_tokens": 512}}. A method sees the
    queries, keys and weights of its own heads alone, as if the model had no others.

    Kept: by KV head what its method keeps.
    Lost: by KV head what its method loses.
    Deviations: none; a combinator. A layer has one window and one cold tier for all its heads: so
    sinks and windows must be alike, and methods that offload, code or turn what they keep are
    refused. What is kept is copied when a page leaves the window.
    """

    class Params(BaseParams):
        """heads: by KV heads ("0", "0-3", "2,5", "rest") a method, by name or as a group."""

        heads: dict[str, MethodConfig] = Field(
            default={"0": {"method": "tova", "window_tokens": 32}, "rest": "snapkv"},
            min_length=1,
            validate_default=True,
        )

        @model_validator(mode="after")
        def _heads_are_named(self) -> Any:
            places(self.heads, "head")
            return self

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._spans = places(params.heads, "head")
        self._parts: dict[str, Method] = {n: part.build() for n, part in params.heads.items()}
        sizes = {}
        for name, part in self._parts.items():
            method = params.heads[name].method
            _check(part, method)
            if not isinstance(part, Full):
                sizes[method] = (part.params.sink_tokens, part.params.window_tokens)
        if len(set(sizes.values())) > 1:
            got = " and ".join(f"{sinks}, {window} of {n}" for n, (sinks, window) in sizes.items())
            raise ConfigError(
                "by_head must have one sink_tokens and one window_tokens, for a layer has one "
                f"window for all its heads, got {got}; give all methods the same"
            )
        self._sizes = next(iter(sizes.values()), None)

    @property
    def needs(self) -> Needs:
        return needs_of(self._parts.values())

    def open(self, info: ModelInfo) -> None:
        self._heads: dict[int, dict[str, Heads]] = {}
        for shape in info.layers:
            every = range(shape.num_kv_heads)
            check_spans(self._spans, every, "head")
            owner = {head: named(head, self._spans, "head", "by_head") for head in every}
            own = {name: tuple(h for h in every if owner[h] == name) for name in self._parts}
            self._heads[shape.layer_idx] = {name: heads for name, heads in own.items() if heads}
        for name, part in self._parts.items():
            part.open(self._info_of(info, name))

    def _info_of(self, info: ModelInfo, name: str) -> ModelInfo:
        """Model's facts for a method of these heads alone; layers without any are left out."""
        layers: list[LayerShape] = []
        rotary: list[Rotary] = []
        outputs: list[Tensor | None] = []
        for i, shape in enumerate(info.layers):
            heads = self._heads[shape.layer_idx].get(name)
            if not heads:
                continue
            layers.append(heads_of(shape, heads))
            rotary += info.rotary[i : i + 1]
            for weight in info.outputs[i : i + 1]:
                whole = (shape.num_kv_heads, shape.group_size * shape.head_dim)
                some = None
                if weight is not None:
                    some = weight.unflatten(1, whole)[:, list(heads)].flatten(1)
                outputs.append(some)
        return replace(info, layers=tuple(layers), rotary=tuple(rotary), outputs=tuple(outputs))

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        if self._sizes is None:  # full alone
            return Placement()
        return Placement(*self._sizes, rest=Demotion.ABSORB)

    def read(self, layer_idx: int, q: Tensor) -> Read:
        return Read()

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        found: list[tuple[Heads, Entries]] = []
        for number, (name, heads) in enumerate(self._heads[layer_idx].items()):
            old, new = _part(kept, number, heads), _of_heads(left, heads)
            part = self._parts[name]
            if isinstance(part, StreamingLLM):
                found.append((heads, Entries.empty(new)))
            elif isinstance(part, Full):
                found.append((heads, new if old is None else old.extended(new)))
            else:
                evidence = None if seen is None else _evidence_of(seen, heads, left.num_heads)
                answer = part.absorb(layer_idx, row, old, new, evidence)
                found.append((heads, Entries.empty(new) if answer is None else answer))
        return _joined(found, left)

    def after(self, layer_idx: int, attended: Attended) -> Sequence[Entries | None] | None:
        rows = list(attended.kept)
        changed = False
        for number, (name, heads) in enumerate(self._heads[layer_idx].items()):
            part = self._parts[name]
            if type(part).after is Method.after:
                continue
            answer = part.after(layer_idx, _attended_of(attended, number, heads))
            if answer is None:
                continue
            changed = True
            for row, (old, new) in enumerate(zip(rows, answer, strict=True)):
                # Nothing has left the window of a row without entries, whose scores are seen later.
                if old is not None and new is not None:
                    rows[row] = _with_part(old, number, new)
        return rows if changed else None

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        return each(params, "heads", lambda kind, own: kind.full_budget(own))

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        """Every head gets the budget; those of full do not keep it."""
        sizes = {"context_tokens": context_tokens, "page_size": page_size}
        return each(params, "heads", lambda kind, own: kind.at_budget(own, tokens, **sizes))


def _check(part: Method, name: str) -> None:
    """Raises ConfigError where a method cannot serve some heads of a layer."""
    if not isinstance(part, Evicting | Full | StreamingLLM):
        raise ConfigError(
            "by_head composes methods that choose entries and drop the rest, for pages, codes and "
            f"the cold tier are of all heads of a layer, got {name}; choose full, streaming_llm or "
            "one that evicts, or give it whole layers with by_layer"
        )
    if isinstance(part, Evicting) and part.params.demote != "drop":
        raise ConfigError(
            "by_head has no cold tier, which is of all heads of a layer, got demote "
            f"'{part.params.demote}' of {name}; leave demote out"
        )


def _of_heads(entries: Entries, heads: Heads) -> Entries:
    """A look at some heads, in memory that is not written on."""
    return replace(
        entries,
        starts=tuple(entries.starts[h] for h in heads),
        lengths=tuple(entries.lengths[h] for h in heads),
        _room=None,
    )


def _own(values: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Columns or state of one part, by its own names."""
    prefix = f"{number}."
    return {n.removeprefix(prefix): one for n, one in values.items() if n.startswith(prefix)}


def _part(kept: Entries | None, number: int, heads: Heads) -> Entries | None:
    if kept is None:
        return None
    common = {name: kept.columns[name] for name in _COMMON if name in kept.columns}
    own = replace(
        _of_heads(kept, heads),
        columns={**common, **_own(kept.columns, number)},
        state=_own(kept.state, number),
    )
    return own


def _with_part(kept: Entries, number: int, new: Entries) -> Entries:
    """With the columns and the state that a part has changed, of the same entries."""
    columns = {f"{number}.{n}": c for n, c in new.columns.items() if n not in _COMMON}
    state = {f"{number}.{name}": value for name, value in new.state.items()}
    return kept.with_columns(**columns).with_state(**state)


def _joined(found: Sequence[tuple[Heads, Entries]], left: Entries) -> Entries:
    """The entries of all parts in one flat memory, head by head."""
    owners = {
        h: (number, i) for number, (heads, _) in enumerate(found) for i, h in enumerate(heads)
    }
    columns: dict[str, list[Tensor]] = {}
    likes: dict[str, Tensor] = {}
    for number, (_, entries) in enumerate(found):
        for name, column in entries.columns.items():
            likes.setdefault(name if name in _COMMON else f"{number}.{name}", column)
    lengths = []
    for h in range(left.num_heads):
        number, i = owners[h]
        entries = found[number][1]
        lengths.append(entries.lengths[i])
        for name, like in likes.items():
            own = name if name in _COMMON else name.removeprefix(f"{number}.")
            if own in entries.columns and (name in _COMMON or name.startswith(f"{number}.")):
                rows = entries.split(own)[i]
            else:
                rows = like.new_zeros(lengths[-1], *like.shape[1:])
            columns.setdefault(name, []).append(rows)
    starts = [sum(lengths[:h]) for h in range(len(lengths))]
    state = {
        f"{number}.{name}": value
        for number, (_, entries) in enumerate(found)
        for name, value in entries.state.items()
    }
    flat = {name: torch.cat(rows) for name, rows in columns.items()}
    return Entries(columns=flat, starts=tuple(starts), lengths=tuple(lengths), state=state).copied()


@lru_cache(maxsize=64)
def ids_on(device: torch.device, heads: Heads, group: int = 1) -> Tensor:
    """The numbers of some KV heads, or of their `group` query heads each, int64 on a device.

    Kept there, for to send them is to wait for the device.
    """
    ids = [h * group + g for h in heads for g in range(group)]
    with torch.inference_mode(False):
        return torch.tensor(ids, device=device)


def _evidence_of(seen: Evidence, heads: Heads, num_kv_heads: int) -> Evidence:
    """Evidence of some KV heads and their query heads."""

    def some(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        return values[ids_on(values.device, heads, len(values) // num_kv_heads)]

    return replace(
        seen,
        sampled_queries=some(seen.sampled_queries),
        last_queries=some(seen.last_queries),
        column_sums=some(seen.column_sums),
        keys=None if seen.keys is None else seen.keys[ids_on(seen.keys.device, heads)],
    )


def _attended_of(attended: Attended, number: int, heads: Heads) -> Attended:
    """A step, as some KV heads made it."""
    device, num_kv_heads = attended.q.device, len(attended.window(0)[0])
    mine = ids_on(device, heads, attended.q.shape[1] // num_kv_heads)

    def window(row: int) -> tuple[Tensor, Tensor]:
        keys, positions = attended.window(row)
        return keys[ids_on(device, heads)], positions

    return replace(
        attended,
        q=attended.q[:, mine],
        lse=attended.lse[:, mine],
        kept=[_part(kept, number, heads) for kept in attended.kept],
        window=window,
    )


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
