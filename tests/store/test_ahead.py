"""Pinned rows are made for the next layer, and locked further, before they are needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from threading import Event
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from hybrid_kv.errors import CapacityError
from hybrid_kv.ops.pinned import PinnedRows
from hybrid_kv.store import pinned_allocator
from hybrid_kv.store.pinned_allocator import PinnedAllocator
from tests.ops.fake_cudart import FakeCudart, fake_cuda

SIZE, LOCKED = (2, 1000, 8), 300


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudart]:
    with fake_cuda(monkeypatch) as made:
        yield made


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that rows were made in."""
    names: list[str] = []

    def rows(*arguments: Any) -> PinnedRows:
        names.append(threading.current_thread().name)
        return PinnedRows(*arguments)

    monkeypatch.setattr(pinned_allocator, "PinnedRows", rows)
    return names


def test_what_one_layer_took_lies_ready_for_the_next(made: list[str], cuda: FakeCudart) -> None:
    pinned = PinnedAllocator()
    pinned.begin()
    first = [pinned.take(SIZE, torch.float16, LOCKED), pinned.take(SIZE, torch.float16, LOCKED)]
    pinned.repeat()
    pinned.begin()
    later = [pinned.take(SIZE, torch.float16, LOCKED), pinned.take(SIZE, torch.float16, LOCKED)]
    assert made == ["MainThread"] * 2 + ["hybrid-kv-pin"] * 2
    assert len({one.rows.data_ptr() for one in first + later}) == 4
    for one in later:
        assert one.rows.shape[::2] == SIZE[::2]
        assert LOCKED <= one.locked < one.capacity


def test_another_size_is_made_at_once(made: list[str]) -> None:
    pinned = PinnedAllocator()
    pinned.take(SIZE, torch.float16, LOCKED)
    pinned.repeat()
    assert pinned.take((2, 5, 8), torch.float16, 5).rows.shape[2] == 8
    assert pinned.take(SIZE, torch.float32, LOCKED).rows.dtype == torch.float32
    pinned.clear()
    pinned.take(SIZE, torch.float16, LOCKED)
    assert made.count("MainThread") == 4


def test_nobody_waits_for_what_is_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    go = Event()
    pinned = PinnedAllocator()
    pinned.take(SIZE, torch.float16, LOCKED)
    monkeypatch.setattr(
        pinned_allocator, "PinnedRows", lambda *args: PinnedRows(*args) if go.wait(30) else None
    )
    pinned.repeat()
    go.set()
    assert pinned.take(SIZE, torch.float16, LOCKED).rows.shape[2] == 8


def test_memory_that_lacks_is_said_to_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = PinnedAllocator()
    pinned.take(SIZE, torch.float16, LOCKED)

    def refuse(*_: Any) -> None:
        raise CapacityError("host memory ran out")

    monkeypatch.setattr(pinned_allocator, "PinnedRows", refuse)
    pinned.repeat()
    with pytest.raises(CapacityError, match="ran out"):
        pinned.take(SIZE, torch.float16, LOCKED)


def test_rows_are_locked_further_in_a_thread_and_who_needs_them_waits(cuda: FakeCudart) -> None:
    pinned, plain, go = PinnedAllocator(), cuda.cudaHostRegister, Event()
    rows = pinned.take(SIZE, torch.float16, LOCKED)

    def slow(*words: int) -> Any:
        names.append(threading.current_thread().name)
        assert go.wait(30)
        return plain(*words)

    names: list[str] = []
    cuda.cudaHostRegister = slow  # type: ignore[method-assign]
    pinned.begin_lock(rows, 700)
    assert rows.locked < 700, "nobody waits"
    go.set()
    assert pinned.lock(rows, 700)
    assert set(names) == {"hybrid-kv-pin"}


def test_memory_that_lacks_further_on_is_said_to_who_needs_it(
    cuda: FakeCudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = PinnedAllocator()
    rows = pinned.take((2, 10**6, 8), torch.float16, LOCKED)
    before = rows.locked
    with monkeypatch.context() as patch:
        patch.setattr(
            psutil, "virtual_memory", lambda: SimpleNamespace(available=2**20, total=2**30)
        )
        pinned.begin_lock(rows, 200_000)
        with pytest.raises(CapacityError, match="the cache grows by"):
            pinned.lock(rows, 200_000)
    assert rows.locked == before
    assert pinned.lock(rows, 200_000)


def test_where_address_space_is_refused_rows_have_no_room_to_grow(
    cuda: FakeCudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some systems set memory aside for it (vm.overcommit_memory=2)."""

    def strict(size: tuple[int, ...], dtype: torch.dtype) -> PinnedRows:
        if size[1] > LOCKED:
            raise CapacityError("host memory ran out")
        return PinnedRows(size, dtype)

    monkeypatch.setattr(pinned_allocator, "PinnedRows", strict)
    rows = PinnedAllocator().take(SIZE, torch.float16, LOCKED)
    assert LOCKED <= rows.locked == rows.capacity < SIZE[1]
