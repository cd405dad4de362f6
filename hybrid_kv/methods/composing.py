"""Helpers of the combinators: names of parts, and methods that can be composed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any, TypeVar

from pydantic import BaseModel

from hybrid_kv.config import MethodConfig
from hybrid_kv.errors import ConfigError
from hybrid_kv.methods.prompt_scored import ZipVL
from hybrid_kv.methods.snapkv import SnapKV
from hybrid_kv.plugins import METHODS, Method
from hybrid_kv.types import LayerShape, ModelInfo, Needs

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
