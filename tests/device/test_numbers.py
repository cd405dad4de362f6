"""Steps that a device is told by numbers: places and counts are read from its memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hybrid_kv as hkv
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.types import Work
from tests.device import emulated
from tests.device.cuda import values
from tests.device.machine import Launch, Schedule
from tests.device.models import llama, logits_of, small, tokens

ROUNDING = 2e-4
METHODS = ("full", "quest", "streaming_llm")
PAGE = 4


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize(
    ("method", "schedule"), [(one, "late") for one in METHODS] + [("quest", "ahead")]
)
def test_steps_by_numbers_give_what_the_host_gives(method: str, schedule: Schedule) -> None:
    """Pages begin and leave; a list of 60 pages outgrows its room for 64."""
    config = small(method, page_size=PAGE)
    turns = [tokens(239), *(tokens(1, 2 + number) for number in range(20))]
    with emulated(schedule=schedule, kernels="defined") as machine:
        found = logits_of(llama().to("cuda"), config, turns)  # type: ignore[arg-type]
    assert machine.counts.kernels["append_at"] == 2 * 19
    assert_alike(found, logits_of(llama(), config, turns))


@pytest.mark.parametrize("method", METHODS)
def test_forks_crops_and_failed_steps_keep_their_places(method: str) -> None:
    def steps(device: str) -> tuple[list[Tensor], object]:
        model, parts = llama().to(device), []  # type: ignore[arg-type]
        with torch.inference_mode(), hkv.attach(model, small(method, page_size=PAGE)) as runtime:
            cache = runtime.cache()

            def forward(one: TieredCache, seed: int, count: int = 1) -> None:
                ids = tokens(count, seed).to(device)
                parts.append(values(model(ids, **passing(one)).logits[:, -1]))

            forward(cache, 1, 77)
            for number in range(5):
                forward(cache, number)
            with pytest.raises(RuntimeError, match="no such layer"), _failing(model):
                forward(cache, 9)
            assert cache.get_seq_length() == 82
            cache.kv.work = Work()  # what has failed is counted as far as it came
            cache.crop(-3)
            other = cache.fork()
            for number in range(10):
                forward(cache, 20 + number)
                forward(other, 120 + number)
            forward(other, 3, 5)
            forward(other, 4)
            other.check_integrity()
            cache.check_integrity()
            return parts, cache.work

    with emulated(schedule="late", kernels="defined"):
        found, counted = steps("cuda")
    expected, same = steps("cpu")
    assert_alike(found, expected)
    for name in ("attended", "visible", "steps", "scored"):
        assert getattr(counted, name) == getattr(same, name), name


class _failing:  # noqa: N801
    """A block in which the second layer of a model fails."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._layer = model.model.layers[1]  # type: ignore[union-attr, index]

    def __enter__(self) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("no such layer")

        self._hook = self._layer.register_forward_pre_hook(fail)  # type: ignore[union-attr, operator]

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


@pytest.mark.parametrize("method", METHODS)
def test_a_quiet_step_bakes_no_number_into_our_kernels(method: str) -> None:
    """What changes from step to step is read from memory that stays where it is."""
    ours = ("append_at", "attend_pages", "listed_scores")
    with emulated(kernels="defined") as machine:
        model = llama().to("cuda")  # type: ignore[arg-type]
        with torch.inference_mode(), hkv.attach(model, small(method)) as runtime:
            cache, told = runtime.cache(), []
            model(tokens(130).cuda(), **passing(cache))
            for number in range(4):
                with machine.recorded() as launches:
                    model(tokens(1, 2 + number).cuda(), **passing(cache))
                told.append([_numbers(one) for one in launches if one.name in ours])
    assert told[2]
    assert told[2] == told[3]


def _numbers(launch: Launch) -> tuple[object, ...]:
    """A launch without the addresses of what one step alone has."""
    kept = []
    for operand in launch.operands:
        is_tensor = isinstance(operand, tuple) and len(operand) == 4
        kept.append(operand[1:] if is_tensor else operand)  # type: ignore[index]
    return launch.name, *kept
