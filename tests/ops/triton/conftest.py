"""Where kernels are run: on a GPU, or by Triton's interpreter on the CPU."""

from __future__ import annotations

import os

import pytest

from hybrid_kv.ops.dispatch import Ops


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Type of the device that the kernels of a test run on."""
    pytest.importorskip("triton", reason="Triton is not installed: scripts/check --triton")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if request.param == "cuda":
        if interpreted:
            pytest.skip("kernels are interpreted in this run: TRITON_INTERPRET=1")
        return "cuda"
    if not interpreted:
        pytest.skip("needs TRITON_INTERPRET=1 before kernels are imported: scripts/check --triton")
    return "cpu"


@pytest.fixture
def ops(device: str) -> Ops:
    """Triton's ops, forced; the test asks `served` whether they were used."""
    return Ops("triton")
