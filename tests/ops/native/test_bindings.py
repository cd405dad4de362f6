"""The engine's C interface as ctypes knows it, against the headers that declare it."""

from __future__ import annotations

import ctypes
import shutil
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from hybrid_kv.ops.native import bindings, engine_state, library

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    loader = SourceFileLoader("make_bindings", str(ROOT / "scripts" / "make_bindings"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    module.__dict__["__name__"] = loader.name
    sys.modules[loader.name] = module  # dataclasses ask for it
    loader.exec_module(module)
    return module


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "native" / "include", tmp_path / "include"))


def test_they_are_what_the_headers_say(maker: ModuleType) -> None:
    assert maker.TARGET.read_text() == maker.written(maker.read()), "run scripts/make_bindings"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("int32_t num_searches;", "int64_t num_searches;"),
        ("int64_t num_warm;", "int64_t num_warm, more;"),
        ("hkv_step_report *report);", "hkv_step_report *report, float scale);"),
        ("HKV_SEARCH_SKETCH = 2", "HKV_SEARCH_SKETCH = 3"),
    ],
)
def test_a_changed_header_is_seen(maker: ModuleType, headers: Path, old: str, new: str) -> None:
    path = headers / "hybrid_kv_step.h"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    assert maker.written(maker.read(headers)) != maker.TARGET.read_text()


def test_a_type_that_nobody_declares_is_refused(maker: ModuleType, headers: Path) -> None:
    path = headers / "hybrid_kv_linear.h"
    path.write_text(path.read_text().replace("const void *bias", "const hkv_bias *bias", 1))
    with pytest.raises(ValueError, match="'const hkv_bias \\*' is declared nowhere"):
        maker.written(maker.read(headers))


@pytest.mark.parametrize(
    "more",
    [
        "HKV_API int hkv_more(int (*tell)(int32_t));",
        "enum hkv_more { HKV_NEXT };",
        "#define HKV_MORE (1 << 4)",
        "typedef struct hkv_more { struct { int32_t a; } in; } hkv_more;",
        "typedef int32_t hkv_more;",
    ],
)
def test_what_cannot_be_read_is_refused(maker: ModuleType, headers: Path, more: str) -> None:
    path = headers / "hybrid_kv_linear.h"
    path.write_text(
        path.read_text().replace("#ifdef __cplusplus", f"{more}\n#ifdef __cplusplus", 1)
    )
    with pytest.raises(ValueError, match=r"hybrid_kv_linear\.h: cannot read"):
        maker.read(headers)


def test_an_unfolded_structure_has_the_layout_of_its_parts() -> None:
    one = bindings.KVStruct
    assert one.values_data.offset == ctypes.sizeof(bindings.KeysStruct)
    assert one.key_step_0.offset == 2 * ctypes.sizeof(bindings.KeysStruct)
    assert ctypes.sizeof(one) == 2 * ctypes.sizeof(bindings.KeysStruct) + 4 * 8


@pytest.mark.skipif(engine_state().isa is None, reason="no engine")
@pytest.mark.parametrize("isa", library.built())
def test_a_library_has_every_function_with_its_signature(isa: str) -> None:
    if isa not in library.runnable():
        pytest.skip("this CPU cannot run it")
    engine = library.load(isa)
    for name, (result, arguments) in bindings.FUNCTIONS.items():
        function = getattr(engine, name)
        assert (function.restype, list(function.argtypes)) == (result, arguments)
    with pytest.raises(ctypes.ArgumentError):
        engine.hkv_merge(None, 1, 2.5, 1, 1, 0, None, None)
