"""A registry finds plug-ins by name and loads the built-in ones when first asked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel

from hybrid_kv.errors import ConfigError
from hybrid_kv.registry import Plugin, Registry


class Base:
    """What the plug-ins of these tests have in common."""

    class Params(BaseModel):
        """No parameters."""


@pytest.fixture
def registry() -> Registry[Base]:
    return Registry("gadget", provider="json")  # any module without plug-ins


def test_a_plugin_is_found_by_its_name(registry: Registry[Base]) -> None:
    @registry.register("lamp", paper="https://example.org/lamp")
    class Lamp(Base):
        """Gives light.

        Needs power.
        """

    assert registry["lamp"] == Plugin(
        "lamp", Lamp, Base.Params, "Gives light.", "https://example.org/lamp"
    )


def test_names_come_in_order(registry: Registry[Base]) -> None:
    for name in ("rug", "lamp"):
        registry.register(name)(type("Any", (Base,), {}))
    assert list(registry) == ["lamp", "rug"]
    assert "lamp" in registry
    assert "sofa" not in registry


def test_an_unknown_name_is_refused_with_the_nearest(registry: Registry[Base]) -> None:
    registry.register("lamp")(type("Lamp", (Base,), {}))
    with pytest.raises(ConfigError, match=r"^unknown gadget 'lmap'; did you mean 'lamp'"):
        registry["lmap"]


def test_a_name_is_given_once(registry: Registry[Base]) -> None:
    registry.register("lamp")(type("Lamp", (Base,), {}))
    with pytest.raises(ConfigError, match="gadget 'lamp' is registered already"):
        registry.register("lamp")(type("Other", (Base,), {}))


def test_a_class_without_docstring_has_an_empty_summary(registry: Registry[Base]) -> None:
    registry.register("bare")(type("Bare", (), {"Params": BaseModel}))
    assert registry["bare"].summary == ""


@pytest.mark.parametrize("look", [list, lambda r: "lamp" in r, lambda r: r["lamp"]])
def test_the_provider_is_imported_on_the_first_lookup(
    look: Callable[[Registry[Base]], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_gadgets.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lazy_gadgets", raising=False)
    registry: Registry[Base] = Registry("gadget", provider="lazy_gadgets")
    registry.register("lamp")(type("Lamp", (Base,), {}))
    assert "lazy_gadgets" not in sys.modules
    look(registry)
    assert "lazy_gadgets" in sys.modules
