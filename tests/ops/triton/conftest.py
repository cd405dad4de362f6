"""Where kernels are run: on a GPU, or by Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest

from hybrid_kv.ops.dispatch import Ops
from tests.ops.triton.where import DEVICE


@pytest.fixture
def device() -> str:
    """Type of the device that the kernels of a test run on."""
    return DEVICE


@pytest.fixture
def ops() -> Ops:
    """Triton's ops, forced; the test asks `served` whether they were used."""
    return Ops("triton")
