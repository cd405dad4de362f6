"""The settings of a plug-in with their defaults, and their meaning from its docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from hybrid_kv.config import HybridConfig, PluginConfig


@dataclass(frozen=True, slots=True)
class Parameter:
    """One setting: its dotted name, its default as JSON has it, and what it means."""

    name: str
    default: Any
    meaning: str

    @property
    def shown(self) -> str:
        """The default as a user would write it."""
        listed = isinstance(self.default, tuple)
        return ",".join(map(str, self.default)) if listed else str(self.default)


def parameters_of(params: type[BaseModel]) -> list[Parameter]:
    """The settings of a plug-in's parameter group; those of groups inside it by dotted name."""
    return list(_walk(params(), ""))


def common_parameters() -> list[Parameter]:
    """The settings that stand beside every method's own."""
    return [
        parameter
        for parameter in _walk(HybridConfig(method="full"), "")
        if parameter.name not in ("method", "params")
    ]


def _walk(group: BaseModel, prefix: str) -> Iterator[Parameter]:
    for name in type(group).model_fields:
        value = getattr(group, name)
        if isinstance(value, PluginConfig):
            kind = getattr(value, value.name_field)
            known = ", ".join(value.registry)
            yield Parameter(prefix + name, kind, f"{meaning(type(group), name)}; one of {known}")
            yield from _walk(value.params, f"{prefix}{name}.")
        elif isinstance(value, BaseModel):
            yield from _walk(value, f"{prefix}{name}.")
        else:
            yield Parameter(prefix + name, value, meaning(type(group), name))


def meaning(group: type[BaseModel], name: str) -> str:
    """What the docstrings of a group and its bases say about one of its settings.

    They explain settings one after the other: 'a: text; b, c: text' or 'a and b do so; c: text'.
    """
    for owner in group.__mro__:
        for names, text in _explained(owner.__dict__.get("__doc__") or ""):
            if name in names:
                return text
    return ""


def _explained(doc: str) -> Iterator[tuple[list[str], str]]:
    flat = " ".join(doc.split())
    # A new explanation begins behind ';' or '.', with a list of names and a colon or a verb.
    for piece in re.split(r"(?:;|\.|^)\s+(?=[a-z_]+(?:(?:, | and )[a-z_]+)*(?::|\s))|^", flat):
        head = re.match(r"([a-z_]+(?:(?:, | and )[a-z_]+)*)(: | )", piece)
        if head is None:
            continue
        names = re.split(r", | and ", head[1])
        text = piece[head.end() :] if head[2] == ": " else piece
        yield names, text.strip().rstrip(".")
