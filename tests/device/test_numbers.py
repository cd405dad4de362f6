"""Steps that a device is told by numbers: places and counts are read from its memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hybrid_kv as hkv
from hybrid_kv.models.cache_argument import passing
from tests.device import Machine, emulated
from tests.device.cuda import values
from tests.device.machine import Schedule
from tests.device.models import llama, logits_of, small, tokens

ROUNDING = 2e-4
METHODS = ("full", "quest", "streaming_llm")


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("schedule", ["late", "ahead"])
@pytest.mark.parametrize("method", METHODS)
def test_steps_by_numbers_give_what_the_host_gives(method: str, schedule: Schedule) -> None:
    """Pages begin and leave, the pool and the table are outgrown."""
    turns = [tokens(130), *(tokens(1, 2 + number) for number in range(70))]
    with emulated(schedule=schedule, kernels="defined") as machine:
        found = logits_of(llama().to("cuda"), small(method), turns)  # type: ignore[arg-type]
    assert machine.counts.kernels["append_at"] == 2 * 69
    assert_alike(found, logits_of(llama(), small(method), turns))


def test_quiet_steps_differ_in_nothing_that_they_tell() -> None:
    """No number of the host that changes from step to step is baked into what is launched."""


def steps_of(machine: Machine, config: hkv.HybridConfig) -> Tensor:
    return values(torch.zeros(1))
