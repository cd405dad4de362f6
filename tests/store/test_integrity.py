"""`check_integrity` is what other tests rely on, so every kind of damage must make it fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hybrid_kv.errors import IntegrityError
from hybrid_kv.plugins import Placement
from hybrid_kv.store import LayerStore, Overflow
from hybrid_kv.types import Demotion
from tests.store.scene import PAGE, Feed, append, flat_index, layer

SIZES = (PAGE, 2 * PAGE, PAGE)


def tiered() -> LayerStore:
    """Two rows of 37 tokens: a page of sinks, 5 cold pages, 4 pages of spare and window."""
    store = layer(rows=2)
    Feed(store).append(37)
    store.seal(Placement(*SIZES, Demotion.OFFLOAD, index=flat_index(), digests=True))
    for row in range(2):
        overflow = Overflow.of(store.rows[row])
        assert overflow is not None
        store.rows[row].chain.append(
            overflow.k, overflow.v, overflow.positions, store.placement.index
        )
        store.rows[row].table.remove(*overflow.pages)
    store.compact()
    store.resident.pool.enable_digests()
    return store


def a_page_counts_one_reader_too_many(store: LayerStore) -> None:
    store.resident.pool.refs[0, 1] += 1


def a_page_counts_one_reader_too_few(store: LayerStore) -> None:
    store.resident.pool.refs[1, 0] -= 1


def a_page_stands_in_a_table_twice(store: LayerStore) -> None:
    store.rows[0].table.pages[1] = store.rows[0].table.pages[0]


def a_free_page_got_lost(store: LayerStore) -> None:
    store.rows[0].table.remove(1, 2)
    store.resident.pool.free[0].clear()


def a_row_reads_a_foreign_page(store: LayerStore) -> None:
    tables = [row.table.pages for row in store.rows]
    tables[0][1], tables[1][1] = tables[1][1], tables[0][1]


def a_resident_token_is_cold_as_well(store: LayerStore) -> None:
    store.rows[0].chain.spans[0].extent.positions[3] = 0


def a_cold_token_stands_twice(store: LayerStore) -> None:
    store.rows[0].chain.spans[0].extent.positions[3] = 5


def a_resident_token_is_hidden(store: LayerStore) -> None:
    pool = store.resident.pool
    pool.hide(store.rows[0].table.pages[0], 2)


def a_digest_is_too_low(store: LayerStore) -> None:
    assert store.resident.pool.key_max is not None
    store.resident.pool.key_max[0, 2] -= 1.0


def a_digest_is_too_high(store: LayerStore) -> None:
    assert store.resident.pool.key_min is not None
    store.resident.pool.key_min[1, 0, 2] += 1.0


def a_key_is_not_the_one_that_was_digested(store: LayerStore) -> None:
    store.resident.pool.k[0, 1, 2] = 1e6


def a_token_was_forgotten(store: LayerStore) -> None:
    store.rows[1].length += 1


def a_token_appeared(store: LayerStore) -> None:
    store.rows[0].length -= 1


def a_drop_was_not_booked(store: LayerStore) -> None:
    store.rows[0].table.remove(1, 2)


def a_drop_was_booked_twice(store: LayerStore) -> None:
    store.rows[0].dropped += PAGE


def an_extent_does_not_know_a_row(store: LayerStore) -> None:
    store.rows[1].chain.spans[0].extent.readers.clear()


def a_row_sees_more_than_the_extent_has(store: LayerStore) -> None:
    store.rows[0].chain.spans[0].length += 1


def the_index_lacks_a_key(store: LayerStore) -> None:
    extent = store.rows[0].chain.spans[0].extent
    assert extent.index is not None
    extent.index.rebuild(extent.keys[:, :-1])


def order_is_claimed_and_not_there(store: LayerStore) -> None:
    store.rows[0].table.in_order = True


@pytest.mark.parametrize(
    "damage",
    [
        a_page_counts_one_reader_too_many,
        a_page_counts_one_reader_too_few,
        a_page_stands_in_a_table_twice,
        a_free_page_got_lost,
        a_row_reads_a_foreign_page,
        a_resident_token_is_cold_as_well,
        a_cold_token_stands_twice,
        a_resident_token_is_hidden,
        a_digest_is_too_low,
        a_digest_is_too_high,
        a_key_is_not_the_one_that_was_digested,
        a_token_was_forgotten,
        a_token_appeared,
        a_drop_was_not_booked,
        a_drop_was_booked_twice,
        an_extent_does_not_know_a_row,
        a_row_sees_more_than_the_extent_has,
        the_index_lacks_a_key,
        order_is_claimed_and_not_there,
    ],
)
def test_integrity_fails_when(damage: Callable[[LayerStore], None]) -> None:
    store = tiered()
    store.check_integrity()
    damage(store)
    with pytest.raises(IntegrityError):
        store.check_integrity()


def test_order_is_a_claim_about_slots_too() -> None:
    store = layer()
    Feed(store).append(3 * PAGE)
    store.check_integrity()
    pool, table = store.resident.pool, store.rows[0].table.pages
    for tensor in (pool.k, pool.v):
        tensor[:, [0, 1]] = tensor[:, [1, 0]]
    pool.positions[[0, 1]] = pool.positions[[1, 0]]
    table[0], table[1] = table[1], table[0]
    with pytest.raises(IntegrityError, match="claims to be in order"):
        store.check_integrity()


def test_a_full_page_keeps_its_digest_when_others_change() -> None:
    store = tiered()
    low, high = (bound[:, 0].clone() for bound in store.rows[0].table.bounds())
    append(store, torch.randn(2, 2, 9, 3), torch.randn(2, 2, 9, 3))
    after = store.rows[0].table.bounds()
    assert torch.equal(after[0][:, 0], low)
    assert torch.equal(after[1][:, 0], high)
    store.check_integrity()
