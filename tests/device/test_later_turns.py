"""Many later turns on an emulated device: one extent that grows, and the host's logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import hybrid_kv as hkv
from hybrid_kv.errors import CapacityError, PinnedMemoryWarning
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.ops import pinned, tail
from hybrid_kv.store import pinned_allocator
from hybrid_kv.store.pinned_allocator import PinnedAllocator
from tests.device import emulated
from tests.device.cuda import values
from tests.device.machine import Schedule
from tests.device.models import llama, small, tokens
from tests.device.placement import device, placed
from tests.device.turn_counts import turns_of
from tests.kit import every

ROUNDING = 2e-4
PROMPT, TURN = 403, 290
"""A turn is more than the 256 entries that are locked ahead."""
CONFIGS = {
    "device": small("hybrid").replace(select="device"),
    "host": small("hybrid").replace(select="host", look_ahead="never"),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore::hybrid_kv.errors.BackendWarning"),
    pytest.mark.filterwarnings("ignore::hybrid_kv.errors.DeviceSelectWarning"),
]


class Chat:
    """Caches of a small model where the test computes, and the logits behind each turn."""

    def __init__(self, config: hkv.HybridConfig, runtime: hkv.Attachment, model: Any) -> None:
        self.config, self.model, self.cache = config, model, runtime.cache()
        self.logits: list[Tensor] = []

    def say(self, count: int, seed: int, cache: TieredCache | None = None) -> None:
        given = passing(self.cache if cache is None else cache)
        out = self.model(tokens(count, seed).to(device()), **given, use_cache=True)
        self.logits.append(values(out.logits[:, -1]))


def extents(cache: TieredCache) -> list[list[int]]:
    """Entries of each extent, by layer."""
    return [[extent.length for extent in row.extents] for row in every(cache)]


def played(config: hkv.HybridConfig, way: Callable[[Chat], None]) -> list[Tensor]:
    model = placed(llama())
    model.config.max_position_embeddings = 2**14  # type: ignore[union-attr]
    with torch.inference_mode(), hkv.attach(model, config) as runtime:
        chat = Chat(config, runtime, model)
        way(chat)
        chat.cache.check_integrity()
    return chat.logits


def turns_and_steps(chat: Chat) -> None:
    chat.say(PROMPT, 1)
    for number in range(5):
        chat.say(TURN + number, 2 + number)
        chat.say(1, 20 + number)
    assert [len(own) for own in extents(chat.cache)] == [1, 1]


def crops_behind_what_was_locked_later(chat: Chat) -> None:
    chat.say(PROMPT, 1)
    for number in range(3):
        chat.say(TURN, 2 + number)
        chat.say(1, 20 + number)
    for count, number in ((7, 30), (350, 31), (500, 32)):
        chat.cache.crop(-count)
        chat.say(1, number)
        chat.say(TURN, number + 10)
        chat.say(1, number + 20)
    assert [len(own) for own in extents(chat.cache)] == [1, 1]


def forks_go_on(chat: Chat) -> None:
    """What was shared stays; who goes on begins an extent, which grows by itself."""
    chat.say(PROMPT, 1)
    chat.say(TURN, 2)
    other = chat.cache.fork()
    for number in range(2):
        for cache, seed in ((chat.cache, 10), (other, 40)):
            chat.say(TURN, seed + number, cache)
            chat.say(1, seed + 5 + number, cache)
    other.crop(-2 * TURN)
    chat.say(1, 60, other)
    chat.say(1, 61)
    other.check_integrity()
    assert [len(own) for own in extents(chat.cache)] == [2, 2]


def a_turn_fails_and_is_said_again(chat: Chat) -> None:
    chat.say(PROMPT, 1)
    chat.say(TURN, 2)
    last = chat.model.model.layers[1].mlp
    plain = last.forward

    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("as a test")

    for number in range(2):
        last.forward = fails
        with pytest.raises(RuntimeError, match="as a test"):
            chat.say(TURN, 3)
        last.forward = plain
        chat.cache.check_integrity()
        chat.say(TURN, 4 + number)
    assert [len(own) for own in extents(chat.cache)] == [1, 1]


WAYS = (
    turns_and_steps,
    crops_behind_what_was_locked_later,
    forks_go_on,
    a_turn_fails_and_is_said_again,
)


@pytest.mark.parametrize(("config", "schedule"), [("device", "late"), ("host", 5)])
@pytest.mark.parametrize("way", WAYS)
def test_later_turns_give_what_they_give_on_the_host(
    way: Callable[[Chat], None], config: str, schedule: Schedule
) -> None:
    """Estimates too: the entries of all turns have moments together, as on the host."""
    expected = played(CONFIGS[config], way)
    with emulated(schedule=schedule, kernels="defined"):
        found = played(CONFIGS[config], way)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)


def test_a_step_behind_12_turns_tells_the_device_what_it_tells_behind_one_prompt() -> None:
    """An extent a turn made 129 launches of 62, and took 12 MB of the device for .7, behind 30."""
    first, last = turns_of("device", 0), turns_of("device", 12)
    assert last.extents <= 4
    assert last.launches <= 1.5 * first.launches
    assert last.step.num_waits == first.step.num_waits == 0
    assert last.device_bytes <= 2 * first.device_bytes


def test_where_no_more_can_be_locked_another_extent_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_refused", "_warned"):  # of the process
        monkeypatch.setattr(pinned, name, Event())
    config = CONFIGS["device"].replace(estimate="none")  # moments are of an extent

    def refused(chat: Chat) -> None:
        chat.say(PROMPT, 1)
        chat.say(1, 2)
        with pytest.MonkeyPatch.context() as patch:
            if device().type == "cuda":
                refuses = SimpleNamespace(
                    cudaHostRegister=lambda *_: 2,
                    cudaHostUnregister=torch.cuda.cudart().cudaHostUnregister,
                    cudaGetErrorString=lambda _: "out of memory",
                )
                patch.setattr(torch.cuda, "cudart", lambda: refuses)
            chat.say(TURN, 3)
            chat.say(1, 4)
            before = extents(chat.cache)
        chat.say(TURN, 5)
        chat.say(1, 6)
        if device().type == "cuda":
            for own in (before, extents(chat.cache)):
                assert [len(of_layer) for of_layer in own] == [2, 2]

    expected = played(config, refused)
    with emulated(schedule="late", kernels="defined"), pytest.warns(PinnedMemoryWarning):
        found = played(config, refused)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)


def test_a_turn_for_which_memory_lacks_is_said_again_when_it_is_there() -> None:
    def lacking(chat: Chat) -> None:
        chat.say(PROMPT, 1)
        chat.say(TURN, 2)  # of the room for 256 entries less than the first part of a turn is left
        if device().type == "cuda":
            with pytest.MonkeyPatch.context() as patch:

                def lacks(*_: Any) -> bool:
                    raise CapacityError("host memory ran out: as a test")

                patch.setattr(PinnedAllocator, "lock", lacks)
                with pytest.raises(CapacityError, match="as a test"):
                    chat.say(TURN, 3)
            chat.cache.check_integrity()
        chat.say(TURN, 3)
        chat.say(1, 4)
        assert [len(own) for own in extents(chat.cache)] == [1, 1]

    expected = played(CONFIGS["device"], lacking)
    with emulated(schedule="late", kernels="defined"):
        found = played(CONFIGS["device"], lacking)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)


def test_a_captured_step_goes_on_while_the_cold_tier_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Addresses change once: moments of more entries have more clusters."""
    config = CONFIGS["device"]
    monkeypatch.setattr(pinned_allocator, "pinned_room", lambda count: 32)
    monkeypatch.setattr(tail, "_LEAST_GROWTH", 40)
    count = 56  # more than what is locked ahead, and than moments stay as they are for

    def steps(chat: Chat) -> None:
        chat.say(131, 1)
        for number in range(count):
            chat.say(1, 2 + number)
        assert [len(own) for own in extents(chat.cache)] == [1, 1]
        graphs.append(chat.cache.kv.describe_steps()[0].get("graph"))

    graphs: list[Any] = []
    expected = played(config, steps)
    with emulated(schedule="late", kernels="defined"):
        found = played(config.replace(capture_decode=True), steps)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)
    assert graphs[1]["captures"] == 2
    assert graphs[1]["replays"] >= count - 20


def test_a_context_saved_behind_later_turns_answers_alike(tmp_path: Path) -> None:
    question = tokens(5, 9)[0].tolist()
    model = llama()
    model.config.max_position_embeddings = 2**14
    with (
        emulated(kernels="defined"),
        hkv.load(model.to("cuda"), config=CONFIGS["device"]) as llm,  # type: ignore[arg-type]
    ):
        context = llm.context(tokens(PROMPT)[0].tolist())
        for number in range(2):
            context.append(tokens(TURN, 2 + number)[0].tolist())
        other = context.fork()
        context.save(tmp_path / "a.hkv")
        opened = llm.open(tmp_path / "a.hkv")
        expected = context.ask(question, max_new_tokens=3).token_ids
        assert opened.ask(question, max_new_tokens=3).token_ids == expected
        for one in (context, opened, other):
            one.append(tokens(TURN, 5)[0].tolist())
        expected = context.ask(question, max_new_tokens=3).token_ids
        assert opened.ask(question, max_new_tokens=3).token_ids == expected
        assert other.ask(question, max_new_tokens=3).token_ids == expected
