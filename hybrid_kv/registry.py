"""Name -> plug-in maps, one per family.

A plug-in is a class with a nested frozen pydantic model `Params`. Registering it makes it
selectable from Python, YAML and the command line, and enters it into the contract tests.

Built-in plug-ins live in packages above this one. A registry imports its `provider` package by
name on the first lookup, as an entry point would; no lower level depends on what it finds there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Generic, TypeVar

from pydantic import BaseModel

from hybrid_kv.errors import ConfigError, unknown_name

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

    def __init__(self, family: str, provider: str) -> None:
        self.family = family
        self._provider = provider
        self._plugins: dict[str, Plugin[T]] = {}

    def register(self, name: str, *, paper: str = "") -> Callable[[type[T]], type[T]]:
        """Class decorator; the first docstring line becomes the summary.

        Raises:
            ConfigError: the name is taken by another class.
        """

        def add(factory: type[T]) -> type[T]:
            if name in self._plugins:
                raise ConfigError(
                    f"{self.family} '{name}' is registered already; choose another name"
                )
            params: type[BaseModel] = factory.Params  # type: ignore[attr-defined]
            summary = (factory.__doc__ or "").strip().split("\n")[0]
            self._plugins[name] = Plugin(name, factory, params, summary, paper)
            return factory

        return add

    def __getitem__(self, name: str) -> Plugin[T]:
        """The plug-in called `name`.

        Raises:
            ConfigError: no such name; the message has the nearest one.
        """
        import_module(self._provider)
        if name not in self._plugins:
            raise unknown_name(self.family, name, self._plugins)
        return self._plugins[name]

    def __iter__(self) -> Iterator[str]:
        import_module(self._provider)
        return iter(sorted(self._plugins))

    def __contains__(self, name: object) -> bool:
        return name in list(self)
