"""Keywords that a Python call does not have are refused with what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from inspect import Parameter, signature
from typing import ParamSpec, TypeVar

from hybrid_kv.config import HybridConfig, as_printed
from hybrid_kv.errors import ConfigError, nearest_name
from hybrid_kv.plugins import METHODS

P = ParamSpec("P")
R = TypeVar("R")

_NAMED = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def known_keywords_only(call: Callable[P, R]) -> Callable[P, R]:
    """Lets a function refuse keywords that it does not have as `refuse_unknown` does.

    Python's own TypeError knows neither the nearest name nor the settings of a cache.
    """
    parameters = signature(call).parameters.values()
    known = {it.name for it in parameters if it.kind in _NAMED} - {"self"}
    name = call.__qualname__.removesuffix(".__init__")

    @wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_unknown(name, kwargs, known)
        return call(*args, **kwargs)

    return checked


def refuse_unknown(
    call: str, given: Mapping[str, object], known: Collection[str], more: Collection[str] = ()
) -> None:
    """Looks whether a call has the keywords that it was given.

    Args:
        call: what the error calls it.
        more: names that it has too, too many to list.

    Raises:
        ConfigError: it has not; where the name is a setting of the cache, or near to one, the
            message says how that is written.
    """
    for name in given.keys() - known - set(more):
        near = nearest_name(name, {*known, *more, *_settings_like(name)})
        fault = f"{call} has no keyword '{name}'"
        if near is None or near in known or near in more:
            hint = f"did you mean '{near}'? " if near else ""
            raise ConfigError(f"{fault}; {hint}known: {', '.join(sorted(known)) or '(none)'}")
        value = given[name] if isinstance(given[name], (str, int, float)) else ...
        place = "" if "config" in known else " where the model is loaded or attached"
        write = f"write config={{'{near}': {'...' if value is ... else repr(value)}}}{place}"
        if near.split(".")[-1] == name:
            raise ConfigError(f"{fault}, which is a setting of the cache; {write}")
        raise ConfigError(f"{fault}; did you mean '{near}', a setting of the cache? {write}")


def _settings_like(name: str) -> set[str]:
    """Printed names of the settings of all methods; where the default method has one of this name,
    that is meant.
    """
    usual = HybridConfig.settings_of(HybridConfig().method)
    same = {setting for setting in usual if setting.split(".")[-1] == name}
    every = (HybridConfig.settings_of(method) for method in METHODS)
    return set(map(as_printed, same or {setting for found in every for setting in found}))
