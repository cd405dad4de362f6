"""One frozen configuration tree, shared by Python, YAML and the command line.

`HybridConfig(method="hybrid", window_tokens=4096)`: common fields and the parameters of the chosen
method stand side by side; a key that the method does not use is refused, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    model_validator,
)

from hybrid_kv.errors import ConfigError, unknown_name
from hybrid_kv.plugins import INDEXES, METHODS, Plugin, Registry

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_COUNT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?\s*$", re.IGNORECASE)


def parse_count(value: object) -> object:
    """'128k' -> 131072, '4GiB' -> 4 * 2**30; anything else is returned as it came."""
    if isinstance(value, str) and (match := _COUNT.match(value)):
        scaled = float(match[1]) * _UNITS[match[2].lower()]
        return int(scaled) if scaled.is_integer() else value
    return value


class Params(BaseModel):
    """Base of every parameter group: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


Tokens: TypeAlias = Annotated[int, BeforeValidator(parse_count), Field(ge=0)]
"""A number of tokens; '4k' is accepted."""

Count: TypeAlias = Annotated[int, BeforeValidator(parse_count), Field(ge=1)]
"""A number that must be at least one; '4k' is accepted."""

BudgetField: TypeAlias = Annotated[
    int | Literal["all"], Field(union_mode="left_to_right"), BeforeValidator(parse_count)
]
"""A budget of at least one, or 'all'."""


def check_budget(name: str, value: int | str) -> None:
    """Raise ValueError unless `value` is 'all' or at least 1."""
    if isinstance(value, int) and value < 1:
        raise ValueError(f"{name} must be at least 1 or 'all', got {value}")


class PluginConfig(Params):
    """A plug-in's name with that plug-in's parameters, written as one flat group."""

    registry: ClassVar[Registry[Any]]
    name_field: ClassVar[str]

    params: SerializeAsAny[BaseModel]

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {cls.name_field: data}
        if not isinstance(data, Mapping):
            return data
        data = dict(data)
        default = cls.model_fields[cls.name_field].default
        plugin = cls.registry[str(data.get(cls.name_field, default))]
        given = data.pop("params", {})
        given = given.model_dump() if isinstance(given, BaseModel) else dict(given)
        own = set(cls.model_fields) - {"params"}
        given.update({key: data.pop(key) for key in list(data) if key not in own})
        _refuse_unknown(plugin, given, own)
        return {**data, "params": plugin.params.model_validate(given)}

    def __getattr__(self, name: str) -> Any:
        # Lets `config.window_tokens` read the method's parameter as it was written.
        params = self.__dict__.get("params")
        if params is not None and name in type(params).model_fields:
            return getattr(params, name)
        raise AttributeError(f"{type(self).__name__} has no setting '{name}'")

    def plugin(self) -> Plugin[Any]:
        return self.registry[getattr(self, self.name_field)]

    def build(self) -> Any:
        """A new instance of the plug-in with these parameters."""
        return self.plugin().factory(self.params)

    def flat(self) -> dict[str, Any]:
        """The group as users write it: JSON-ready, parameters beside the name."""
        data = self.model_dump(mode="json", exclude={"params"})
        for name in type(self.params).model_fields:
            value = getattr(self.params, name)
            data[name] = _flat_value(value)
        return data


def _flat_value(value: Any) -> Any:
    if isinstance(value, PluginConfig):
        return value.flat()
    if isinstance(value, BaseModel):
        return {name: _flat_value(getattr(value, name)) for name in type(value).model_fields}
    return value


def _refuse_unknown(plugin: Plugin[Any], given: Mapping[str, Any], own: set[str]) -> None:
    for key in given:
        if key not in plugin.params.model_fields:
            known = own | set(plugin.params.model_fields)
            raise unknown_name(f"setting for '{plugin.name}'", key, known)


class IndexConfig(PluginConfig):
    """Which index finds cold keys, with its parameters."""

    registry: ClassVar[Registry[Any]] = INDEXES
    name_field: ClassVar[str] = "kind"

    kind: str = "flat"


