"""Bytes by tier: what several rows or stores share counts once, and no page is asked for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from benchmarks.common.step_cost import counted
from hybrid_kv.plugins import Placement
from hybrid_kv.store import LayerStore
from hybrid_kv.store.layer import tier_bytes
from hybrid_kv.types import Demotion
from tests.store.scene import PAGE, SHAPE, append, keys_of, layer

TOKEN_BYTES = 2 * SHAPE.num_kv_heads * SHAPE.head_dim * 4


def add(store: LayerStore, count: int) -> None:
    keys = keys_of(torch.arange(count))[None].expand(len(store.rows), -1, -1, -1)
    append(store, keys, -keys)


def of_one_row() -> Sequence[LayerStore]:
    store = layer()
    add(store, 5 * PAGE + 3)
    return [store]


def of_two_layers() -> Sequence[LayerStore]:
    return [*of_one_row(), *of_one_row()]


def cropped() -> Sequence[LayerStore]:
    (store,) = of_one_row()
    store.crop(3 * PAGE + 1)
    return [store]


def forked() -> Sequence[LayerStore]:
    (store,) = of_one_row()
    store.seal(Placement(0, 0, Demotion.KEEP))
    return [store, store.forked()]


def apart() -> Sequence[LayerStore]:
    """A fork goes on: the page that both have begun is each one's own, full ones are both's."""
    store, other = forked()
    add(other, 2)
    return [store, other]


def beams() -> Sequence[LayerStore]:
    store = layer(rows=3)
    add(store, 5 * PAGE + 3)
    store.fork([0, 0, 0])
    add(store, PAGE)
    return [store]


def alone_again() -> Sequence[LayerStore]:
    store, other = apart()
    other.crop(1)
    return [store]


@pytest.mark.parametrize(
    ("made", "tokens"),
    [
        (of_one_row, 5 * PAGE + 3),
        (of_two_layers, 2 * (5 * PAGE + 3)),
        (cropped, 2 * PAGE + 2),
        (forked, 5 * PAGE + 3),
        (apart, 5 * PAGE + 3 + 3 + 2),
        (beams, 5 * PAGE + 3 * (3 + PAGE)),
        (alone_again, 5 * PAGE + 3),
    ],
)
def test_resident_tokens_count_once(made: Callable[[], Sequence[LayerStore]], tokens: int) -> None:
    assert tier_bytes(made()) == (TOKEN_BYTES * tokens, 0, 0)


@pytest.mark.parametrize("shared", [False, True])
def test_it_takes_no_longer_for_more_pages(shared: bool) -> None:
    """A completion by HTTP made 3,840 calls for it, one for each page."""
    calls = []
    for pages in (3, 300):
        store = layer(capacity=300)
        add(store, pages * PAGE + 1)
        if shared:
            store.seal(Placement(0, 0, Demotion.KEEP))
        stores = [store, store.forked()] if shared else [store]
        calls.append(counted(lambda stores=stores: tier_bytes(stores)).calls)
    assert calls[0] == calls[1] < 20 * (1 + shared)
