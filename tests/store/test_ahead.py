"""Pinned arrays of the next layer are made while it is computed."""

from __future__ import annotations

from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.errors import CapacityError
from hybrid_kv.store import ahead
from hybrid_kv.store.ahead import PinnedAhead

SIZE = (2, 37, 8)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that arrays were made in."""
    import threading

    names: list[str] = []
    plain = ahead.allocate

    def allocate(*arguments: Any, **options: Any) -> Tensor:
        assert options == {"pinned": True}
        names.append(threading.current_thread().name)
        return plain(*arguments, **options)

    monkeypatch.setattr(ahead, "allocate", allocate)
    return names


def test_what_one_layer_took_lies_ready_for_the_next(made: list[str]) -> None:
    arrays = PinnedAhead()
    arrays.begin()
    first = [arrays.take(SIZE, torch.float16), arrays.take(SIZE, torch.float16)]
    arrays.repeat()
    arrays.begin()
    later = [arrays.take(SIZE, torch.float16), arrays.take(SIZE, torch.float16)]
    assert made == ["MainThread"] * 2 + ["hybrid-kv-pin"] * 2
    assert len({tensor.data_ptr() for tensor in first + later}) == 4
    assert all(tensor.shape == SIZE for tensor in later)


def test_another_size_is_made_at_once(made: list[str]) -> None:
    arrays = PinnedAhead()
    arrays.take(SIZE, torch.float16)
    arrays.repeat()
    assert arrays.take((2, 5, 8), torch.float16).shape == (2, 5, 8)
    assert arrays.take(SIZE, torch.float32).dtype == torch.float32
    arrays.clear()
    arrays.take(SIZE, torch.float16)
    assert made.count("MainThread") == 4


def test_nobody_waits_for_what_is_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    go, plain = Event(), ahead.allocate
    arrays = PinnedAhead()
    arrays.take(SIZE, torch.float16)
    monkeypatch.setattr(
        ahead, "allocate", lambda *args, **more: plain(*args, **more) if go.wait(30) else None
    )
    arrays.repeat()
    go.set()
    assert arrays.take(SIZE, torch.float16).shape == SIZE


def test_memory_that_lacks_is_said_to_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = PinnedAhead()
    arrays.take(SIZE, torch.float16)

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise CapacityError("host memory ran out")

    monkeypatch.setattr(ahead, "allocate", refuse)
    arrays.repeat()
    with pytest.raises(CapacityError, match="ran out"):
        arrays.take(SIZE, torch.float16)
