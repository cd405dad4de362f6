"""Bounds of pages and the best pages, on every instruction set, against the definition in torch."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops import get_ops, native, reference_pages
from hybrid_kv.ops.native import selected
from hybrid_kv.ops.native.selected import PageDigests
from hybrid_kv.types import SearchResult
from tests.ops.native.scan_data import SCORES, check_order, make_keys, pool_of, strided


def digests(count: int, dim: int, dtype: torch.dtype, heads: int = 2) -> tuple[Tensor, Tensor]:
    """Of pages of five keys, in the middle of larger arrays."""
    keys = make_keys(heads, 5 * count, dim, dtype, offset=0.5).unflatten(1, (count, 5))
    low, high = reference_pages.page_digests(keys)
    return strided(low), strided(high)


@pytest.mark.parametrize("dim", [1, 36, 72, 128])
@pytest.mark.parametrize("count", [1, 3, 17, 700])
@pytest.mark.parametrize("num_queries", [1, 3, 20])
def test_bounds_are_those_of_the_definition(
    engine: ctypes.CDLL, count: int, dim: int, num_queries: int, dtype: torch.dtype
) -> None:
    low, high = digests(count, dim, dtype)
    queries = torch.randn(2, num_queries, dim) * dim**-0.5
    bounds = PageDigests(low, high, engine=engine).scores(queries)
    torch.testing.assert_close(bounds, reference_pages.page_scores(queries, low, high), **SCORES)


@pytest.mark.parametrize("wanted", [1, 7, 60])
@pytest.mark.parametrize("count", [1, 17, 700, 5000])
def test_the_pages_with_the_highest_bounds_are_found(
    engine: ctypes.CDLL, count: int, wanted: int
) -> None:
    low, high = digests(count, 36, torch.bfloat16)
    pages = PageDigests(low, high, engine=engine)
    queries = torch.randn(2, 3, 36)
    bounds, ids = pages.search(queries, wanted)
    found = min(count, wanted)
    check_order(SearchResult(ids, bounds, 0), found)
    best = pages.scores(queries).topk(found, -1).values
    torch.testing.assert_close(bounds[..., :found], best, **SCORES)


def test_of_equal_pages_the_first_are_found(engine: ctypes.CDLL) -> None:
    low, high = torch.zeros(1, 5000, 8), torch.ones(1, 5000, 8)
    _, ids = PageDigests(low, high, engine=engine).search(torch.randn(1, 3, 8), 40)
    assert torch.equal(ids, torch.arange(40).expand(1, 3, 40))


def test_low_and_high_may_be_halves_of_one_array(engine: ctypes.CDLL) -> None:
    low, high = digests(100, 72, torch.float32)
    both = torch.cat([high, low], -1)
    queries = torch.randn(2, 4, 72)
    halves = PageDigests(both[..., 72:], both[..., :72], engine=engine)
    apart = PageDigests(low, high, engine=engine)
    assert torch.equal(halves.scores(queries), apart.scores(queries))


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_and_many_queries_change_nothing(engine: ctypes.CDLL, threads: int) -> None:
    pages = PageDigests(*digests(200, 36, torch.float16, heads=3), engine=engine)
    queries = torch.randn(3, 300, 36)
    alone = [pages.search(queries[:, i : i + 20], 9) for i in range(0, 300, 20)]
    with pool_of(engine, threads) as pool:
        bounds, ids = pages.search(queries, 9, pool=pool)
        torch.testing.assert_close(
            pages.scores(queries, pool=pool), pages.scores(queries), rtol=0, atol=0
        )
    assert torch.equal(ids, torch.cat([part[1] for part in alone], 1))
    assert torch.equal(bounds, torch.cat([part[0] for part in alone], 1))


def test_the_dispatch_gives_the_bounds_of_the_definition(dtype: torch.dtype) -> None:
    low, high = digests(50, 72, dtype)
    queries = torch.randn(2, 3, 72).to(dtype)
    expected = reference_pages.page_scores(queries, low, high)
    for backend in ("auto", "reference", "torch_cpu"):
        found = get_ops(backend).page_scores(queries, low, high)
        torch.testing.assert_close(found, expected, **SCORES)


def test_the_engine_serves_pages_that_it_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    low, high = digests(50, 72, torch.bfloat16)
    calls = []
    plain = selected.page_scores
    monkeypatch.setattr(selected, "page_scores", lambda *of, pool: calls.append(of) or plain(*of))
    get_ops("auto").page_scores(torch.randn(2, 3, 72), low, high)
    get_ops("auto").page_scores(torch.randn(2, 3, 72).double(), low.double(), high.double())
    assert len(calls) == (native.engine_state().isa is not None)


def test_no_pages_and_no_queries(engine: ctypes.CDLL) -> None:
    none = PageDigests(torch.zeros(2, 0, 8), torch.zeros(2, 0, 8), engine=engine)
    assert none.scores(torch.zeros(2, 3, 8)).shape == (2, 3, 0)
    bounds, ids = none.search(torch.zeros(2, 3, 8), 4)
    assert (ids == -1).all()
    assert (bounds == -torch.inf).all()
    some = PageDigests(*digests(9, 8, torch.float32), engine=engine)
    assert some.search(torch.zeros(2, 0, 8), 4)[1].shape == (2, 0, 4)


def test_what_does_not_fit_is_refused(engine: ctypes.CDLL) -> None:
    low, high = torch.zeros(2, 30, 8), torch.ones(2, 30, 8)
    pages = PageDigests(low, high, engine=engine)
    with pytest.raises(ShapeError, match=r"queries must be \[2, M, 8\] as the pages"):
        pages.scores(torch.zeros(2, 3, 9))
    with pytest.raises(
        ConfigError, match=r"queries must be float32 on the host, got torch\.float16"
    ):
        pages.scores(torch.zeros(2, 3, 8).half())
    with pytest.raises(ConfigError, match="count must be at least 1, got 0"):
        pages.search(torch.zeros(2, 3, 8), 0)
    with pytest.raises(ShapeError, match=r"key_max must be \[2, 30, 8\]"):
        PageDigests(low, high[:, :29], engine=engine)
