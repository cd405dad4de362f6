"""Old names of modules are refused with the new ones; all others are Python's business."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

import hybrid_kv
from hybrid_kv.former import MODULES, moved
from hybrid_kv.plugin import __all__ as names_for_plug_ins

OLD_AND_NEW = [
    (old[1:] if old[0] == "." else ".".join([*new.split(".")[:-1], old]), new)
    for new, olds in MODULES.items()
    for old in olds.split()
]


def test_every_name_is_there_once() -> None:
    assert len(moved()) == len(OLD_AND_NEW) + len(names_for_plug_ins)


@pytest.mark.parametrize("new", MODULES)
def test_the_new_place_is_there(new: str) -> None:
    assert find_spec(f"hybrid_kv.{new}"), "moved again: name its new place in hybrid_kv/former.py"


@pytest.mark.parametrize(("old", "new"), OLD_AND_NEW)
def test_an_old_module_is_refused_with_the_new_one(old: str, new: str) -> None:
    sentence = f"'hybrid_kv.{old}' is part of hybrid_kv.{new} today; import from there"
    package, _, last = f"hybrid_kv.{old}".rpartition(".")
    for code in (f"import {package}.{last}", f"from {package} import {last}"):
        with pytest.raises(ImportError) as refusal:
            exec(code)
        assert str(refusal.value) == sentence
    assert not hasattr(import_module(package), last)


def test_an_unknown_name_is_refused_by_python() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'hybrid_kv.methods.h3o'$"):
        import_module("hybrid_kv.methods.h3o")
    with pytest.raises(ImportError, match=r"^cannot import name 'h3o' from 'hybrid_kv.methods'"):
        exec("from hybrid_kv.methods import h3o")
    with pytest.raises(ImportError, match=r"^cannot import name 'Metod' from 'hybrid_kv'"):
        exec("from hybrid_kv import Metod")
    assert find_spec("hybrid_kv.methods.h3o") is None
    assert not hasattr(hybrid_kv, "Metod")


IMPORT = """
import json, sys, time
import importlib, logging, typing
begin = time.perf_counter()
import hybrid_kv
seconds = time.perf_counter() - begin
print(json.dumps([seconds, [name for name in sys.modules if name.startswith("hybrid_kv")]]))
"""


def test_the_table_costs_nothing_until_an_import_fails() -> None:
    code = [sys.executable, "-c", IMPORT]
    runs = [subprocess.run(code, capture_output=True, text=True, check=True) for _ in range(3)]
    told = [json.loads(run.stdout) for run in runs]
    assert all(loaded == ["hybrid_kv"] for _, loaded in told)
    assert min(seconds for seconds, _ in told) < 0.05
