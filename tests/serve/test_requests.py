"""The border types: what they refuse, and how events reach their readers."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from hybrid_kv.errors import ConfigError, QueueFullError
from hybrid_kv.serve import (
    Finished,
    Limits,
    Prefilled,
    Request,
    RequestHandle,
    Sampling,
    Token,
    Usage,
)

ENDED = Finished("length", Usage(3, 1))
STORY = [Prefilled(3, 3), Token(7, "seven"), ENDED]


def ticket() -> RequestHandle:
    return RequestHandle(Request((1, 2, 3), 1))


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (Sampling, {"temperature": -0.5}, "temperature must be a number of at least 0 and at most"),
        (Sampling, {"temperature": True}, "temperature must be a number"),
        (Sampling, {"temperature": float("nan")}, "got nan"),
        (Sampling, {"top_p": 0}, "top_p must be above 0"),
        (Sampling, {"top_p": 1.5}, "top_p must be a number of at least 0 and at most 1, got 1.5"),
        (Sampling, {"top_k": -1}, "top_k must be a whole number of at least 0, got -1"),
        (Sampling, {"seed": 2**64}, "seed must be a whole number"),
        (
            Sampling,
            {"logprobs": 21},
            "logprobs must be a whole number of at least 0 and at most 20",
        ),
        (Sampling, {"logit_bias": ((-1, 1.0),)}, "token ids of logit_bias must be a whole number"),
        (Sampling, {"logit_bias": ((2.5, 1.0),)}, "token ids of logit_bias must be a whole number"),
        (Request, {"ids": (), "max_new_tokens": 1}, "prompt is empty"),
        (Request, {"ids": (1,), "max_new_tokens": 0}, "max_new_tokens must be a whole number"),
        (Request, {"ids": (1,), "max_new_tokens": 1, "stop": ("",)}, "stop strings must be text"),
        (Request, {"ids": (1,), "max_new_tokens": 1, "audit_every": -1}, "audit_every must be"),
        (Request, {"ids": (1,), "max_new_tokens": 1, "timeout_s": -1}, "timeout_s must be"),
        (
            Request,
            {"ids": (1,), "max_new_tokens": 1, "max_error": 0.0},
            "max_error must be the larg",
        ),
        (Limits, {"max_running": 0}, "max_running must be a whole number of at least 1, got 0"),
        (Limits, {"max_queue": -1}, "max_queue must be a whole number of at least 0, got -1"),
        (Limits, {"max_stall_ms": 0}, "max_stall_ms must be a number of at least 1, got 0"),
        (Limits, {"prefix_bytes": 1.5}, "prefix_bytes must be a whole number"),
    ],
)
def test_what_is_out_of_range_is_refused(kind: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kind(**given)


def test_a_full_queue_says_when_to_come_back() -> None:
    assert QueueFullError("full", 2.5).retry_after_s == 2.5


def test_every_reader_gets_every_event() -> None:
    own, seen = ticket(), list[list[Any]]()
    readers = [threading.Thread(target=lambda: seen.append([*own.events()])) for _ in range(2)]
    for reader in readers:
        reader.start()
    for event in STORY:
        assert not own.is_finished
        own.put(event)
    for reader in readers:
        reader.join(60)
    assert seen == [STORY, STORY]
    assert [*own.events()] == STORY
    assert own.is_finished


def test_what_has_happened_so_far_is_asked_without_waiting() -> None:
    own = ticket()
    assert own.happened == []
    own.put(STORY[0])
    so_far = own.happened
    own.put(STORY[1])
    assert (so_far, own.happened) == (STORY[:1], STORY[:2])


def test_events_reach_asyncio_from_another_thread() -> None:
    own = ticket()

    async def read() -> list[Any]:
        seen = []
        async for event in own.aevents():
            seen.append(event)
            if len(seen) < len(STORY):  # the next one comes while this reader waits
                asyncio.get_running_loop().run_in_executor(None, own.put, STORY[len(seen)])
        return seen

    own.put(STORY[0])
    assert asyncio.run(asyncio.wait_for(read(), 60)) == STORY


def test_a_reader_that_goes_away_leaves_nothing_behind() -> None:
    own = ticket()

    async def read() -> None:
        reading = asyncio.create_task(anext(own.aevents()))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        assert own._listeners
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(read())
    assert not own._listeners
    own.put(ENDED)


def test_cancelling_is_told_once_for_each_call() -> None:
    calls: list[int] = []
    own = RequestHandle(Request((1,), 1), lambda: calls.append(1))
    assert not own.is_cancelled
    own.cancel()
    assert own.is_cancelled
    assert calls == [1]
