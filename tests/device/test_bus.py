"""Bytes over the bus in reports and plans, held to those that an emulated device counts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch

import hybrid_kv as hkv
from hybrid_kv.index import _device_keys
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.support import inspect_model
from hybrid_kv.planning.designs import Designs, DesignStep, Host
from hybrid_kv.planning.plan import ModelFacts
from hybrid_kv.planning.rates import CARDS, Rates
from hybrid_kv.planning.traffic import bytes_per_step
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import Work
from tests.device import emulated
from tests.device.machine import Counts
from tests.device.models import llama, tokens
from tests.device.step_counts import config_of
from tests.kit import extents

PROMPT, STEPS, PAGE = 300, 11, 16
LEAVING, QUIET = 3, 10
"""Steps: at the end of the first a page leaves; by the second look-ahead has had its trial."""
GROUP = 2
LONG = 2**11
NUMBERS, FLAG = 60, 1
"""Bytes of a layer's places and counts, where steps go by them; and whether all is finite."""
DTYPES = [torch.float32, torch.bfloat16]
BY_NUMBERS = ["full", "quest", "streaming_llm", "hybrid"]
SEARCHED = ["flat", "infllm", "hybrid:select=host"]

pytestmark = pytest.mark.filterwarnings("ignore::hybrid_kv.errors.BackendWarning")


def facts(dtype: torch.dtype, layers: int = 2) -> ModelFacts:
    return ModelFacts(
        name="llama",
        weight_bytes=1,
        read_bytes=1,
        layers=inspect_model(llama(layers=layers)).layers,
        window_bytes=0,
        hidden_size=64,
        intermediate_size=128,
        dtype_bytes=dtype.itemsize,
        max_context_tokens=LONG,
    )


class Taken(NamedTuple):
    """A step as the device counted it, as the cache did, and as a profile tells it.

    ranked: bytes of keys that codes are said to put first.
    """

    device: Counts
    work: Work
    told: dict[str, int]
    ranked: int


@cache
def taken_by(name: str, dtype: torch.dtype = torch.float32, layers: int = 2) -> list[Taken]:
    """Steps behind a prompt; "never" behind a name is no look-ahead."""
    name, _, changes = name.partition(" ")
    config = config_of(name)
    return taken(config.replace(look_ahead=changes) if changes else config, dtype, layers)


def taken(
    config: hkv.HybridConfig, dtype: torch.dtype = torch.float32, layers: int = 2
) -> list[Taken]:
    """Steps behind a prompt."""
    found, of_model = [], facts(dtype, layers)
    with emulated(schedule="late", kernels="defined") as machine:
        model = llama(layers=layers).to(dtype).to("cuda")  # type: ignore[arg-type]
        with torch.inference_mode(), hkv.attach(model, config) as runtime:
            cache = runtime.cache()
            model(tokens(PROMPT).cuda(), **passing(cache))
            for number in range(STEPS):
                ids, cache.kv.work = tokens(1, 2 + number).cuda(), Work()
                machine.arrive()
                before = machine.counts.copy()
                model(ids, **passing(cache))
                machine.arrive()
                kv, device = cache.kv, machine.counts.since(before)
                told = bytes_per_step(of_model, kv, kv.work, on_device=True)
                found.append(Taken(device, kv.work, told, ranked(kv)))
    return found


def beside(step: Taken) -> int:
    """Bytes of copies that the cache does not call transfers."""
    return step.device.to_device + step.device.to_host - step.work.transfer_bytes


def ranked(kv: KVCache) -> int:
    selectors = (extent.index.selector for extent in extents(kv) if extent.has_index)
    top_k = getattr(getattr(kv.config.params, "cold", None), "top_k", 0)
    with_keys, without = GROUP, 0  # queries
    return sum(
        index.selection_bytes(with_keys, top_k) - index.selection_bytes(without, top_k)
        for index in selectors
        if index is not None
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*BY_NUMBERS, *SEARCHED])
def test_a_profile_says_what_travels(name: str, dtype: torch.dtype) -> None:
    """Also with a device that selects a profile told of queries, and of no result in float32."""
    steps = taken_by(name, dtype)
    quiet, leaving = steps[QUIET], steps[LEAVING]
    own = FLAG + (2 * NUMBERS if name in BY_NUMBERS else 0)
    assert beside(quiet) == own
    assert (quiet.work.transfer_bytes > 0) is (name in SEARCHED)
    offloads = name in ("hybrid", *SEARCHED)
    page = beside(leaving) - own if offloads else 0
    assert page == offloads * PAGE * facts(dtype).kv_bytes_per_token
    assert quiet.told["transfer"] == quiet.work.transfer_bytes + page // PAGE


def test_rows_that_a_device_reads_of_the_host_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for width in ("_LEAST_WIDTH", "_MOST_WIDTH"):  # less than all keys, so that codes count
        monkeypatch.setattr(_device_keys, width, 64)
    config = config_of("hybrid").replace(top_k=10)
    steps = taken(config)
    said = sum(step.ranked + step.work.cold_bytes for step in steps)
    assert sum(step.device.read for step in steps) == pytest.approx(said, rel=0.2)


@pytest.mark.parametrize("name", ["full", "quest", "streaming_llm", "flat", "hybrid:select=host"])
def test_a_device_and_the_host_count_the_same_work(name: str) -> None:
    there = replace(taken_by(name)[-1].work, transfer_bytes=0)
    model = llama()
    with torch.inference_mode(), hkv.attach(model, config_of(name)) as runtime:
        cache = runtime.cache()
        model(tokens(PROMPT), **passing(cache))
        for number in range(STEPS):
            cache.kv.work = Work()
            model(tokens(1, 2 + number), **passing(cache))
    assert cache.kv.work.transfer_bytes == 0
    assert cache.kv.work == there


def design(name: str, dtype: torch.dtype, layers: int) -> DesignStep:
    card, rates, host = CARDS["rtx-4090"], Rates(900.0, 70.0, 35.0), Host(2, 70.0, 35.0)
    steps = Designs(facts(dtype, layers), LONG, card, rates, host).all()
    return next(one for one in steps if one.design.startswith(name))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_plan_has_the_bytes_and_waits_of_a_search_on_the_host(dtype: torch.dtype) -> None:
    plan = design("sketch on the host", dtype, 2)
    quiet = taken_by("hybrid:select=host never", dtype)[QUIET]
    assert quiet.told["transfer"] == plan.bus_bytes
    assert 2 * quiet.device.num_waits == plan.waits  # there and back


def test_a_plan_has_the_launches_of_a_layer() -> None:
    """In 16 bit, where norms are raised to 32. It counted three of ours that are no more."""
    for name, of_plan in (
        ("hybrid:select=host never", "sketch on the host"),
        ("hybrid", "sketch on the device"),
    ):
        few, more = (taken_by(name, torch.bfloat16, layers)[QUIET].device for layers in (2, 3))
        told = [one.launches + one.copies for one in (few, more)]
        plans = [design(of_plan, torch.bfloat16, layers) for layers in (2, 3)]
        assert told[1] - told[0] == plans[1].launches - plans[0].launches
