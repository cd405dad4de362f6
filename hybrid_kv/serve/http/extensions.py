"""The `hybrid_kv` object of a request: method, settings and budget, checked as the server's own."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from hybrid_kv.config import HybridConfig, PluginConfig
from hybrid_kv.errors import ConfigError
from hybrid_kv.serve.http.schemas import Extensions


def asked_config(
    base: HybridConfig, asked: Extensions | None, total_tokens: int
) -> HybridConfig | None:
    """The configuration of one request; None for the server's.

    Args:
        total_tokens: what a share of the context is taken of.

    Raises:
        ConfigError: a method or setting is unknown, out of range, or would name a file.
    """
    if asked is None or (asked.method is None and not asked.set and asked.budget is None):
        return None
    settings: dict[str, Any] = dict(asked.set or {})
    if asked.method is not None:
        if "method" in settings:
            raise ConfigError("method is given twice; leave it out of set")
        settings["method"] = asked.method
    config = base.replace(**settings)
    for name in _free_texts(config):
        raise ConfigError(
            f"{name} may name a file, which no request can; give its values, or start the server "
            "with it"
        )
    if asked.budget is not None:
        config = config.at_budget(str(asked.budget), total_tokens)
    return config


def _free_texts(group: BaseModel, path: str = "") -> Iterator[str]:
    """Settings that hold any text, which may be a path, and not their default."""
    names = {group.name_field} if isinstance(group, PluginConfig) else set()
    for name, field in type(group).model_fields.items():
        value = getattr(group, name)
        if isinstance(value, BaseModel):
            yield from _free_texts(value, path if name == "params" else f"{path}{name}.")
        elif (
            isinstance(value, str)
            and str in _members(field.annotation)
            and value != field.default
            and name not in names | {"backend"}
        ):
            yield path + name


def _members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, UnionType):
        return get_args(annotation)
    return (annotation,)
