"""The instruction sets that tests run on: all that this CPU runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from hybrid_kv.ops.native import library
from tests.pairs import in_pairs
from tests.tolerances import TOLERANCES


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


def each_kernel_with(**parameters: Sequence[Any]) -> pytest.MarkDecorator:
    """Of a test of `engine` and `dtype`, which have code of their own together: each such code with
    each value of each parameter, and each two values of two of these.
    """
    codes = list(product(engine_params(), sorted(TOLERANCES, key=str)))
    rows = [(*code, *values) for code, *values in in_pairs(codes, *parameters.values())]
    names = ("engine", "dtype", *parameters)
    return pytest.mark.parametrize(names, rows, ids=str, indirect=["engine"])


each_engine = pytest.mark.parametrize("isa", engine_params())
needs_engine = pytest.mark.skipif(not library.runnable(), reason="the native engine was not built")
