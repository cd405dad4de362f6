"""A registry finds plug-ins by name and loads the built-in ones when first asked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from hybrid_kv.errors import ConfigError, PluginWarning
from hybrid_kv.plugin import load_plugin
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


LAMP = """
from pydantic import BaseModel
from tests.test_registry import current

@current[0].register({name!r})
class Lamp:
    '''Gives light.'''

    class Params(BaseModel):
        '''No parameters.'''
"""
Offer = Callable[..., None]
current: list[Registry[Base]] = []
"""The registry that a plug-in of these tests registers with."""


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry[Base]]:
    """A registry whose provider has the lamp and the rug built in, each in a module."""
    package = tmp_path / "house"
    package.mkdir()
    (package / "__init__.py").write_text("BUILT_IN = {'lamp': 'light', 'rug': 'floor'}")
    (package / "light.py").write_text(LAMP.format(name="lamp"))
    (package / "floor.py").write_text(LAMP.format(name="rug"))
    monkeypatch.syspath_prepend(tmp_path)
    current[:] = [Registry("gadget", provider="house")]
    yield current[0]
    for name in ("house", "house.light", "house.floor"):
        sys.modules.pop(name, None)


def test_a_built_in_module_is_imported_when_its_name_is_asked_for(house: Registry[Base]) -> None:
    assert "lamp" in house
    assert list(house) == ["lamp", "rug"]
    assert not {"house.light", "house.floor"} & set(sys.modules)
    assert house["lamp"].summary == "Gives light."
    assert {"house.light", "house.floor"} & set(sys.modules) == {"house.light"}
    with pytest.raises(ConfigError, match="did you mean 'rug'"):
        house["rugg"]


def test_the_name_of_a_built_in_plug_in_is_taken_before_it_is_imported(
    house: Registry[Base],
) -> None:
    with pytest.raises(ConfigError, match=r"'lamp' is registered already, by house\.light\.Lamp"):
        house.register("lamp")(type("Other", (Base,), {}))


def test_a_built_in_plug_in_outlives_the_scope_that_imports_it(house: Registry[Base]) -> None:
    with house.scope():
        house.register("sofa")(type("Sofa", (Base,), {}))
        assert house["lamp"].name == "lamp"
        assert house.others() == {"sofa"}
    assert list(house) == ["lamp", "rug"]
    assert house["lamp"].name == "lamp"


@pytest.fixture
def offered(registry: Registry[Base], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Offer:
    current[:] = [registry]
    monkeypatch.syspath_prepend(tmp_path)

    def offer(package: str, code: str, name: str = "lamp") -> None:
        monkeypatch.delitem(sys.modules, package, raising=False)
        (tmp_path / f"{package}.py").write_text(code)
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[json]\n{name} = {package}\n")

    return offer


def test_a_distribution_s_plugin_is_imported_when_it_is_asked_for(
    registry: Registry[Base], offered: Offer
) -> None:
    offered("shop_of_lamps", LAMP.format(name="lamp"))
    registry.register("rug")(type("Rug", (Base,), {}))
    assert registry["rug"].name == "rug"
    assert "shop_of_lamps" not in sys.modules
    assert registry["lamp"].summary == "Gives light."
    assert list(registry) == ["lamp", "rug"]


def test_a_listing_has_what_distributions_offer(registry: Registry[Base], offered: Offer) -> None:
    offered("shop_of_lamps", LAMP.format(name="lamp"))
    assert list(registry) == ["lamp"]


def test_a_name_that_two_distributions_offer_is_refused(
    registry: Registry[Base], offered: Offer
) -> None:
    offered("one_shop", LAMP.format(name="lamp"))
    offered("other_shop", LAMP.format(name="lamp"))
    with pytest.raises(ConfigError, match="'lamp' must be one thing, got one_shop of one_shop and"):
        registry["lamp"]


def test_a_name_of_ours_that_a_distribution_offers_is_refused(
    registry: Registry[Base], offered: Offer
) -> None:
    offered("one_shop", LAMP.format(name="lamp"))
    registry.register("lamp")(type("OurLamp", (Base,), {}))
    registry.register("rug")(type("Rug", (Base,), {}))
    with pytest.raises(ConfigError, match=r"got tests\.\S+OurLamp and one_shop of one_shop; unins"):
        registry["lamp"]
    assert registry["rug"].name == "rug"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import no_such_module", "of one_shop must be importable, got ModuleNotFoundError: No"),
        ("1 / 0", "must be importable, got ZeroDivisionError"),
        ("", "must be registered by its entry point one_shop, which registers no such name"),
        (LAMP.format(name="rug"), "must be registered by its entry point one_shop"),
        (LAMP.replace("Params", "Settings").format(name="lamp"), "a nested class Params of setti"),
    ],
)
def test_a_distribution_that_is_broken_says_so_and_disturbs_nobody(
    registry: Registry[Base], offered: Offer, code: str, text: str
) -> None:
    offered("one_shop", code)
    registry.register("sofa")(type("Sofa", (Base,), {}))
    assert registry["sofa"].name == "sofa"
    with pytest.warns(PluginWarning, match=text):
        assert "sofa" in list(registry)
    with pytest.raises(ConfigError, match=text):
        registry["lamp"]


def test_a_plugin_is_a_module_or_a_file(
    registry: Registry[Base], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current[:] = [registry]
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_lamps.py").write_text(LAMP.format(name="lamp"))
    (tmp_path / "my rugs.py").write_text(LAMP.format(name="rug"))
    load_plugin("my_lamps")
    for _ in range(2):  # a file is imported once
        load_plugin(str(tmp_path / "my rugs.py"))
    assert list(registry) == ["lamp", "rug"]


@pytest.mark.parametrize(
    ("module", "code", "text"),
    [
        ("no_such_module", None, "got ModuleNotFoundError: No module named 'no_such_module'; give"),
        ("missing.py", None, r"got FileNotFoundError: .*; check it"),
        ("broken.py", "1 / 0", "got ZeroDivisionError: division by zero; check it"),
        ("empty.py", "", "must register a method or an index kind, got neither; decorate"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_refused(
    tmp_path: Path, module: str, code: str | None, text: str
) -> None:
    if code is not None:
        (tmp_path / module).write_text(code)
    where = str(tmp_path / module) if module.endswith(".py") else module
    for _ in range(2):
        with pytest.raises(ConfigError, match=text):
            load_plugin(where)


def test_what_is_registered_in_a_scope_is_forgotten(registry: Registry[Base]) -> None:
    registry.register("lamp")(type("Lamp", (Base,), {}))
    for kind in ("One", "Another"):  # the name is free again
        with registry.scope():
            registry.register("rug")(type(kind, (Base,), {}))
            assert list(registry) == ["lamp", "rug"]
        assert list(registry) == ["lamp"]
