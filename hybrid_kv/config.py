"""One frozen configuration tree, shared by Python, YAML and the command line.

`HybridConfig(method="hybrid", window_tokens=4096)`: common fields and the parameters of the chosen
method stand side by side; a key that the method does not use is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hybrid_kv.counts import parse_count as parse_count  # noqa: PLC0414 (plug-ins import it here)
from hybrid_kv.errors import ConfigError, said, unknown_setting
from hybrid_kv.plugins import INDEXES, METHODS, Plugin, Registry
from hybrid_kv.types import Needs


def budget_tokens(budget: str, context_tokens: int) -> int:
    """'2%' of 4096 -> 82; '512' -> 512.

    Raises:
        ConfigError: it is neither, or not above 0.
    """
    text = budget.strip()
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
            if not 0 < share <= 1:
                raise ValueError
            return max(1, round(share * context_tokens))
        count = int(str(parse_count(text)))
    except ValueError:
        count = 0
    if count < 1:
        raise ConfigError(
            f"a budget must be a share of the context such as 5%, or tokens such as 512, got "
            f"'{budget}'"
        )
    return count


class Params(BaseModel):
    """Base of every parameter group: frozen, unknown keys refused.

    A group that is given in part lies over the default of its field: an index without a kind, or a
    method without a name, is the one that the default names.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    owner: ClassVar[str] = ""
    """The method whose group this is, where only one has it."""
    in_python: ClassVar[frozenset[str]] = frozenset()
    """Fields that are no settings: Python code alone may give them, for tests and measurements."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        # "forbid" would refuse them too, without saying which names there are.
        for key, value in data.items() if isinstance(data, Mapping) else ():
            if key not in cls.model_fields:
                raise unknown_setting("setting", str(key), settings_in(cls), cls.owner)
            if isinstance(value, bool) and not _takes_bool(cls.model_fields[key].annotation):
                raise ConfigError(
                    f"{key} must not be true or false, got {value}; YAML reads yes, no, on and off "
                    "as such, unless they are quoted"
                )
        return data

    @model_validator(mode="before")
    @classmethod
    def _groups_lie_over_their_defaults(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        fields = cls.model_fields
        return {
            key: _laid_over(_default_group(fields[key]), value)
            if isinstance(value, Mapping) and key in fields
            else value
            for key, value in data.items()
        }

    def without_effect(self) -> Mapping[str, str]:
        """Settings that change nothing beside the others, with the reason: 'with precision exact'.

        Such a setting is refused unless it has its default, so that no run is labelled with it.
        """
        return {}

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> Self:
        for name, reason in self.without_effect().items():
            value = getattr(self, name)
            if value != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(
                    f"{name} has no effect {reason}, got {said(value)}; leave it out or change that"
                )
        return self


def parse_list(value: object) -> object:
    """'2, 13' -> ['2', ' 13']; anything else is returned as it came."""
    return value.split(",") if isinstance(value, str) else value


Tokens: TypeAlias = Annotated[int, BeforeValidator(parse_count), Field(ge=0)]
"""A number of tokens; '4k' is accepted."""

Count: TypeAlias = Annotated[int, BeforeValidator(parse_count), Field(ge=1)]
"""A number that must be at least one; '4k' is accepted."""

Ratio: TypeAlias = Annotated[float, Field(gt=0, le=1)]
"""A share of something, of which some must be left."""

BudgetField: TypeAlias = Annotated[Count | Literal["all"], Field(union_mode="left_to_right")]
"""A budget of at least one, or 'all'."""

NO_END = 2**40  # tokens of a window that nothing leaves
SPARSE_ERROR = 0.05
"""Relative error of "sparse": the median KL of eight texts is .004, the worst .013."""


def _known_prefill(value: object) -> object:
    try:
        number = value if value in ("exact", "sparse") else float(str(value))
    except ValueError:
        number = 0.0
    if isinstance(number, float) and not 0.001 <= number <= 0.5:
        raise ConfigError(
            "must be 'exact', 'sparse' or the relative error to aim at, from 0.001 to 0.5, got "
            f"{said(value)}"
        )
    return number


PrefillField: TypeAlias = Annotated[
    Literal["exact", "sparse"] | float, BeforeValidator(_known_prefill)
]
"""'exact', 'sparse', or the relative error to aim at."""

LayerList: TypeAlias = Annotated[
    tuple[Tokens, ...], BeforeValidator(parse_list), Field(min_length=1)
]
"""Numbers of layers; '2,13' is accepted."""


def _takes_bool(annotation: Any) -> bool:
    """Whether a field is one of truth; to Python, True is a number as well."""
    return annotation is Any or bool in (annotation, *get_args(annotation))


class PluginConfig(Params):
    """A plug-in's name with that plug-in's parameters, written as one flat group.

    Raises:
        ConfigError: a value is out of range or a key is unknown; the message has the nearest name.
    """

    registry: ClassVar[Registry[Any]]
    name_field: ClassVar[str]

    params: SerializeAsAny[BaseModel]

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(first_sentence(error)) from None

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
        given = _in_their_group(plugin.params, given)
        _refuse_unknown(plugin, given, own)
        return {**data, "params": plugin.params.model_validate(given)}

    def __getattr__(self, name: str) -> Any:
        # Lets `config.window_tokens` read the method's parameter as it was written.
        params = self.__dict__.get("params")
        if params is not None and name in type(params).model_fields:
            return getattr(params, name)
        raise AttributeError(f"{type(self).__name__} has no setting '{name}'")

    def __copy__(self) -> Self:
        """Without what follows from the settings: `model_copy` may give the copy others."""
        copied = super().__copy__()
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied

    @cached_property
    def plugin(self) -> Plugin[Any]:
        return self.registry[getattr(self, self.name_field)]

    @cached_property
    def build(self) -> Callable[[], Any]:
        """Makes a new instance of the plug-in with these parameters."""
        factory: Callable[[Any], Any] = self.plugin.factory
        return partial(factory, self.params)

    def flat(self) -> dict[str, Any]:
        """The group as users write it: JSON-ready, parameters beside the name."""
        return {**self.model_dump(mode="json", exclude={"params"}), **_flat_group(self.params)}


def _flat_group(group: BaseModel) -> dict[str, Any]:
    data = group.model_dump(mode="json")
    for name in type(group).model_fields:
        value = getattr(group, name)
        if isinstance(value, PluginConfig):
            data[name] = value.flat()
        elif isinstance(value, BaseModel):
            data[name] = _flat_group(value)
    return data


_COLD = "cold"
"""The group of settings of the cold tier, whose name users leave out and messages do not print."""


def as_printed(name: str) -> str:
    """The name of a setting, by its dotted name, as messages and pages print it."""
    return name.removeprefix(f"{_COLD}.")


def _in_their_group(params: type[BaseModel], given: dict[str, Any]) -> dict[str, Any]:
    """Settings of a plug-in, those of the cold tier that stand beside the others in their group."""
    fields = params.model_fields
    group = _group_of(fields[_COLD].annotation) if _COLD in fields else None
    if group is None:
        return given
    beside = {key for key in given if key not in fields and key in settings_in(group)}
    if not beside:
        return given
    own = given.get(_COLD, {})
    own = own.model_dump(exclude_unset=True) if isinstance(own, BaseModel) else dict(own)
    kept = {key: value for key, value in given.items() if key not in beside}
    return {**kept, _COLD: {**own, **{key: given[key] for key in beside}}}


def settings_in(group: type[BaseModel]) -> list[str]:
    """Names of the settings of a group."""
    return [name for name in group.model_fields if name not in _hidden(group)]


def _hidden(group: type[BaseModel]) -> frozenset[str]:
    return group.in_python if issubclass(group, Params) else frozenset()


def _refuse_unknown(plugin: Plugin[Any], given: Mapping[str, Any], own: set[str]) -> None:
    for key in given:
        if key not in plugin.params.model_fields:
            known = own | set(settings_in(plugin.params))
            raise unknown_setting(f"{plugin.name} setting", key, known)


def _group_of(annotation: Any) -> type[BaseModel] | None:
    """The group of settings that a field of this annotation is; None where it is none."""
    is_union = get_origin(annotation) in (Union, UnionType)
    for one in get_args(annotation) if is_union else (annotation,):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def _default_group(field: FieldInfo) -> Any:
    """The default of a field that is a group of settings, as such a group; None for others."""
    group = _group_of(field.annotation)
    default = None if group is None else field.get_default(call_default_factory=True)
    if group is None or default is None or default is PydanticUndefined:
        return None
    return default if isinstance(default, BaseModel) else group.model_validate(default)


def _laid_over(default: Any, given: Any) -> Any:
    """The settings that are given, and beside them what the default of their group sets.

    A plug-in that is named begins with its own defaults.
    """
    if not isinstance(given, Mapping) or not isinstance(default, BaseModel):
        return given
    named: dict[str, Any] = {}
    if isinstance(default, PluginConfig):
        if default.name_field in given:
            return given
        named, default = {default.name_field: getattr(default, default.name_field)}, default.params
    set_there = {name: getattr(default, name) for name in default.model_fields_set}
    return {
        **named,
        **set_there,
        **{key: _laid_over(set_there.get(key), value) for key, value in given.items()},
    }


class IndexConfig(PluginConfig):
    """Index that finds cold keys, with its parameters."""

    registry: ClassVar[Registry[Any]] = INDEXES
    name_field: ClassVar[str] = "kind"

    kind: str = "flat"

    def __init__(self, **data: Any) -> None:  # spelled out for type checkers: keys vary by kind
        super().__init__(**data)

    @property
    def ranks(self) -> bool:
        """See `Index.ranks`."""
        return bool(self.plugin.factory.ranks)

    @cached_property
    def needs(self) -> Needs:
        """See `Index.needs`."""
        return self.plugin.factory.needs(self.params)  # type: ignore[no-any-return]


class MethodConfig(PluginConfig):
    """A method that another one composes, with its parameters; a name alone, or a group."""

    registry: ClassVar[Registry[Any]] = METHODS
    name_field: ClassVar[str] = "method"

    method: str = "full"

    def __init__(self, **data: Any) -> None:  # spelled out for type checkers: keys vary by method
        super().__init__(**data)


def composed(params: BaseModel) -> list[MethodConfig]:
    """The methods that a method of these parameters composes, and those that they compose."""
    found = []
    for name in type(params).model_fields:
        value = getattr(params, name)
        several = value.values() if isinstance(value, Mapping) else (value,)
        for part in several:
            if isinstance(part, MethodConfig):
                found += [part, *composed(part.params)]
    return found


class AuditParams(Params):
    """Limits that the audit holds a cache to, with 95% confidence, and what follows beyond them.

    max_output_error: relative distance of a head's output from exact attention's. max_missed_mass:
    of the softmax over all stored entries, what a step misses, or estimates too much; some layers
    look everywhere and miss much of it without harm. min_recall: of the exact best cold entries, as
    many as the budget has, that the search ranks. Each is of one layer's heads, or of all; null for
    no limit (0 for recall). action: "warn" once, "widen" the budget of the layer (or of all),
    doubling it up to 8 times, or "raise" an
    error.
    """

    min_recall: float = Field(default=0.8, ge=0, le=1)
    max_missed_mass: float | None = Field(default=0.5, gt=0, lt=1)
    max_output_error: float | None = Field(default=0.3, gt=0)
    action: Literal["warn", "widen", "raise"] = "warn"


class HybridConfig(PluginConfig):
    """Everything that decides how a model's KV cache is kept and read.

    method: a registered method; its own parameters stand beside these fields.
    page_size: tokens per page, the unit of spilling and of page selection.
    prefill_chunk_tokens: tokens per chunk of the layer-major prefill; "auto" is an eighth of the
        prompt, at least 256 and at most 4096. With router logits asked for there is one chunk.
    prefill_states: where a prompt's hidden states wait between two layers: on the "device", or in
        "host" memory, where a layer's keys and values also leave before the next layer begins;
        "auto" takes the host for prompts that would leave a GPU too little memory.
    prefill: "exact", or block-sparse attention of prompts, which sampled queries choose and others
        judge: the mean relative error of a head's output to aim at, or "sparse" for 0.05;
        `Generation.prefill` says what it read and lost.
    dense_extend_tokens: a later turn of more new tokens than this attends exactly to the whole
        cache; a shorter one reads through the method, as decoding does.
    capture_decode: capture what a decode step of one row tells a GPU as one CUDA graph and replay
        it, where method and model permit that; `Generation.steps` says where they do not.
    backend: arithmetic back end; "auto" takes the fastest that can serve the tensors, "triton" and
        "flashinfer" are for models on a GPU.
    index_build: indexes that take long are built in the "background" while a scan serves, or
        "wait" for them: then the same call gives the same tokens every time.
    audit_every: decode steps from one look of the audit to the next, 0 for none; a look attends one
        KV head of one layer exactly, beside the steps that follow. audit: what it is judged by.
    """

    registry: ClassVar[Registry[Any]] = METHODS
    name_field: ClassVar[str] = "method"
    in_python = frozenset({"prefill_states", "dense_extend_tokens"})

    method: str = "hybrid"
    page_size: Count = 16
    prefill_chunk_tokens: Count | Literal["auto"] = "auto"
    prefill_states: Literal["auto", "device", "host"] = "auto"
    prefill: PrefillField = "exact"
    dense_extend_tokens: Tokens = 32
    capture_decode: bool = False
    backend: str = "auto"
    index_build: Literal["background", "wait"] = "background"
    audit_every: Tokens = 0
    audit: AuditParams = AuditParams()

    def __init__(self, **data: Any) -> None:  # spelled out for type checkers: keys vary by method
        # `params` is how pydantic hands the method's own parameters over.
        given = {key: data.pop(key) for key in ("params",) if key in data}
        super().__init__(**self._tree(data, {}), **given)

    @cached_property
    def prefill_error(self) -> float | None:
        """The error that block-sparse prefill aims at; None for exact prefill."""
        known = {"exact": None, "sparse": SPARSE_ERROR}
        return known[self.prefill] if isinstance(self.prefill, str) else self.prefill

    @model_validator(mode="after")
    def _pages_divide(self) -> HybridConfig:
        for params in (self.params, *(part.params for part in composed(self.params))):
            for name in ("sink_tokens", "window_tokens", "spare_tokens"):
                tokens = getattr(params, name, 0)
                if tokens < NO_END and tokens % self.page_size:
                    below = tokens // self.page_size * self.page_size
                    raise ValueError(
                        f"{name} must be a multiple of page_size {self.page_size}, got {tokens}; "
                        f"use {below} or {below + self.page_size}"
                    )
        return self

    @classmethod
    def of(cls, config: ConfigLike) -> HybridConfig:
        """A configuration from what a user may write for one; the default for None.

        Raises:
            ConfigError: it is none, or its settings are wrong.
        """
        if isinstance(config, HybridConfig):
            return config
        if config is None or isinstance(config, str):
            return cls() if config is None else cls(method=config)
        if isinstance(config, Mapping):
            return cls.from_settings(config)
        raise ConfigError(
            "config must be a HybridConfig, a dict of its settings or the name of a method, got "
            f"{said(config)}"
        )

    def replace(self, **changes: Any) -> HybridConfig:
        """A copy with some settings changed; keys as in the constructor."""
        own = type(self).model_fields.keys()
        unset = own - self.model_fields_set - {"method"}
        data = {key: value for key, value in self.flat().items() if key not in unset}
        if "method" in changes and changes["method"] != self.method:
            data = {k: v for k, v in data.items() if k in own}
        return self.from_settings(changes, data)

    def check_complete(self) -> None:
        """Raises ConfigError where the method, or one that it composes, lacks what it runs with."""
        for method, params in [(self.method, self.params)] + [
            (part.method, part.params) for part in composed(self.params)
        ]:
            if (lack := METHODS[method].factory.lacks(params)) is not None:
                raise ConfigError(f"method '{method}': {lack}")

    def opened(self) -> HybridConfig:
        """The same with the method's budgets opened so far that nothing is lost; prefill exact."""
        params = METHODS[self.method].factory.full_budget(self.params)
        return self.model_copy(update={"params": params, "prefill": "exact"})

    def at_budget(self, budget: str, context_tokens: int) -> HybridConfig:
        """The same where a decode step attends `budget` of so many tokens: "2%" or "512".

        Raises:
            ConfigError: it is neither, or the method has no use for so few.
        """
        tokens = budget_tokens(budget, context_tokens)
        try:
            params = METHODS[self.method].factory.at_budget(
                self.params, tokens, context_tokens=context_tokens, page_size=self.page_size
            )
        except ConfigError as error:
            raise type(error)(
                f"budget {budget} of {context_tokens} tokens cannot be given to {self.method}: "
                f"{error}"
            ) from None
        given = self.model_dump(exclude={"params"}, exclude_unset=True)
        return HybridConfig(**given, params=params)

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, object], base: Mapping[str, object] | None = None
    ) -> HybridConfig:
        """Builds from dotted keys ('index.target_recall': '0.9') laid over a nested mapping.

        The names are those that are printed; `cold.` may stand before those of the cold tier. A
        last part that names only one setting of the method may stand alone ('target_recall').
        """
        return cls(**cls._tree(settings, base or {}))

    @classmethod
    def _tree(cls, settings: Mapping[str, object], base: Mapping[str, object]) -> dict[str, Any]:
        tree: dict[str, Any] = _copy_tree(base)
        if "method" in settings:
            tree["method"] = settings["method"]
        plugin = METHODS[str(tree.get("method", cls.model_fields["method"].default))]
        shown = cls.settings_of(plugin.name, settings, base)
        hidden = cls.python_only(plugin.name, settings, base)
        values: dict[str, object] = {}
        for key, value in settings.items():
            path = _full_path(str(key), shown, hidden, plugin)
            if path in values:
                raise ConfigError(f"setting '{as_printed(path)}' is given twice; keep one")
            values[path] = _copy_tree(value) if isinstance(value, Mapping) else value
        for path in values:
            if _is_in_a_group(values, path):
                raise ConfigError(f"setting '{as_printed(path)}' is given twice; keep one")
        groups = {**_groups(cls), **_groups(plugin.params)}
        for path, group in groups.items():
            _begin_anew(tree, path, group, values)
        # Groups before their members, so that 'cold.index' cannot wipe out 'cold.index.kind'.
        for path in sorted(values, key=lambda path: path.count(".")):
            _place(tree, path, values[path], groups)
        return tree

    @classmethod
    def python_only(cls, method: str, *given: Mapping[str, object]) -> set[str]:
        """Dotted names of fields that are no settings; see `Params.in_python` and `settings_of`."""
        params = METHODS[method].params
        places = [*_groups(params).items(), *_kinds_in(params, given).items()]
        found = {f"{path}.{name}" for path, group in places for name in _hidden(group)}
        return {*_hidden(cls), *_hidden(params), *found}

    @classmethod
    def knows(cls, method: str, key: str) -> bool:
        """Whether a method has the setting that a dotted key, or the last part of one, names, with
        the kind of index that it has by itself.
        """
        return any(path == key or path.endswith(f".{key}") for path in cls.settings_of(method))

    @classmethod
    def settings_of(cls, method: str, *given: Mapping[str, object]) -> set[str]:
        """Dotted names of the settings that a method may be given, those of its index included.

        Args:
            given: settings that may name the kind of that index; the first that does counts.
        """
        params = METHODS[method].params
        return {*settings_in(cls), *_paths(params, _kinds_in(params, given))} - {"params"}