class HybridConfig(PluginConfig):
    """Everything that decides how a model's KV cache is kept and read.

    method: a registered method; its own parameters stand beside these fields.
    page_size: tokens per page, the unit of spilling and of page selection.
    prefill_chunk_tokens: tokens per chunk of the layer-major prefill; "auto" is an eighth of the
        prompt, at least 256 and at most 4096.
    dense_extend_tokens: a later turn of more new tokens than this attends exactly to the whole
        cache; a shorter one reads through the method, as decoding does.
    backend: arithmetic back end; "auto" takes the fastest that can serve the tensors.

    Raises:
        ConfigError: a value is out of range or a key is unknown; the message has the nearest name.
    """

    registry: ClassVar[Registry[Any]] = METHODS
    name_field: ClassVar[str] = "method"

    method: str = "hybrid"
    page_size: Count = 16
    prefill_chunk_tokens: Count | Literal["auto"] = "auto"
    dense_extend_tokens: Tokens = 32
    backend: str = "auto"

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(first_sentence(error)) from None

    @model_validator(mode="after")
    def _pages_divide(self) -> HybridConfig:
        for name in ("sink_tokens", "window_tokens", "spare_tokens"):
            tokens = getattr(self.params, name, 0)
            if tokens % self.page_size:
                below = tokens // self.page_size * self.page_size
                raise ValueError(
                    f"{name} must be a multiple of page_size {self.page_size}, got {tokens}; "
                    f"use {below} or {below + self.page_size}"
                )
        return self

    def replace(self, **changes: Any) -> HybridConfig:
        """A copy with some settings changed; keys as in the constructor."""
        data = self.flat()
        if "method" in changes and changes["method"] != self.method:
            data = {k: v for k, v in data.items() if k in type(self).model_fields}
        return HybridConfig(**{**data, **changes})

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, object], base: Mapping[str, object] | None = None
    ) -> HybridConfig:
        """Builds from dotted keys ('cold.top_k': '64') laid over a nested mapping.

        A last part that names only one setting of the method may stand alone ('top_k').
        """
        tree: dict[str, Any] = _copy_tree(base or {})
        if "method" in settings:
            tree["method"] = settings["method"]
        plugin = METHODS[str(tree.get("method", cls.model_fields["method"].default))]
        paths = _leaf_paths(plugin.params)
        for key, value in settings.items():
            if key != "method":
                _place(tree, _full_path(key, paths, set(cls.model_fields)), value)
        return cls(**tree)


def _copy_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy_tree(v) if isinstance(v, Mapping) else v for k, v in tree.items()}


def _leaf_paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    paths: list[str] = []
    for name, field in model.model_fields.items():
        paths.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            paths.extend(_leaf_paths(field.annotation, f"{prefix}{name}."))
    return paths


def _full_path(key: str, paths: list[str], own: set[str]) -> str:
    matches = [path for path in paths if path.split(".")[-1] == key]
    if "." in key or key in own or key in paths or len(matches) != 1:
        return key
    return matches[0]


def _place(tree: dict[str, Any], path: str, value: object) -> None:
    *groups, leaf = path.split(".")
    for name in groups:
        group = tree.setdefault(name, {})
        if isinstance(group, str):  # index: "hnsw" is short for index: {kind: "hnsw"}
            group = {"kind": group}
        if not isinstance(group, dict):
            raise ConfigError(f"setting '{path}' cannot be placed: '{name}' holds {group!r}")
        tree[name] = group
        tree = group
    tree[leaf] = value


def first_sentence(error: ValidationError) -> str:
    """The first problem of a pydantic error as: name, expected, got."""
    problem = error.errors()[0]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, Exception):
        return str(cause)
    names = [str(part) for part in problem["loc"] if not str(part).startswith(("function-", "int"))]
    name = ".".join(part for part in names if not part.startswith("literal"))
    text = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{name or 'configuration'}: {text}, got {problem['input']!r}"
