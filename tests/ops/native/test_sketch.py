"""The engine's sketches against their portable twin, bit for bit, on every instruction set."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, NonFiniteError, ShapeError
from hybrid_kv.ops import portable
from hybrid_kv.ops.native.scans import SketchSearcher, SketchTier
from hybrid_kv.ops.sketch_codes import SketchMap, SketchPlan
from hybrid_kv.types import SearchResult
from tests.ops.native.engines import each_kernel_with
from tests.ops.native.scan_data import pool_of, strided
from tests.ops.sketch_data import PLANS, make_map, make_tiers

TIERS, SHARES = (16, 32, 64), (0.6, 0.3, 0.1)


class Case:
    """The same keys in tiers of the engine and of its twin."""

    def __init__(
        self,
        engine: ctypes.CDLL,
        keys: Tensor,
        sizes: Sequence[int] = TIERS,
        shares: Sequence[float] = SHARES,
        num_exact: int = 0,
    ) -> None:
        self.keys, self.num_exact = keys, num_exact
        maps = [[make_map(PLANS[size], keys.shape[2]) for size in sizes] for _ in keys]
        make = partial(SketchTier, engine=engine)
        self.tiers = self._tiers(make, maps, shares)
        self.twins = self._tiers(portable.SketchTier, maps, shares)
        self.searcher = SketchSearcher(list(keys), self.tiers, engine=engine)
        self.twin = portable.SketchSearcher(list(keys), self.twins)

    def _tiers(self, make: Any, maps: list[list[SketchMap]], shares: Sequence[float]) -> Any:
        torch.manual_seed(5)
        sketched = self.keys[:, : self.keys.shape[1] - self.num_exact]
        return [
            make_tiers(make, rows, own, shares) for rows, own in zip(sketched, maps, strict=True)
        ]

    def check(self, queries: Tensor, top_k: int, num_rerank: int, pool: Any = None) -> SearchResult:
        """Searches both ways."""
        ranked = {"num_rerank": [num_rerank] * len(self.keys), "num_exact": self.num_exact}
        found = self.searcher.search(queries, top_k, **ranked, pool=pool)
        twin = self.twin.search(queries, top_k, **ranked)
        assert torch.equal(found.ids, twin.ids)
        assert torch.equal(found.scores, twin.scores)
        assert (found.scored, found.rows_read) == (twin.scored, twin.rows_read)
        return found


@each_kernel_with(plan=[*PLANS.values()], dim=(1, 64, 70, 72, 128, 256))
def test_codes_are_those_of_the_twin(
    engine: ctypes.CDLL, plan: SketchPlan, dim: int, dtype: torch.dtype
) -> None:
    one = make_map(plan, dim)
    keys = strided(torch.randn(1, 300, dim).to(dtype))[0]
    native = SketchTier(one, with_ids=False, engine=engine)
    twin = portable.SketchTier(one, with_ids=False)
    for count in (1, 15, 16, 17, 37, 300):
        native.append(keys[:count])
        twin.append(keys[:count])
    by_key = [
        tier.codes.view(-1, plan.num_lines, 16, 4).transpose(1, 2).flatten(0, 1)[:300]
        for tier in (native, twin)
    ]
    assert torch.equal(*by_key)


@each_kernel_with(dim=(64, 70, 72, 128, 256), count=(1, 15, 16, 17, 37, 1000))
def test_searches_are_those_of_the_twin(
    engine: ctypes.CDLL, count: int, dim: int, dtype: torch.dtype
) -> None:
    keys = strided(torch.randn(2, count, dim).to(dtype))
    Case(engine, keys).check(torch.randn(2, 3, dim), 9, 20)


@pytest.mark.parametrize("size", PLANS)
@pytest.mark.parametrize("num_queries", [1, 2, 3, 4, 5, 6, 7, 8, 9, 70])
def test_any_number_of_queries_and_any_plan(
    engine: ctypes.CDLL, size: int, num_queries: int
) -> None:
    case = Case(engine, torch.randn(1, 777, 72), [size], ())
    case.check(torch.randn(1, num_queries, 72), 10, 40)


def test_all_codes_and_queries_at_their_largest_do_not_overflow(engine: ctypes.CDLL) -> None:
    for groups in (((256, 8),), ((256, 4),), ((256, 2),), ((64, 8), (96, 4), (96, 2))):
        plan = SketchPlan(groups)
        columns = torch.full((256, 1), 1000.0)
        one = SketchMap(plan, columns, torch.zeros(256), columns)
        keys = torch.tensor([1.0, -1.0] * 20)[:, None]
        tier = make_tiers(partial(SketchTier, engine=engine), keys, [one])
        searcher = SketchSearcher([keys], [tier], engine=engine)
        found = searcher.search(torch.tensor([[[1.0], [-1.0]]]), 20, num_rerank=[20])
        assert torch.equal(found.ids[0, 0], torch.arange(0, 40, 2))
        assert torch.equal(found.ids[0, 1], torch.arange(1, 40, 2))


@pytest.mark.parametrize("num_rerank", [1, 150, 700, 30000])
def test_guessed_thresholds_change_nothing(engine: ctypes.CDLL, num_rerank: int) -> None:
    case = Case(engine, torch.randn(1, 25000, 24).half(), num_exact=37)
    case.check(torch.randn(1, 4, 24), 100, num_rerank)


def test_a_sample_of_only_the_best_keys_does_not_mislead(engine: ctypes.CDLL) -> None:
    keys = torch.randn(1, 20000, 8)
    sampled = torch.arange(20000) // 16 % 24 == 23
    keys[:, sampled, 0] += 100.0  # 832 good keys, and the sample sees no others
    case = Case(engine, keys, [4], ())
    queries = torch.tensor([[[1.0] + [0.0] * 7, [-1.0] + [0.0] * 7, [0.0] * 8]])
    case.check(queries, 1500, 1500)


def test_rising_scores_fill_the_storage_again_and_again(engine: ctypes.CDLL) -> None:
    keys = torch.zeros(1, 20000, 8)
    keys[..., 0] = torch.arange(20000) / 1000
    case = Case(engine, keys, [8], ())
    queries = torch.tensor([[[1.0] + [0.0] * 7, [-1.0] + [0.0] * 7]])
    for num_rerank in (1, 7, 500):
        case.check(queries, 1, num_rerank)


# 3 queries share blocks in twos, and a part may end on the first of two; where half of the keys are
# candidates, a key that is taken twice is one row less that is read.
@pytest.mark.parametrize(("count", "num_rerank"), [(5, 60), (3, 15_000)])
@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("heads", [1, 3])
def test_threads_change_nothing(
    engine: ctypes.CDLL, heads: int, threads: int, count: int, num_rerank: int
) -> None:
    case = Case(engine, torch.randn(heads, 30001, 24).bfloat16(), num_exact=17)
    queries = torch.randn(heads, count, 24)
    alone = case.check(queries, 40, num_rerank)
    with pool_of(engine, threads) as pool:
        for _ in range(3):
            together = case.searcher.search(
                queries, 40, num_rerank=[num_rerank] * heads, num_exact=17, pool=pool
            )
            assert torch.equal(together.ids, alone.ids)
            assert torch.equal(together.scores, alone.scores)
            assert together.rows_read == alone.rows_read


def test_threads_write_the_same_codes(engine: ctypes.CDLL) -> None:
    keys, one = torch.randn(9001, 72), make_map(PLANS[24], 72)
    alone, together = (SketchTier(one, with_ids=False, engine=engine) for _ in range(2))
    alone.append(keys)
    with pool_of(engine, 3) as pool:
        together.append(keys[:37], pool=pool)
        together.append(keys, pool=pool)
    assert torch.equal(together.codes[:-1], alone.codes[:-1])


@pytest.mark.parametrize("count", [37, 20000])
def test_of_equal_keys_the_first_are_found(engine: ctypes.CDLL, count: int) -> None:
    case = Case(engine, torch.ones(2, count, 72), [16], ())
    for queries in (torch.randn(2, 3, 72), torch.zeros(2, 3, 72)):
        found = case.check(queries, 30, 35)
        assert torch.equal(found.ids, torch.arange(30).expand(2, 3, -1))


def test_queries_do_not_influence_each_other(engine: ctypes.CDLL) -> None:
    case, queries = Case(engine, torch.randn(1, 5000, 64)), torch.randn(1, 9, 64)
    together = case.searcher.search(queries, 50, num_rerank=[80])
    for place in range(9):
        alone = case.searcher.search(queries[:, place : place + 1], 50, num_rerank=[80])
        assert torch.equal(alone.ids[:, 0], together.ids[:, place])


def test_without_tiers_keys_are_ranked_exactly(engine: ctypes.CDLL) -> None:
    keys, queries = torch.randn(37, 64), torch.randn(1, 2, 64)
    found = SketchSearcher([keys], [[]], engine=engine).search(
        queries, 50, num_rerank=[9], num_exact=37
    )
    assert torch.equal(found.ids[..., :37], (queries @ keys.T).argsort(-1, descending=True))
    assert (found.ids[..., 37:] == -1).all()
    assert (found.scores[..., 37:] == -torch.inf).all()
    none = SketchSearcher([], [], engine=engine).search(torch.zeros(0, 2, 64), 5, num_rerank=[])
    assert none.ids.shape == (0, 2, 5)


def test_what_is_not_finite_is_refused(engine: ctypes.CDLL) -> None:
    keys = torch.randn(5000, 64)
    keys[[4321, 4999], 5] = torch.inf
    tier = SketchTier(make_map(PLANS[16], 64), with_ids=False, engine=engine)
    with (
        pool_of(engine, 2) as pool,
        pytest.raises(NonFiniteError, match="row 4321 of the keys holds NaN or infinity"),
    ):
        tier.append(keys, pool=pool)
    assert tier.count == 0
    tier.append(keys[:37])
    searcher = SketchSearcher([keys[:37]], [[tier]], engine=engine)
    with pytest.raises(NonFiniteError, match="queries must be finite"):
        searcher.search(torch.full((1, 1, 64), torch.nan), 3, num_rerank=[3])
    with pytest.raises(ConfigError, match="keys must be float32, float16 or bfloat16"):
        tier.append(torch.zeros(40, 64, dtype=torch.float64))


def test_keys_that_have_grown_and_moved_are_followed(
    engine: ctypes.CDLL, dtype: torch.dtype
) -> None:
    """Both ways find what searchers of their own would."""
    keys = torch.randn(3, 340, 72).to(dtype)
    case = Case(engine, keys[:, :301].contiguous(), num_exact=1)
    for count in (301, 317, 340):
        case.keys, case.num_exact = keys[:, :count], count - 300
        case.searcher.follow(list(case.keys))
        case.twin.follow(list(case.keys))
        fresh = SketchSearcher(list(case.keys), case.tiers, engine=engine)
        queries = torch.cat([case.keys[:, -1:].float(), torch.randn(3, 3, 72)], 1)
        found = case.check(queries, 20, 50)
        want = fresh.search(queries, 20, num_rerank=[50] * 3, num_exact=case.num_exact)
        assert torch.equal(found.ids, want.ids)
        assert (found.ids[:, 0] == count - 1).any(), "the newest key is found"


def test_other_keys_are_not_followed(engine: ctypes.CDLL) -> None:
    case = Case(engine, torch.randn(2, 300, 72))
    others = (
        torch.randn(2, 299, 72),
        torch.randn(2, 300, 64),
        torch.randn(3, 300, 72),
        torch.randn(2, 300, 72).half(),
    )
    for searcher in (case.searcher, case.twin):
        for other in others:
            with pytest.raises(ShapeError, match="keys must continue those of 2 heads"):
                searcher.follow(list(other))
