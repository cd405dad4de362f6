"""The size of what users meet: public names, settings, and files that a configuration loads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import hybrid_kv
import hybrid_kv.plugin
from hybrid_kv.cli.files import build_config
from hybrid_kv.cli.method_pages import common_parameters, parameters_of
from hybrid_kv.cli.options import ModelOptions
from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError
from hybrid_kv.former import FORMER
from hybrid_kv.plugin import INDEXES, METHODS, Index, Method

PUBLIC_NAMES, MODULES, SETTINGS = 12, 42, 20


def test_the_package_has_few_names() -> None:
    assert len(hybrid_kv.__all__) <= PUBLIC_NAMES
    for name in hybrid_kv.__all__:
        assert getattr(hybrid_kv, name).__module__.startswith("hybrid_kv.")


@pytest.mark.parametrize("name", hybrid_kv.plugin.__all__)
def test_names_for_plug_ins_have_one_place(name: str) -> None:
    assert hasattr(hybrid_kv.plugin, name)
    assert not hasattr(hybrid_kv, name)
    with pytest.raises(AttributeError, match=rf"'{name}' .* import it from hybrid_kv\.plugin$"):
        hybrid_kv.__getattr__(name)
    with pytest.raises(ImportError, match=r"import it from hybrid_kv\.plugin$"):
        exec(f"from hybrid_kv import {name}")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Metod'"):
        hybrid_kv.__getattr__("Metod")


@pytest.mark.parametrize(("registry", "family"), [(METHODS, Method), (INDEXES, Index)])
def test_every_built_in_plug_in_is_in_the_table(registry: Any, family: type) -> None:
    for name in registry:
        assert issubclass(registry[name].factory, family)
    package = import_module(registry[name].factory.__module__.rpartition(".")[0])
    there = {path.stem for path in Path(str(package.__file__)).parent.glob("*.py")}
    for module in sorted(there - {"__init__"}):
        import_module(f"{package.__name__}.{module}")
    assert set(registry) == set(package.BUILT_IN), "a module registers a name that is in no table"


LOADED = """
import json, sys, hybrid_kv
hybrid_kv.HybridConfig()
print(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] == "hybrid_kv")))
"""


def test_a_configuration_loads_what_it_names() -> None:
    run = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    loaded = json.loads(run.stdout)
    assert len(loaded) <= MODULES, loaded
    methods = {name for name in loaded if name.startswith("hybrid_kv.methods.")}
    assert methods == {"hybrid_kv.methods.retrieval"}


def test_hybrid_has_few_settings_and_each_can_be_set_as_it_is_printed() -> None:
    printed = [*parameters_of(METHODS["hybrid"].params), *common_parameters()]
    assert len(printed) + 1 <= SETTINGS, "with the method itself"
    for one in printed:
        config = HybridConfig.from_settings({one.name: one.default})
        assert config == HybridConfig()


@pytest.mark.parametrize("name", sorted({*FORMER[""], *FORMER["hybrid"], *FORMER["auto"]}))
def test_a_former_setting_is_refused_by_its_name(name: str) -> None:
    """On the command line; Python has a way to set some of them, for tests and measurements."""
    last = f"cold.{name}" if name in FORMER["hybrid"] and name != "page_budget" else name
    for spelling in {name, last, f"cold.index.{name}" if name in FORMER["auto"] else name}:
        with pytest.raises(ConfigError) as refusal:
            build_config(ModelOptions(settings=[f"{spelling}=1"]))
        assert re.search(
            "is no setting any more; leave it out|is a setting of kind", str(refusal.value)
        )
