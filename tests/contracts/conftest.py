"""What all contracts share."""

from __future__ import annotations

import pytest

from hybrid_kv.ops.native import engine_state


@pytest.fixture(autouse=True)
def _trained_parts(untrained_heads: None) -> None:
    """Methods that need trained parts have some."""


@pytest.fixture(params=["one call", "op by op"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a step of a layer is made on the CPU: by one call of the engine, or op by op."""
    made: str = request.param
    if made == "op by op":
        monkeypatch.setenv("HYBRID_KV_ONE_CALL", "0")
    elif engine_state().isa is None:
        pytest.skip("no engine: every op is made by itself")
    return made
