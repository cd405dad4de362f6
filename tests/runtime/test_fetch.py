"""What is fetched is what was found: the same attention as in place, each entry copied once."""

from __future__ import annotations

import pytest
import torch

from hybrid_kv.config import IndexConfig
from hybrid_kv.ops import get_ops
from hybrid_kv.runtime.fetch import fetch
from hybrid_kv.store import ColdExtent, ColdStore
from hybrid_kv.transfer import SyncExecutor
from hybrid_kv.types import LayerShape
from tests.tolerances import TOLERANCES, Tolerance

SHAPE = LayerShape(0, 6, 2, 72)
CPU = torch.device("cpu")


def extent(
    length: int = 37, dtype: torch.dtype = torch.float32, kind: str = "flat", **params: int
) -> ColdExtent:
    store = ColdStore(SHAPE, dtype, 1)
    k, v = torch.randn(2, 2, length, 72).to(dtype)
    make = IndexConfig(kind=kind, **params).build
    store.chains[0].append(k, v, torch.arange(length), make)
    return store.chains[0].spans[0].extent


def some_ids(length: int, queries: int = 3, count: int = 5) -> torch.Tensor:
    """Each query's are distinct, the queries share some, and some are missing."""
    ids = torch.stack([torch.randperm(length)[:count] for _ in range(2 * queries)])
    ids = ids.view(2, queries, count)
    ids[:, 1, 2:] = -1
    return ids


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize(("kind", "params"), [("flat", {}), ("pages", {"page_size": 16})])
def test_fetched_entries_are_attended_as_in_place(
    kind: str, params: dict[str, int], backend: str, dtype: torch.dtype, tolerance: Tolerance
) -> None:
    there, ids = extent(37, dtype, kind, **params), some_ids(37)
    q = torch.randn(2, 3, 72).to(dtype)
    ops = get_ops(backend)
    found = fetch(ops, SyncExecutor(), there, ids, CPU)
    near = ops.attend_retrieved(q, found.k, found.v, found.ids, scale=0.1)
    far = ops.attend_retrieved(q, there.keys, there.values, ids, scale=0.1)
    torch.testing.assert_close(near.out, far.out, **tolerance)
    torch.testing.assert_close(near.lse, far.lse, **TOLERANCES[torch.float32])


@pytest.mark.parametrize(("kind", "size"), [("flat", 1), ("pages", 16)])
def test_every_page_travels_once_for_each_head_that_wants_it(kind: str, size: int) -> None:
    ids = some_ids(37)
    params = {"page_size": size} if kind == "pages" else {}
    found = fetch(get_ops("auto"), SyncExecutor(), extent(37, kind=kind, **params), ids, CPU)
    pages = [set((head[head >= 0] // size).tolist()) for head in ids]
    assert found.copied_bytes == sum(map(len, pages)) * size * 2 * 72 * 4
    assert found.k.shape[1] == max(map(len, pages)) * size


def test_the_last_page_is_fetched_by_entries_where_memory_ends_within_it() -> None:
    there = extent(300, kind="pages", page_size=37)
    for name in ("k", "v"):
        setattr(there, name, getattr(there, name)[:, :300])
    there.positions = there.positions[:300]
    ids = torch.full((2, 1, 1), 299)
    found = fetch(get_ops("auto"), SyncExecutor(), there, ids, CPU)
    assert torch.equal(found.k[:, 0], there.k[:, 299])


def test_nothing_found_is_nothing_fetched() -> None:
    found = fetch(get_ops("auto"), SyncExecutor(), extent(), torch.full((2, 3, 4), -1), CPU)
    q = torch.randn(2, 3, 72)
    part = get_ops("auto").attend_retrieved(q, found.k, found.v, found.ids, scale=1.0)
    assert found.copied_bytes == 0
    assert (part.lse == -torch.inf).all()
    assert not part.out.any()


@pytest.mark.parametrize("few", [0, 1, 4])
def test_one_head_may_find_less_than_another(few: int) -> None:
    ids, there = some_ids(37), extent()
    ids[0, :, few:] = -1
    found = fetch(get_ops("auto"), SyncExecutor(), there, ids, CPU)
    assert torch.equal(found.ids < 0, ids < 0)
    for head in range(2):
        is_one = ids[head] >= 0
        for taken, stored in ((found.k, there.k), (found.v, there.v)):
            assert torch.equal(
                taken[head, found.ids[head][is_one]], stored[head, ids[head][is_one]]
            )