def _copy_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy_tree(v) if isinstance(v, Mapping) else v for k, v in tree.items()}


def _groups(model: type[BaseModel], prefix: str = "") -> dict[str, type[BaseModel]]:
    """The groups of settings below `model` by their dotted names, plug-ins as one group each."""
    groups: dict[str, type[BaseModel]] = {}
    for name in settings_in(model):
        group = _group_of(model.model_fields[name].annotation)
        if group is None or name == "params":
            continue
        groups[prefix + name] = group
        if not issubclass(group, PluginConfig):
            groups |= _groups(group, f"{prefix}{name}.")
    return groups


def _kinds_in(
    model: type[BaseModel], given: Sequence[Mapping[str, object]]
) -> dict[str, type[BaseModel]]:
    """The settings of each plug-in below `model`, by its dotted name, for the kind that is given.

    Args:
        given: mappings that may name it; the first that does counts, and then its default.

    Raises:
        ConfigError: there is no such kind.
    """
    found = {}
    for path, group in _groups(model).items():
        if not issubclass(group, PluginConfig) or issubclass(group, MethodConfig):
            continue
        named = (_named_in(tree, path, group.name_field) for tree in given)
        kind = next((one for one in named if one is not None), None)
        if kind is None:
            kind = _default_kind(model, path, group)
        try:
            found[path] = group.registry[kind].params
        except ConfigError as error:
            raise ConfigError(f"{as_printed(path)}: {error}") from None
    return found


