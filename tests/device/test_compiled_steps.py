"""Steps of `compile_decode`, with the model's own forward in the place of a compiled one.

torch compiles nothing while a dispatch mode is on, and the emulated device is one. So what its
compiler makes of the forward, and what CUDA graphs record between two attentions, is not seen here;
what is ours is: the operator that stores and attends, which cache it finds, and its results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybrid_kv.models.compiled import CompiledSteps
from tests.device import emulated
from tests.device.machine import Schedule
from tests.device.models import llama, logits_of, small, tokens

ROUNDING = 2e-4
STEPS = 19
"""In the middle of which a page leaves."""
TURNS = [tokens(171), *(tokens(1, 2 + number) for number in range(STEPS)), tokens(5), tokens(1)]
CONFIGS = {
    "full": small("full"),
    "quest": small("quest"),
    "device": small("hybrid").replace(select="device"),
    "host": small("hybrid").replace(select="host", look_ahead="never"),
}


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In the place of `torch.compile` a forward that runs as it is traced; its mode, by step.

    While it is traced a layer keeps nothing: the operator does, which runs outside of that.
    """
    is_traced, found = [False], []
    attend = CompiledSteps.attend

    def outside(self: CompiledSteps, *args: Any) -> Any:
        is_traced.append(False)
        try:
            return attend(self, *args)
        finally:
            is_traced.pop()

    def as_it_is(forward: Callable[..., Any], *, mode: str, **_: Any) -> Callable[..., Any]:
        def made(**inputs: Any) -> Any:
            found.append(mode)
            is_traced.append(True)
            try:
                return forward(**inputs)
            finally:
                is_traced.pop()

        return made

    monkeypatch.setattr(CompiledSteps, "attend", outside)
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: is_traced[-1])
    monkeypatch.setattr(torch, "compile", as_it_is)
    return found


@pytest.mark.parametrize(
    ("config", "schedule"), [("full", "late"), ("quest", 3), ("device", "late"), ("host", 5)]
)
def test_a_step_by_the_operator_gives_what_it_gives_on_the_host(
    config: str, schedule: Schedule, modes: list[str]
) -> None:
    expected = logits_of(llama(), CONFIGS[config], TURNS)
    with emulated(schedule=schedule, kernels="defined"):
        own = CONFIGS[config].replace(compile_decode=True)
        found = logits_of(llama().to("cuda"), own, TURNS)  # type: ignore[arg-type]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)
    assert modes == ["reduce-overhead"] * (STEPS + 1)
