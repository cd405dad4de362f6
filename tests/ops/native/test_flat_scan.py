"""The flat scan and nearest keys of many queries, on every instruction set."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops import portable
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.graph import nearest_keys
from hybrid_kv.ops.native.rows import QuantisedKeys
from hybrid_kv.ops.native.scans import FlatScan
from tests.ops.native.engines import each_kernel_with
from tests.ops.native.scan_data import (
    COUNTS,
    DIMS,
    INT8_ERROR,
    SAME_CODES,
    check_exact,
    check_order,
    make_keys,
    pool_of,
    strided,
    true_scores,
)


def int8(keys: torch.Tensor, engine: ctypes.CDLL) -> FlatScan:
    quantised = QuantisedKeys(keys.shape[0], keys.shape[2], engine=engine)
    quantised.build(keys)
    return FlatScan(keys, quantised, engine=engine)


@each_kernel_with(dim=DIMS, count=COUNTS)
def test_stored_keys_are_searched_exactly(
    engine: ctypes.CDLL, count: int, dim: int, dtype: torch.dtype
) -> None:
    keys, queries = strided(make_keys(2, count, dim, dtype, offset=0.5)), torch.randn(2, 5, dim)
    queries *= dim**-0.5
    check_exact(FlatScan(keys, engine=engine).search(queries, 20), queries, keys, 20)


@pytest.mark.parametrize("num_queries", [1, 2, 3, 4, 5, 8, 9, 16, 17, 300])
@pytest.mark.parametrize("precision", ["stored", "int8"])
def test_any_number_of_queries(engine: ctypes.CDLL, num_queries: int, precision: str) -> None:
    keys, queries = make_keys(2, 777, 72, offset=0.5), torch.randn(2, num_queries, 72) / 9
    scan = FlatScan(keys, engine=engine) if precision == "stored" else int8(keys, engine)
    result = scan.search(queries, 30, rerank=777)
    check_exact(result, queries, keys, 30)
    assert result.scored == 2 * num_queries * 777 * (2 if precision == "int8" else 1)


@each_kernel_with(dim=DIMS, count=COUNTS)
def test_scores_by_codes_are_those_of_the_oracle(
    engine: ctypes.CDLL, count: int, dim: int, dtype: torch.dtype
) -> None:
    keys, queries = strided(make_keys(2, count, dim, dtype)), torch.randn(2, 3, dim)
    result = int8(keys, engine).search(queries, 20)
    oracle = portable.QuantisedKeys(2, dim)
    oracle.build(keys)
    found = min(20, count)
    if found:
        ids, scores = oracle.search(queries, found)
        order = scores.argsort(-1, descending=True)
        torch.testing.assert_close(
            result.scores[..., :found], scores.gather(-1, order), **SAME_CODES
        )
        differ = result.ids[..., :found] != ids.gather(-1, order)
        near = result.scores[..., :found].diff(dim=-1, append=torch.full((2, 3, 1), -torch.inf))
        assert not (differ & (near < -1e-4) & (near.roll(1, -1) < -1e-4)).any(), "but for ties"
    check_order(result, found)
    assert result.scored == 2 * 3 * count


def test_codes_approximate_the_scores(engine: ctypes.CDLL) -> None:
    keys, queries = make_keys(2, 1000, 128), torch.randn(2, 4, 128)
    true = true_scores(queries, keys)
    result = int8(keys, engine).search(queries, 1000)
    error = (result.scores - true.gather(-1, result.ids)) / true.std(-1, keepdim=True)
    assert error.abs().max() < INT8_ERROR


@pytest.mark.parametrize("count", [1000, 4096, 9001, 40000])
def test_scoring_candidates_again_finds_the_best(engine: ctypes.CDLL, count: int) -> None:
    keys, queries = make_keys(2, count, 72).bfloat16(), torch.randn(2, 4, 72)
    result = int8(keys, engine).search(queries, 100, rerank=200)
    best = true_scores(queries, keys).topk(100, -1)
    assert (result.scores >= best.values[..., -1:] - 1e-3).double().mean() > 0.999
    assert result.scored == 2 * 4 * (count + 200)
    check_order(result, 100)


@pytest.mark.parametrize("precision", ["stored", "int8"])
@pytest.mark.parametrize("distinct", [1, 3])
def test_of_equal_keys_the_first_are_found(
    engine: ctypes.CDLL, precision: str, distinct: int
) -> None:
    keys = make_keys(2, distinct, 72).repeat(1, 12000 // distinct, 1)
    scan = FlatScan(keys, engine=engine) if precision == "stored" else int8(keys, engine)
    for queries in (torch.randn(2, 3, 72), torch.zeros(2, 3, 72)):
        result = scan.search(queries, 50)
        check_order(result, 50)
        step = distinct if queries.any() else 1
        assert torch.equal(
            result.ids - result.ids[..., :1], (step * torch.arange(50)).expand(2, 3, 50)
        )
        assert (result.ids[..., 0] < distinct).all()


@pytest.mark.parametrize("precision", ["stored", "int8"])
def test_a_sample_of_only_the_best_keys_does_not_mislead(
    engine: ctypes.CDLL, precision: str
) -> None:
    keys = make_keys(1, 16384, 8, offset=0.0)
    sampled = torch.arange(16384) // 16 % 16 == 0
    keys[:, sampled, 0] += 100.0  # 1024 good keys, and the sample sees no other
    queries = torch.tensor([[[1.0] + [0.0] * 7, [-1.0] + [0.0] * 7]])
    if precision == "stored":
        check_exact(FlatScan(keys, engine=engine).search(queries, 1500), queries, keys, 1500)
        return
    result = int8(keys, engine).search(queries, 1500, rerank=1500)
    best = true_scores(queries, keys).topk(1500, -1).values
    assert (result.scores >= best[..., -1:] - 1e-3).double().mean() > 0.9
    check_order(result, 1500)


@pytest.mark.parametrize("precision", ["stored", "int8"])
def test_rising_scores_fill_the_storage_again_and_again(
    engine: ctypes.CDLL, precision: str
) -> None:
    keys = torch.zeros(1, 20000, 8)
    keys[..., 0] = torch.arange(20000) / 1000
    queries = torch.tensor([[[1.0] + [0.0] * 7, [-1.0] + [0.0] * 7]])
    scan = FlatScan(keys, engine=engine) if precision == "stored" else int8(keys, engine)
    for top_k in (1, 7, 100):
        check_exact(scan.search(queries, top_k, rerank=500), queries, keys, top_k)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [1, 3])
def test_threads_change_nothing(engine: ctypes.CDLL, heads: int, threads: int) -> None:
    keys, queries = make_keys(heads, 33001, 8), torch.randn(heads, 3, 8)
    for scan in (FlatScan(keys, engine=engine), int8(keys, engine)):
        alone = scan.search(queries, 40, rerank=60)
        with pool_of(engine, threads) as pool:
            for _ in range(3):
                together = scan.search(queries, 40, rerank=60, pool=pool)
                assert torch.equal(together.ids, alone.ids)
                assert torch.equal(together.scores, alone.scores)


def test_callers_of_one_pool_wait_for_each_other(engine: ctypes.CDLL) -> None:
    keys = make_keys(3, 9000, 8)
    scan = int8(keys, engine)
    batches = [torch.randn(3, size, 8) for size in (1, 3, 20, 5) * 4]
    alone = [scan.search(batch, 10, rerank=30) for batch in batches]
    with pool_of(engine, 3) as pool, ThreadPoolExecutor(4) as callers:
        found = callers.map(lambda batch: scan.search(batch, 10, rerank=30, pool=pool), batches)
        for one, other in zip(alone, found, strict=True):
            assert torch.equal(one.ids, other.ids)


def test_ids_come_in_32_bits_too(engine: ctypes.CDLL) -> None:
    keys, queries = make_keys(2, 30, 8), torch.randn(2, 3, 8)
    scan = FlatScan(keys, engine=engine)
    narrow = scan.search(queries, 40, id_dtype=torch.int32).ids
    assert narrow.dtype == torch.int32
    assert torch.equal(narrow.long(), scan.search(queries, 40).ids)


def test_a_scan_follows_keys_that_grow_and_move(engine: ctypes.CDLL) -> None:
    """So does a search that was planned before; the room of the codes runs out meanwhile."""
    keys, queries = make_keys(2, 5000, 8), torch.randn(2, 3, 8)
    quantised = QuantisedKeys(2, 8, engine=engine)
    quantised.build(keys[:, :100])
    scan = FlatScan(keys[:, :100].clone(), quantised, engine=engine)
    planned = scan.plan(10).structs
    for count in (117, 5000):
        quantised.append(keys[:, :count])
        with pytest.raises(ShapeError, match=r"keys must be those of keys"):
            scan.follow(keys[:, : count - 1])
        scan.follow(keys[:, :count])
        found = scan.search(queries, 10, rerank=count)
        check_exact(found, queries, keys[:, :count], 10)
        assert [head.keys.count for head in planned] == [count, count]
        assert [head.quantised.contents.count for head in planned] == [count, count]


@each_kernel_with(num_queries=(0, 1, 255, 600), threads=(1, 3))
def test_nearest_keys_are_those_of_a_search(
    engine: ctypes.CDLL, num_queries: int, threads: int, dtype: torch.dtype
) -> None:
    keys = make_keys(2, 5000, 72, dtype)
    queries = strided(torch.randn(1, num_queries, 72).to(dtype))[0]
    scan = int8(keys, engine)
    with pool_of(engine, threads) as pool:
        found = nearest_keys(scan, 1, queries, 50, rerank=100, pool=pool)
    assert (found.dtype, found.shape) == (torch.int32, (num_queries, 50))
    if num_queries:
        both = queries.float().expand(2, -1, -1)
        assert torch.equal(found.long(), scan.search(both, 50, rerank=100).ids[1])


def test_nearest_keys_are_the_true_ones(engine: ctypes.CDLL) -> None:
    keys = make_keys(1, 20000, 128).bfloat16()
    queries = torch.randn(500, 128)
    found = nearest_keys(int8(keys, engine), 0, queries, 100, rerank=150)
    true = true_scores(queries[None], keys)[0]
    best = true.topk(100, -1).values
    assert (true.gather(-1, found.long()) >= best[:, -1:] - 1e-3).double().mean() > 0.999


def test_what_does_not_fit_is_refused(engine: ctypes.CDLL) -> None:
    keys = make_keys(2, 30, 8)
    scan = FlatScan(keys, engine=engine)
    with pytest.raises(ShapeError, match=r"queries must be \[2, M, 8\].*got shape \[2, 3, 9\]"):
        scan.search(torch.zeros(2, 3, 9), 5)
    with pytest.raises(ConfigError, match=r"must be float32 on the host, got torch\.float16"):
        scan.search(torch.zeros(2, 3, 8).half(), 5)
    with pytest.raises(ConfigError, match="top_k must be at least 1, got 0"):
        scan.search(torch.zeros(2, 3, 8), 0)
    with pytest.raises(ConfigError, match="rerank must be at least 0"):
        scan.search(torch.zeros(2, 3, 8), 1, rerank=-1)
    with pytest.raises(ConfigError, match="id_dtype must be int32 or int64"):
        scan.search(torch.zeros(2, 3, 8), 1, id_dtype=torch.int16)
    with pytest.raises(ShapeError, match=r"queries must be \[M, 8\], got shape \[3, 9\]"):
        nearest_keys(scan, 0, torch.zeros(3, 9), 5)
    with pytest.raises(ConfigError, match="top_k must be at least 1"):
        nearest_keys(scan, 0, torch.zeros(3, 8), 0)
    with pytest.raises(ShapeError, match="quantised keys must be those of keys"):
        FlatScan(keys[:, :20], int8(keys, engine).quantised, engine=engine)
    rows_only = QuantisedKeys(2, 8, with_rows=True, with_blocks=False, engine=engine)
    rows_only.build(keys)
    with pytest.raises(ConfigError, match="a flat scan needs the blocks"):
        FlatScan(keys, rows_only, engine=engine).search(torch.zeros(2, 3, 8), 5)


def test_no_queries_and_no_heads(engine: ctypes.CDLL) -> None:
    assert FlatScan(make_keys(2, 30, 8), engine=engine).search(torch.zeros(2, 0, 8), 5).scored == 0
    none = FlatScan(torch.zeros(0, 30, 8), engine=engine).search(torch.zeros(0, 4, 8), 5)
    assert none.ids.shape == (0, 4, 5)


def test_every_engine_finds_the_same_by_codes() -> None:
    keys, queries = make_keys(2, 5000, 72), torch.randn(2, 4, 72)
    found = [int8(keys, library.load(isa)).search(queries, 50) for isa in library.runnable()]
    for other in found[1:]:
        torch.testing.assert_close(other.scores, found[0].scores, **SAME_CODES)