def _named_in(values: Mapping[str, object], path: str, name_field: str) -> str | None:
    """The kind of a plug-in that settings name, in whichever spelling; None if none does."""
    parts = path.split(".")
    spellings: list[tuple[str, tuple[str, ...]]] = [
        *((f"{path}.{name_field}", ()), (f"{as_printed(path)}.{name_field}", ())),
        *((name_field, ()), (parts[-1], (name_field,))),
        *((".".join(parts[:cut]), (*parts[cut:], name_field)) for cut in range(1, len(parts) + 1)),
    ]
    for key, below in spellings:
        value = values.get(key)
        for place, name in enumerate(below):
            if isinstance(value, str) and place == len(below) - 1:
                break  # short for the group
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        if isinstance(value, str):
            return value
    return None


def _default_kind(model: type[BaseModel], path: str, group: type[PluginConfig]) -> str:
    first, _, rest = path.partition(".")
    default = _default_group(model.model_fields[first])
    for name in [name for name in rest.split(".") if name]:
        default = getattr(default, name, None)
    return str(getattr(default, group.name_field, group.model_fields[group.name_field].default))


def _paths(
    model: type[BaseModel], kinds: Mapping[str, type[BaseModel]], prefix: str = ""
) -> set[str]:
    """Dotted names of all settings below `model`, those of the plug-ins in `kinds` included."""
    paths = {prefix + name for name in settings_in(model) if name != "params"}
    for path, group in _groups(model, prefix).items():
        if issubclass(group, MethodConfig):
            continue  # written as a group: methods compose each other without end
        paths |= {f"{path}.{name}" for name in settings_in(group) if name != "params"}
        if path in kinds:
            paths |= _paths(kinds[path], {}, f"{path}.")
    return paths


