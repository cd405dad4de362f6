"""Memory that is refused while a resident store grows: the store is as it was, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.errors import CapacityError
from hybrid_kv.ops import Ops
from hybrid_kv.store import ColdStore, ResidentStore, extent, pool
from hybrid_kv.store.integrity import check_cold
from hybrid_kv.types import LayerShape

SHAPE = LayerShape(layer_idx=0, num_q_heads=6, num_kv_heads=2, head_dim=24)
PAGE = 4


def store(tokens: int) -> ResidentStore:
    made = ResidentStore(SHAPE, PAGE, 1, torch.float32, torch.device("cpu"), tokens)
    made.tables[0].append(*rows(tokens), 0)
    made.pool.enable_digests()
    return made


def rows(count: int) -> tuple[Tensor, Tensor]:
    k, v = torch.randn(2, SHAPE.num_kv_heads, count, SHAPE.head_dim)
    return k, v


def refusing(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    """As `function`, but the `at`-th call is refused."""
    calls = 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise CapacityError("host memory ran out: as a test")
        return function(*args, **options)

    return call


def check_as_before_and_going_on(resident: ResidentStore, before: tuple[Tensor, Tensor]) -> None:
    count = before[0].shape[1]
    resident.check_integrity()
    assert resident.tables[0].num_tokens == count
    k, v = rows(7)
    resident.tables[0].append(k, v, count)
    resident.check_integrity()
    for held, old, new in zip(resident.tables[0].view(), before, (k, v), strict=True):
        assert torch.equal(held, torch.cat([old, new], 1))


@pytest.mark.parametrize("array", [1, 2, 3, 4, 5])  # keys, values, positions, two digests
def test_a_pool_that_cannot_grow_is_as_before(monkeypatch: pytest.MonkeyPatch, array: int) -> None:
    resident = store(13)
    before = [t.clone() for t in resident.tables[0].view()]
    with monkeypatch.context() as patch:
        patch.setattr(pool, "enlarge", refusing(pool.enlarge, array))
        with pytest.raises(CapacityError):
            resident.tables[0].append(*rows(5), 13)
    check_as_before_and_going_on(resident, (before[0], before[1]))


def test_places_that_were_free_before_a_refusal_are_free_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resident = store(16)
    resident.tables[0].truncate(7)
    before = [t.clone() for t in resident.tables[0].view()]
    with monkeypatch.context() as patch:
        patch.setattr(pool, "enlarge", refusing(pool.enlarge, 1))
        with pytest.raises(CapacityError):
            resident.tables[0].append(*rows(30), 7)
    check_as_before_and_going_on(resident, (before[0], before[1]))


@pytest.mark.parametrize("op", ["append", "update_digests"])
@pytest.mark.parametrize("tokens", [12, 13])
def test_tokens_that_could_not_be_written_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, op: str, tokens: int
) -> None:
    resident = store(tokens)
    before = [t.clone() for t in resident.tables[0].view()]
    with monkeypatch.context() as patch:
        patch.setattr(Ops, op, refusing(getattr(Ops, op), 1))
        with pytest.raises(CapacityError):
            resident.tables[0].append(*rows(5), tokens)
    check_as_before_and_going_on(resident, (before[0], before[1]))


def test_an_empty_store_that_could_not_be_written_is_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resident = ResidentStore(
        replace(SHAPE, head_dim=72), PAGE, 1, torch.float32, torch.device("cpu")
    )
    with monkeypatch.context() as patch:
        patch.setattr(Ops, "append", refusing(Ops.append, 1))
        with pytest.raises(CapacityError):
            resident.tables[0].append(*torch.randn(2, 2, 37, 72), 0)
    assert resident.tables[0].num_tokens == 0
    assert resident.in_order
    resident.check_integrity()


def test_digests_that_do_not_fit_can_be_enabled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = ResidentStore(SHAPE, PAGE, 1, torch.float32, torch.device("cpu"))
    resident.tables[0].append(*rows(13), 0)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "allocate", refusing(pool.allocate, 2))
        with pytest.raises(CapacityError):
            resident.pool.enable_digests()
    resident.pool.enable_digests()
    assert resident.tables[0].bounds()[1].shape == (2, 4, 24)
    resident.check_integrity()


@pytest.mark.parametrize("array", [1, 2, 3])  # keys, values, positions
def test_a_cold_row_that_cannot_grow_is_as_before(
    monkeypatch: pytest.MonkeyPatch, array: int
) -> None:
    found = ColdStore(SHAPE, torch.float32, 1)
    old, new = rows(200), rows(100)
    found.chains[0].append(*old, torch.arange(200), None)
    full = found.chains[0].spans[0].extent.positions.shape[0]
    with monkeypatch.context() as patch:
        patch.setattr(extent, "enlarge", refusing(extent.enlarge, array))
        with pytest.raises(CapacityError):
            found.chains[0].append(*rows(full), torch.arange(200, 200 + full), None)
    check_cold(found)
    assert found.chains[0].num_tokens == 200
    found.chains[0].append(*new, torch.arange(200, 300), None)
    check_cold(found)
    assert found.chains[0].positions() == list(range(300))
    for held, first, then in zip(found.chains[0].spans[0].extent.first(300), old, new, strict=True):
        assert torch.equal(held, torch.cat([first, then], 1))
