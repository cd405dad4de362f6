"""Every test here that asks for `engine` runs on each instruction set that the CPU has."""

from __future__ import annotations

import ctypes

import pytest

from hybrid_kv.ops.native import library
from tests.ops.native.engines import engine_params


@pytest.fixture(params=engine_params())
def engine(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return library.load(request.param)