def _full_path(key: str, shown: set[str], hidden: set[str], plugin: Plugin[Any]) -> str:
    """The dotted name of a setting, given by it, without the group of the cold tier or by its last
    part.

    Raises:
        ConfigError: there is none, or there are two.
    """
    paths = shown | hidden
    in_cold = f"{_COLD}.{key}"
    group, dot, _ = key.rpartition(".")
    if key not in paths and (in_cold in paths or (dot and f"{_COLD}.{group}" in paths)):
        return in_cold
    if "." in key or key in paths:
        return key
    matches = sorted(path for path in paths if path.split(".")[-1] == key)
    if not matches:
        from hybrid_kv.former import is_former

        if not is_former(plugin.name, key):
            _refuse_of_another_kind(key, plugin)
        raise unknown_setting(f"{plugin.name} setting", key, shown)
    if len(matches) > 1:
        names = " or ".join(map(as_printed, matches))
        raise ConfigError(f"setting '{key}' may mean {names}; write it out")
    return matches[0]


def _refuse_of_another_kind(key: str, plugin: Plugin[Any]) -> None:
    """Raises ConfigError where other kinds of a plug-in below have a setting of this name."""
    for path, group in _groups(plugin.params).items():
        if not issubclass(group, PluginConfig) or issubclass(group, MethodConfig):
            continue
        kinds = [kind for kind in group.registry if key in settings_in(group.registry[kind].params)]
        if kinds:
            raise ConfigError(
                f"{as_printed(path)}: '{key}' is a setting of kind {', '.join(kinds)}, got another "
                f"{group.name_field}; set {as_printed(path)}={kinds[0]} beside it or leave it out"
            )


