"""The size of what users meet: public names, settings, and files that a configuration loads."""

from __future__ import annotations

import importlib

import pytest

import hybrid_kv
import hybrid_kv.plugin

PUBLIC_NAMES = 12


def test_the_package_has_few_names() -> None:
    assert len(hybrid_kv.__all__) <= PUBLIC_NAMES
    for name in hybrid_kv.__all__:
        assert getattr(hybrid_kv, name).__module__.startswith("hybrid_kv.")


@pytest.mark.parametrize("name", hybrid_kv.plugin.__all__)
def test_names_for_plug_ins_have_one_place(name: str) -> None:
    assert hasattr(hybrid_kv.plugin, name)
    with pytest.raises(ImportError, match=rf"'{name}' .* import it from hybrid_kv\.plugin$"):
        importlib.import_module("hybrid_kv").__getattr__(name)
    with pytest.raises(ImportError, match=r"import it from hybrid_kv\.plugin$"):
        exec(f"from hybrid_kv import {name}")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Metod'"):
        hybrid_kv.__getattr__("Metod")
