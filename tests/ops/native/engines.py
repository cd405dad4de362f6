"""The instruction sets that tests run on: all that this CPU runs."""

from __future__ import annotations

import pytest

from hybrid_kv.ops.native import library


def why_not(isa: str) -> str | None:
    """Why the library of an instruction set cannot be loaded here; None where it can."""
    if isa not in library.built():
        return f"engine_{isa} was not built"
    if isa not in library.runnable():
        return f"this CPU does not run {isa}"
    return None


def engine_params() -> list[str]:
    """For `parametrize`: every instruction set that runs here; test_library.py names the others."""
    return [isa for isa in library.ISAS if why_not(isa) is None]


each_engine = pytest.mark.parametrize("isa", engine_params())
needs_engine = pytest.mark.skipif(not library.runnable(), reason="the native engine was not built")