def _is_in_a_group(values: Mapping[str, object], path: str) -> bool:
    """Whether a group that is given beside this setting has it too."""
    parts = path.split(".")
    for cut in range(1, len(parts)):
        group = values.get(".".join(parts[:cut]))
        if isinstance(group, str):  # an index by its kind
            group = {"kind": group}
        for name in parts[cut:]:
            group = group.get(name) if isinstance(group, Mapping) else None
        if group is not None:
            return True
    return False


def _begin_anew(
    tree: dict[str, Any], path: str, group: type[BaseModel], values: Mapping[str, object]
) -> None:
    """Drops what the plug-in at `path` was set to where another one is named."""
    if not issubclass(group, PluginConfig):
        return
    *parents, leaf = path.split(".")
    for name in parents:
        tree = inner if isinstance(inner := tree.get(name), dict) else {}
    now, named = tree.get(leaf), values.get(f"{path}.{group.name_field}")
    if named is not None and isinstance(now, Mapping) and now.get(group.name_field) != named:
        tree[leaf] = {} if group.name_field in now else dict(now)


def _place(
    tree: dict[str, Any], path: str, value: object, groups: Mapping[str, type[BaseModel]]
) -> None:
    """Writes a setting, or the settings of a group, into a tree; what else it holds stays."""
    *parents, leaf = path.split(".")
    place = ""
    for name in parents:
        place = f"{place}.{name}" if place else name
        group = _spelled_out(tree.setdefault(name, {}), groups.get(place))
        if not isinstance(group, dict):
            raise ConfigError(f"setting '{path}' cannot be placed: '{name}' holds {group!r}")
        tree[name] = group
        tree = group
    kind, now = groups.get(path), _spelled_out(tree.get(leaf), groups.get(path))
    is_new = kind is None or (issubclass(kind, PluginConfig) and _names_one(kind, value))
    if is_new or not (isinstance(value, Mapping) and isinstance(now, dict)):
        tree[leaf] = value
        return
    tree[leaf] = now
    inner = {
        name[len(path) + 1 :]: one for name, one in groups.items() if name.startswith(f"{path}.")
    }
    for key, one in value.items():
        _place(now, str(key), one, inner)


