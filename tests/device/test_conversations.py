"""Ways of going on with a cache, on an emulated device: each gives the host's logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

import hybrid_kv as hkv
from hybrid_kv.models.cache_state import passing
from tests.contracts.architectures import build
from tests.device import emulated
from tests.device.cuda import values
from tests.device.machine import Schedule
from tests.device.models import llama, small, tokens
from tests.device.placement import device, placed
from tests.kit import extents

ROUNDING = 2e-4
PAGE = 8
"""Tokens: one leaves in a few steps."""

pytestmark = [
    pytest.mark.filterwarnings("ignore::hybrid_kv.errors.BackendWarning"),
    pytest.mark.filterwarnings("ignore::hybrid_kv.errors.DeviceSelectWarning"),
]


class Talk:
    """A cache of a small model where the test computes, and the logits behind each turn."""

    def __init__(self, model: torch.nn.Module, runtime: hkv.Attachment) -> None:
        self.model, self.cache = model, runtime.cache()
        self.logits: list[Tensor] = []

    def say(self, ids: Tensor, **extra: Tensor) -> None:
        given = {name: one.to(device()) for name, one in extra.items()}
        out = self.model(ids.to(device()), **given, **passing(self.cache), use_cache=True)
        self.logits.append(values(out.logits[:, -1]))

    def steps(self, count: int, rows: int = 1) -> None:
        for number in range(count):
            self.say(tokens(rows, 20 + number).view(rows, 1))


def padded_rows(talk: Talk) -> None:
    """Two rows, of which the second begins later; then steps, a turn of 18 tokens, a step."""
    turns = [tokens(2 * new, new).view(2, new) for new in (133, 1, 1, 18, 1)]
    mask = torch.ones(2, 0, dtype=torch.long)
    for ids in turns:
        shown = torch.ones_like(ids)
        if not mask.shape[1]:
            shown[1, :58] = 0
        mask = torch.cat([mask, shown], 1)
        places = _places(mask)[:, -ids.shape[1] :]
        talk.say(ids, attention_mask=mask, position_ids=places)


def _places(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp_min(0)


def crops(talk: Talk) -> None:
    talk.say(tokens(203))
    for number in range(4):
        talk.say(tokens(5, 30 + number))
        talk.cache.crop(-3)
    talk.steps(2)


def long_turns(talk: Talk) -> None:
    for number, count in enumerate((151, 90, 1, 83, 1, 3)):
        talk.say(tokens(count, number))


def repeated_rows(talk: Talk) -> None:
    talk.say(tokens(167))
    talk.cache.batch_repeat_interleave(3)
    talk.steps(2, rows=3)
    talk.cache.batch_select_indices(torch.tensor([2, 0], device=device()))
    talk.steps(PAGE + 1, rows=2)


WAYS: dict[str, Callable[[Talk], None]] = {
    "padded_rows": padded_rows,
    "crops": crops,
    "long_turns": long_turns,
    "repeated_rows": repeated_rows,
}
CONFIGS = {
    "device": small("hybrid", page_size=PAGE).replace(select="device"),
    "host": small("hybrid", page_size=PAGE).replace(select="host", look_ahead="never"),
    "quest": small("quest", page_size=PAGE),
}


def played(way: str, config: hkv.HybridConfig, name: str = "") -> list[Tensor]:
    model = placed(build(name) if name else llama())
    with torch.no_grad(), hkv.attach(model, config) as runtime:
        talk = Talk(model, runtime)
        WAYS[way](talk)
        talk.cache.check_integrity()
        if config.method == "hybrid" and talk.cache.kv.layers:
            assert selects(talk.cache) == {config.params.cold.select == "device"}
    return talk.logits


on_the_host = cache(played)
"""Once for all schedules."""


def selects(cache: hkv.HybridCache) -> set[bool]:
    """Whether the device finds cold entries, by what serves each extent."""
    return {one.has_index and one.index.selector is not None for one in extents(cache)}


def held_to_the_host(
    way: str, config: hkv.HybridConfig, schedule: Schedule, name: str = ""
) -> None:
    expected = on_the_host(way, config, name)
    with emulated(schedule=schedule, kernels="defined"):
        found = played(way, config, name)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize(
    ("config", "schedule"), [("device", "late"), ("device", 5), ("host", 5), ("quest", "late")]
)
@pytest.mark.parametrize("way", WAYS)
def test_a_way_of_going_on_gives_what_it_gives_on_the_host(
    way: str, config: str, schedule: Schedule
) -> None:
    held_to_the_host(way, CONFIGS[config], schedule)


OTHERS = ["mistral", "gemma2", "gemma3", "gpt_oss", "glm4", "phi3", "olmo2"]


@pytest.mark.parametrize(
    ("method", "name"),
    [
        *(("device", name) for name in OTHERS),
        # Architectures and methods differ in other places: each meets each of the others' kind.
        *zip(["full", "quest", "host", "full", "quest", "host", "full"], OTHERS, strict=True),
    ],
)
def test_other_architectures_give_what_they_give_on_the_host(name: str, method: str) -> None:
    """Where every layer slides (mistral), a GPU looked for the widest layer of none, and failed."""
    config = (CONFIGS.get(method) or small(method)).replace(prefill_chunk_tokens=80)
    held_to_the_host("long_turns", config, "late", name)
