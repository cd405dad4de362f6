"""What looks at steps or joins them, on an emulated device: audits, look-ahead, joint steps."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

import hybrid_kv as hkv
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.joined import JoinedCache
from tests.device import emulated
from tests.device.cuda import values
from tests.device.machine import Schedule
from tests.device.models import llama, small, tokens
from tests.device.placement import device, placed
from tests.device.test_conversations import CONFIGS, PAGE, ROUNDING

pytestmark = [
    pytest.mark.filterwarnings("ignore::hybrid_kv.errors.BackendWarning"),
    pytest.mark.filterwarnings("ignore::hybrid_kv.errors.DeviceSelectWarning"),
]

PROMPT, STEPS = 203, 11
"""A page leaves in the steps of each cache."""
NO_LIMITS = {"max_missed_mass": None, "max_output_error": None, "min_recall": 0, "action": "raise"}
"""By that action every look is waited for: else some are passed over on a busy machine."""


def joint_steps(config: hkv.HybridConfig) -> list[Tensor]:
    """Logits of steps of four caches together: two prompts, a fork of one of them that went on by
    itself, and a fork of that one.
    """
    model = placed(llama())
    with torch.no_grad(), hkv.attach(model, config) as runtime:
        caches = [runtime.cache(), runtime.cache()]
        for cache, count in zip(caches, (PROMPT, 131), strict=True):
            model(tokens(count, count).to(device()), **passing(cache))
            model(tokens(1, 7).to(device()), **passing(cache))  # ends the prompt
        caches.append(caches[0].fork())
        model(tokens(5, 8).to(device()), **passing(caches[2]))
        caches.append(caches[2].fork())
        found = []
        for number in range(STEPS):
            ids, joined = tokens(4, number).view(4, 1), JoinedCache(caches)
            places = torch.tensor(joined.positions, device=device())
            out = model(ids.to(device()), position_ids=places, **passing(joined))
            assert joined.errors == [None] * 4
            found.append(values(out.logits[:, -1]))
        for cache in caches:
            cache.check_integrity()
    return found


joint_steps_on_the_host = cache(joint_steps)


@pytest.mark.parametrize(
    ("config", "schedule"),
    [("full", "late"), ("device", "late"), ("device", 3), ("host", 3)],
)
def test_joint_steps_give_each_cache_its_own(config: str, schedule: Schedule) -> None:
    settings = CONFIGS.get(config) or small(config, page_size=PAGE)
    expected = joint_steps_on_the_host(settings)
    with emulated(schedule=schedule, kernels="defined"):
        found = joint_steps(settings)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)


def answered(config: hkv.HybridConfig) -> hkv.Generation:
    model = placed(llama())
    with hkv.load(model, config=config) as llm:
        return llm.context(tokens(PROMPT)[0].tolist()).ask([3, 5, 7], max_new_tokens=15)


@pytest.mark.parametrize("select", ["device", "host"])
def test_an_audit_finds_what_it_finds_on_the_host(select: str) -> None:
    """Also beside recorded steps: those that it looks at are made eagerly."""
    config = CONFIGS[select].replace(audit_every=2, audit=NO_LIMITS)
    expected = answered(config)
    with emulated(schedule="late", kernels="defined"):
        found = answered(config)
    assert found.token_ids == expected.token_ids
    assert found.audit is not None
    assert expected.audit is not None
    assert len(found.audit.findings) > 5
    for one, other in zip(found.audit.findings, expected.audit.findings, strict=True):
        assert one.target == other.target
        figures = ((x.recall, x.missed_mass, x.output_error) for x in (one, other))
        assert next(figures) == pytest.approx(next(figures), abs=1e-4)


def test_layers_are_searched_ahead_and_attend_what_they_attend_on_the_host() -> None:
    config = small("hybrid", page_size=PAGE).replace(
        select="host", estimate="none", look_ahead="always"
    )
    found: list[tuple[list[Tensor], list[dict[str, object]]]] = []

    def play() -> None:
        model = placed(llama())
        with torch.no_grad(), hkv.attach(model, config) as runtime:
            cache, logits = runtime.cache(), []
            for number in range(STEPS):
                ids = tokens(1 if number else PROMPT, number).to(device())
                logits.append(values(model(ids, **passing(cache)).logits[:, -1]))
            found.append((logits, cache.kv.layers.describe_look_ahead()))

    play()
    with emulated(schedule="late", kernels="defined"):
        play()
    for one, other in zip(found[1][0], found[0][0], strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)
    for _, layers in found:
        assert [layer["state"] for layer in layers] == ["off", "on"], layers
        assert layers[1]["searches"] == STEPS - 2  # the first step ends the prompt
