"""Two quiet steps recorded whole and compared: what a graph of the forward would hold for ever."""

from __future__ import annotations

import pytest
import torch

import hybrid_kv as hkv
from hybrid_kv.models.cache_state import passing
from tests.contracts.architectures import build
from tests.device import emulated
from tests.device.machine import Recording, differences
from tests.device.models import small, tokens

pytestmark = pytest.mark.filterwarnings("ignore::hybrid_kv.errors.BackendWarning")


def quiet_steps(name: str) -> tuple[Recording, Recording]:
    """What the third and fourth step of an architecture tell the device, within a page."""
    recordings = []
    with emulated(kernels="defined") as machine:
        model = build(name)
        with torch.no_grad(), hkv.attach(model, small("full")) as runtime:
            cache = runtime.cache()
            model(tokens(65).cuda(), **passing(cache), use_cache=True)
            ids = tokens(1, 3).cuda()
            for _ in range(4):
                with machine.recorded() as recording:
                    model(ids, **passing(cache), use_cache=True)
                recordings.append(recording)
    return recordings[2], recordings[3]


def changed(name: str) -> list[str]:
    first, second = quiet_steps(name)
    return differences(first.by_allocation(), second.by_allocation())


def places(found: list[str]) -> set[str]:
    """The lines that told the device something else, without their numbers."""
    return {line.split(" became ")[0].split(": ", 1)[1] for line in found}


def test_of_two_quiet_steps_only_positions_numbers_and_the_flags_place_differ() -> None:
    """The model's own position, our numbers in one copy, and where the flags of finite keys go: a
    graph of the whole forward has to be given no more than that.
    """
    found = places(changed("llama"))
    assert {one.split(":")[0] for one in found} == {
        "aten.add.Tensor at models/llama/modeling_llama.py",
        "to_device at runtime/device_plan.py",
        "to_host at transfer/cuda.py",
    }


def test_a_layer_that_slides_reads_what_the_step_before_it_has_allocated() -> None:
    """Keys and values are joined anew in each step, by transformers: a graph would read those of
    its own first step at each replay, and no wait and no number would show it.
    """
    found = {one.split(":")[0] for one in places(changed("gemma3"))}
    assert "aten.cat.default at cache_utils.py" in found
    assert "aten.cat.default at cache_utils.py" not in {
        one.split(":")[0] for one in places(changed("llama"))
    }
