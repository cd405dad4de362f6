"""Name -> plug-in maps, one per family.

A plug-in is a class with a nested frozen pydantic model `Params`. Registering it makes it
selectable from Python, YAML and the command line, and enters it into the contract tests.

Built-in plug-ins live in packages above this one. A registry imports its `provider` package by
name, as an entry point would; no lower level depends on what it finds there. The package's table
`BUILT_IN` says which module has a name, and that one is imported when the name is asked for.

Those of others are found by entry points: a distribution names its module under the group that is
called as the provider (`hybrid_kv.methods`, `hybrid_kv.index`), and it is imported when the name is
asked for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel

from hybrid_kv.errors import ConfigError, PluginWarning, unknown_name

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plugin(Generic[T]):
    """One registered class with what users are told about it."""

    name: str
    factory: type[T]
    params: type[BaseModel]
    summary: str
    paper: str


class Registry(Generic[T]):
    """The plug-ins of one family, by name."""

    all: ClassVar[list[Registry[Any]]] = []

    def __init__(self, family: str, provider: str) -> None:
        self.family = family
        self._provider = provider
        self._plugins: dict[str, Plugin[T]] = {}
        self._offers: dict[str, list[EntryPoint]] | None = None
        Registry.all.append(self)

    def others(self) -> set[str]:
        """Names of plug-ins that are registered now and are not built in."""
        return set(self._plugins) - set(self._built_in)

    def register(self, name: str, *, paper: str = "") -> Callable[[type[T]], type[T]]:
        """Class decorator; the first docstring line becomes the summary.

        Raises:
            ConfigError: the name is taken by another class.
        """

        def add(factory: type[T]) -> type[T]:
            if factory.__module__ != self._built_in.get(name):
                self._load(name)
            if name in self._plugins:
                taken = self._plugins[name].factory
                raise ConfigError(
                    f"{self.family} '{name}' is registered already, by {taken.__module__}."
                    f"{taken.__qualname__}; choose another name than {factory.__module__}."
                    f"{factory.__qualname__} does"
                )
            params = getattr(factory, "Params", None)
            if not (isinstance(params, type) and issubclass(params, BaseModel)):
                raise ConfigError(
                    f"{self.family} '{name}' must have a nested class Params of settings, got "
                    f"{'none' if params is None else params!r}; derive one from "
                    "hybrid_kv.config.Params"
                )
            summary = (factory.__doc__ or "").strip().split("\n")[0]
            self._plugins[name] = Plugin(name, factory, params, summary, paper)
            return factory

        return add

    def __getitem__(self, name: str) -> Plugin[T]:
        """The plug-in called `name`.

        Raises:
            ConfigError: no such name; the message has the nearest one. Or one that several have, or
                whose module cannot be imported.
        """
        self._take(name)
        if name not in self._plugins:
            known = {*self._built_in, *self._plugins, *self._offered()}
            raise unknown_name(self.family, name, known)
        return self._plugins[name]

    def __iter__(self) -> Iterator[str]:
        """All names in order; built-in ones are not imported, and those of others that cannot be
        imported are left out, with a warning.
        """
        for name in self._offered():
            try:
                self._take(name)
            except ConfigError as error:
                warnings.warn(str(error), PluginWarning, stacklevel=2)
        return iter(sorted({*self._built_in, *self._plugins}))

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A block at whose end the plug-ins that were registered in it are forgotten."""
        before = dict(self._plugins)
        try:
            yield
        finally:
            # A built-in module is imported once: what it registered stays.
            built_in = self._built_in
            loaded = {name: own for name, own in self._plugins.items() if name in built_in}
            self._plugins = before | loaded

    def has_of(self, module: str) -> bool:
        """Whether a plug-in of this module, or of one inside of it, is registered."""
        places = (plugin.factory.__module__ for plugin in self._plugins.values())
        return any(place == module or place.startswith(f"{module}.") for place in places)

    @cached_property
    def _built_in(self) -> dict[str, str]:
        """The full names of the modules that have the built-in plug-ins, by the names of these."""
        package = import_module(self._provider)
        table = getattr(package, "BUILT_IN", {})
        return {name: f"{self._provider}.{module}" for name, module in table.items()}

    def _load(self, name: str) -> None:
        """Imports the module of a built-in plug-in."""
        if name not in self._plugins and (module := self._built_in.get(name)) is not None:
            import_module(module)

    def _offered(self) -> dict[str, list[EntryPoint]]:
        """Plug-ins that distributions offer, by name; read once, which takes milliseconds."""
        if self._offers is None:
            self._offers = {}
            for offer in entry_points(group=self._provider):
                self._offers.setdefault(offer.name, []).append(offer)
        return self._offers

    def _take(self, name: str) -> None:
        """Imports what is built in, or what a distribution offers, under a name, if anything is."""
        self._load(name)
        offers = self._offered().get(name, [])
        own = self._plugins.get(name)
        if not offers or (own is not None and len(offers) == 1 and _is_of(own, offers[0])):
            return
        if own is not None or len(offers) > 1:
            theirs = [f"{offer.value} of {_distribution(offer)}" for offer in offers]
            ours = [] if own is None else [f"{own.factory.__module__}.{own.factory.__qualname__}"]
            raise ConfigError(
                f"{self.family} '{name}' must be one thing, got {' and '.join(ours + theirs)}; "
                "uninstall one, or ask its author for another name"
            )
        try:
            offers[0].load()
        except Exception as error:
            raise ConfigError(
                f"{self.family} '{name}' of {_distribution(offers[0])} must be importable, got "
                f"{type(error).__name__}: {error}; repair or uninstall it"
            ) from error
        if name not in self._plugins:
            raise ConfigError(
                f"{self.family} '{name}' of {_distribution(offers[0])} must be registered by its "
                f"entry point {offers[0].value}, which registers no such name; tell its author"
            )


def _is_of(own: Plugin[Any], offer: EntryPoint) -> bool:
    """Whether a plug-in comes from the package that an entry point names."""
    return own.factory.__module__.split(".")[0] == offer.module.split(".")[0]


def _distribution(offer: EntryPoint) -> str:
    return "an unknown package" if offer.dist is None else offer.dist.name