def _names_one(group: type[PluginConfig], value: object) -> bool:
    """Whether the settings of a plug-in say which one it is."""
    return not isinstance(value, Mapping) or group.name_field in value


def _spelled_out(value: Any, group: type[BaseModel] | None) -> Any:
    """A group from what is short for one: index: "hnsw" is index: {kind: "hnsw"}."""
    if isinstance(value, str) and group is not None and issubclass(group, PluginConfig):
        return {group.name_field: value}
    return value


def first_sentence(error: ValidationError, depth: int = 0) -> str:
    """The first problem of a pydantic error as: name, expected, got.

    Args:
        depth: groups that lead every name and are none of the user's.
    """
    problems = error.errors()
    problem, name = problems[0], _setting_name(problems[0]["loc"][depth:])
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, Exception):
        return f"{name}: {cause}" if name else str(cause)
    if problem["type"] in ("model_type", "model_attributes_type"):
        return f"{name}: a group of settings is expected, got {problem['input']!r}"
    text = problem["msg"][0].lower() + problem["msg"][1:]
    for other in problems[1:]:  # the other members of a union such as Count | Literal["all"]
        if other["type"] == "literal_error" and _setting_name(other["loc"][depth:]) == name:
            text += f" or {other['ctx']['expected']}"
    return f"{name or 'configuration'}: {text}, got {problem['input']!r}"


def _setting_name(loc: tuple[int | str, ...]) -> str:
    # Pydantic mixes names of fields with those of union members: "int", "literal['all']".
    scalars = {"bool", "float", "int", "str"}
    parts = [str(part) for part in loc if part not in scalars]
    return as_printed(".".join(part for part in parts if part.isidentifier() or part.isdigit()))


ConfigLike: TypeAlias = HybridConfig | Mapping[str, Any] | str | None
"""Forms in which a user may write a configuration: see `HybridConfig.of`."""
