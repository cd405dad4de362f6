"""Appending is amortised O(1): storage is taken a logarithmic number of times, never per token."""

from __future__ import annotations

import itertools
import math

import torch

from hybrid_kv.plugins import Placement
from hybrid_kv.store import ColdStore, LayerStore, Overflow, ResidentStore
from hybrid_kv.store.integrity import check_cold
from hybrid_kv.types import Demotion, LayerShape
from tests.store.scene import append, flat_index

TOKENS = 10_000
SHAPE = LayerShape(0, 2, 1, 4)


def one_token() -> torch.Tensor:
    return torch.ones(1, 1, 1, 4)


def moves(addresses: list[int]) -> int:
    return sum(a != b for a, b in itertools.pairwise(addresses))


def test_resident_pages_move_a_logarithmic_number_of_times() -> None:
    store = LayerStore(SHAPE, 16, 1, torch.float32, torch.device("cpu"))
    addresses, copied = [], 0
    for _ in range(TOKENS):
        append(store, one_token(), one_token())
        addresses.append(store.resident.pool.k.data_ptr())
        if len(addresses) > 1 and addresses[-1] != addresses[-2]:
            copied += store.rows[0].table.num_tokens - 1
    assert moves(addresses) <= math.log2(TOKENS / 16) + 1
    assert copied <= 2 * TOKENS


def test_reserved_resident_pages_never_move() -> None:
    store = LayerStore(SHAPE, 16, 1, torch.float32, torch.device("cpu"), capacity_tokens=500)
    address = store.resident.pool.k.data_ptr()
    for _ in range(500):
        append(store, one_token(), one_token())
    assert store.resident.pool.k.data_ptr() == address


def test_cold_entries_move_a_logarithmic_number_of_times() -> None:
    store = ColdStore(SHAPE, torch.float32, 1)
    addresses = []
    for position in range(TOKENS):
        store.chains[0].append(one_token()[0], one_token()[0], torch.tensor([position]), None)
        addresses.append(store.chains[0].spans[0].extent.k.data_ptr())
    assert moves(addresses) <= math.log2(TOKENS / 256) + 1


def test_a_moving_window_reuses_the_pages_that_left_it() -> None:
    store = LayerStore(SHAPE, 16, 1, torch.float32, torch.device("cpu"))
    store.seal(Placement(16, 64, 0, Demotion.OFFLOAD, index=flat_index()))
    for _ in range(2000):
        append(store, one_token(), one_token())
        if (overflow := Overflow.of(store.rows[0])) is not None:
            store.rows[0].chain.append(overflow.k, overflow.v, overflow.positions, None)
            store.rows[0].table.remove(*overflow.pages)
    assert store.resident.pool.capacity <= 8
    assert len(store.rows[0].chain.spans) == 1
    store.check_integrity()


def test_a_token_adds_one_row_to_the_index_and_builds_nothing_anew() -> None:
    store = ColdStore(SHAPE, torch.float32, 1)
    built: list[int] = []

    class Counting(type(flat_index()())):  # type: ignore[misc]
        def _rebuild(self, queries: torch.Tensor | None, nearest: torch.Tensor | None) -> None:
            built.append(len(self))

    def make() -> Counting:
        return Counting(Counting.Params())

    for position in range(300):
        store.chains[0].append(one_token()[0], one_token()[0], torch.tensor([position]), make)
    assert built == [1]
    check_cold(store)


def test_where_the_pages_lie_is_worked_out_when_a_table_changes_and_not_before() -> None:
    store = ResidentStore(SHAPE, 4, 2, torch.float32, torch.device("cpu"), 8)
    k = torch.randn(2, 2, SHAPE.num_kv_heads, 40, SHAPE.head_dim)

    def fill(row: int, start: int, stop: int) -> torch.Tensor:
        store.tables[row].append(k[0, row, :, start:stop], k[1, row, :, start:stop], start)
        keys = store.pool.k[:, store.tables[row].slots()].flatten(1, 2)[:, :stop]
        assert torch.equal(keys, k[0, row, :, :stop])
        return store.tables[row].slots()

    first = fill(1, 0, 6)
    assert fill(1, 6, 8) is first, "the last page had room"
    grown = fill(1, 8, 9)
    assert grown is not first
    fill(0, 0, 33)  # the pool grows, and row 1 lies elsewhere
    assert torch.equal(
        store.pool.k[:, store.tables[1].slots()].flatten(1, 2)[:, :9], k[0, 1, :, :9]
    )
    store.tables[1].truncate(3)
    assert len(store.tables[1].slots()) == 1
    store.fork([0, 0])
    assert torch.equal(store.tables[0].slots(), store.tables[1].slots())
