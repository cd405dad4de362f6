"""The names for authors of plug-ins: what a method or an index is made of, and where it registers.

from hybrid_kv.plugin import METHODS, Method, Params, Placement, Read
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from hybrid_kv.config import Params
from hybrid_kv.entries import Attended, Entries
from hybrid_kv.errors import ConfigError, MethodError
from hybrid_kv.plugins import INDEXES, METHODS, Index, Method, Placement
from hybrid_kv.ragged import Ragged
from hybrid_kv.registry import Registry
from hybrid_kv.types import (
    Demotion,
    Evidence,
    LayerShape,
    ModelInfo,
    Needs,
    Read,
    SearchResult,
    Tiers,
    TokenBudget,
)

__all__ = [
    "INDEXES",
    "METHODS",
    "Attended",
    "Demotion",
    "Entries",
    "Evidence",
    "Index",
    "LayerShape",
    "Method",
    "MethodError",
    "ModelInfo",
    "Needs",
    "Params",
    "Placement",
    "Ragged",
    "Read",
    "SearchResult",
    "Tiers",
    "TokenBudget",
]


def load_plugin(module: str) -> None:
    """Imports a module that registers methods or index kinds.

    Args:
        module: its dotted name, or the path of a .py file.

    Raises:
        ConfigError: it cannot be imported, or registers nothing.
    """
    before, path = _others(), Path(module)
    try:
        name = _import_file(path) if path.suffix == ".py" else import_module(module).__name__
    except ConfigError:
        raise
    except Exception as error:
        way = "check it" if path.suffix == ".py" else "give the path of its .py file, or install it"
        raise ConfigError(
            f"plugin '{module}' must be a module that can be imported, got {type(error).__name__}: "
            f"{error}; {way}"
        ) from error
    if _others() == before and not any(one.has_of(name) for one in Registry.all):
        raise ConfigError(
            f"plugin '{module}' must register a method or an index kind, got neither; decorate its "
            "class with @METHODS.register(NAME) or @INDEXES.register(NAME)"
        )


def _others() -> list[set[str]]:
    return [registry.others() for registry in Registry.all]


def _import_file(path: Path) -> str:
    """Imports a file once; the name of its module."""
    place = path.resolve()
    name = f"hybrid_kv_plugin_{place.stem}_{abs(hash(str(place))):x}"
    if name in sys.modules:
        return name
    spec = spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module in {place}")
    module = module_from_spec(spec)
    sys.modules[name] = module  # pydantic looks up annotations there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return name
