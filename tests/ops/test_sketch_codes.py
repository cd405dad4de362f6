"""Sketches: plans, maps, and the portable codes and searches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, NonFiniteError, ShapeError
from hybrid_kv.ops.portable import SketchSearcher, SketchTier
from hybrid_kv.ops.sketch_codes import SketchMap, SketchPlan, pack_tiers
from tests.ops.sketch_data import PLANS, make_map, make_tiers


def unpack(tier: SketchTier) -> Tensor:
    """[count, d] int64, straight from what the layout says."""
    blocks, lines, _ = tier.codes.shape
    quads = tier.codes.view(blocks, lines, 16, 4).transpose(1, 2).flatten(0, 1)[: tier.count]
    codes, line = [], 0
    for num_dims, bits in tier.map.plan.groups:
        for _ in range(num_dims * bits // 32):
            for part in range(8 // bits):
                codes.append(quads[:, line] >> (bits * part) & (2**bits - 1))
            line += 1
    return torch.cat(codes, 1).long()


def one_tier(keys: Tensor, size: int) -> list[SketchTier]:
    return make_tiers(SketchTier, keys, [make_map(PLANS[size], keys.shape[1])])


@pytest.mark.parametrize("plan", PLANS.values(), ids=str)
@pytest.mark.parametrize("dim", [64, 70, 72, 128, 256])
def test_codes_are_the_rounded_projection(plan: SketchPlan, dim: int, dtype: torch.dtype) -> None:
    keys, one = torch.randn(37, dim).to(dtype), make_map(plan, dim)
    tier = make_tiers(SketchTier, keys, [one])[0]
    exact = keys.double() @ one.key_map.double().T - one.key_offset + plan.zeros
    off = unpack(tier) - exact.clamp(min=torch.zeros(()), max=plan.tops.double())
    assert off.abs().max() < 0.5001
    assert tier.codes.shape == (3, plan.num_lines, 64)
    assert tier.memory_bytes == 3 * 16 * plan.code_bytes


def test_codes_rank_keys_as_their_scores_do() -> None:
    keys, queries = torch.randn(2, 3000, 72), torch.randn(2, 3, 72)
    searcher = SketchSearcher(list(keys), [one_tier(rows, 32) for rows in keys])
    found = searcher.search(queries, 50, num_rerank=[200, 300])
    best = torch.einsum("hmd,hnd->hmn", queries, keys).topk(50, -1)
    torch.testing.assert_close(found.scores[..., :5], best.values[..., :5], rtol=1e-5, atol=1e-4)
    for row, true in zip(found.ids.flatten(0, 1), best.indices.flatten(0, 1), strict=True):
        assert torch.isin(true, row).sum() > 40
    assert found.scored == 3 * (2 * 3000 + 200 + 300)
    assert found.rows_read is not None
    assert 200 + 300 < found.rows_read <= 3 * (200 + 300)


def test_appending_in_parts_gives_the_same_codes() -> None:
    keys, one, rows = torch.randn(900, 64), make_map(PLANS[16], 64), torch.arange(900)[::2]
    whole, parts = (SketchTier(one, with_ids=True) for _ in range(2))
    whole.append(keys, rows)
    for part in rows.split(7):
        parts.append(keys, part)
    assert torch.equal(unpack(parts), unpack(whole))
    assert torch.equal(parts.ids, rows.int())
    again = SketchTier.restore(one, whole.codes, whole.ids, whole.count)
    again.append(keys, torch.tensor([899]))
    assert torch.equal(unpack(again)[:450], unpack(whole))
    assert again.ids[450] == 899


def test_packed_tiers_hold_the_same_and_grow() -> None:
    keys = torch.randn(400, 64)
    maps = [make_map(PLANS[size], 64) for size in (16, 64)]
    tiers = make_tiers(SketchTier, keys[:363], maps, (0.6, 0.4)) + one_tier(keys, 32)
    before = [(unpack(tier), tier.ids) for tier in tiers]
    pack_tiers(tiers)
    for tier, (codes, ids) in zip(tiers, before, strict=True):
        assert torch.equal(unpack(tier), codes)
        assert (tier.ids is None) if ids is None else torch.equal(tier.ids, ids)
        assert tier.codes.data_ptr() % 64 == 0
    more = torch.randn(1000, 64)
    more[:400] = keys
    tiers[1].append(more, torch.arange(363, 1000))  # beyond its room
    tiers[0].append(more, torch.tensor([999]))
    assert torch.equal(unpack(tiers[1])[: len(before[1][0])], before[1][0])
    assert torch.equal(unpack(tiers[2]), before[2][0])


def test_tiers_share_one_order_and_the_newest_rows_are_ranked_exactly() -> None:
    keys, queries = torch.randn(400, 64), torch.randn(1, 2, 64)
    maps = [make_map(PLANS[size], 64) for size in (16, 32, 64)]
    tiers = make_tiers(SketchTier, keys[:363], maps, (0.6, 0.3, 0.1))
    searcher = SketchSearcher([keys], [tiers])
    true = (queries @ keys.T).argsort(-1, descending=True)
    everything = searcher.search(queries, 400, num_rerank=[0], num_exact=37)
    assert torch.equal(everything.ids, true)
    some = searcher.search(queries, 5, num_rerank=[40], most=80, num_exact=37)
    assert some.ids.shape == (1, 2, 77)
    for row in some.ids[0]:
        assert (row >= 363).sum() == 37
    assert 37 + 40 < some.rows_read <= 37 + 80


def test_keys_that_are_all_equal_come_in_order() -> None:
    keys = torch.ones(37, 72)
    searcher = SketchSearcher([keys], [one_tier(keys, 16)])
    for queries in (torch.ones(1, 2, 72), torch.zeros(1, 2, 72)):
        found = searcher.search(queries, 20, num_rerank=[25])
        assert torch.equal(found.ids, torch.arange(20).expand(1, 2, -1))


@pytest.mark.parametrize("count", [0, 1])
def test_few_keys_are_padded(count: int) -> None:
    keys = torch.randn(count, 64)
    for tiers in ([], one_tier(keys[:0], 16), one_tier(keys, 16)):
        exact = count - sum(tier.count for tier in tiers)
        searcher = SketchSearcher([keys], [tiers])
        found = searcher.search(torch.randn(1, 2, 64), 3, num_rerank=[9], num_exact=exact)
        assert (found.ids[..., :count] == 0).all()
        assert (found.ids[..., count:] == -1).all()
        assert (found.scores[..., count:] == -torch.inf).all()


@pytest.mark.parametrize(
    "groups",
    [(), ((4, 2), (8, 4)), ((8, 8), (4, 8)), ((3, 8),), ((12, 4),), ((4, 3),), ((260, 8),)],
)
def test_plans_that_fill_no_lines_are_refused(groups: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ConfigError, match="sketch plan"):
        SketchPlan(groups)


def test_maps_and_rows_that_do_not_fit_are_refused() -> None:
    one, keys = make_map(PLANS[16], 64), torch.randn(37, 64)
    with pytest.raises(ShapeError, match=r"key_offset must be \[28\]"):
        SketchMap(one.plan, one.key_map, one.key_offset[1:], one.query_map)
    with pytest.raises(ConfigError, match="query_map must be float32"):
        SketchMap(one.plan, one.key_map, one.key_offset, one.query_map.half())
    with pytest.raises(NonFiniteError, match="key_map holds NaN"):
        SketchMap(one.plan, one.key_map.log(), one.key_offset, one.query_map)
    tier = SketchTier(one, with_ids=True)
    with pytest.raises(ShapeError, match=r"keys must be \[N, 64\]"):
        tier.append(keys[:, 1:], torch.arange(3))
    with pytest.raises(ConfigError, match="rows must be given"):
        tier.append(keys)
    for rows in ([3, 3], [5, 4], [-1, 2], [36, 37]):
        with pytest.raises(ConfigError, match="rows of a tier must ascend"):
            tier.append(keys, torch.tensor(rows))
    none = torch.zeros(1, 4, 64, dtype=torch.uint8)
    with pytest.raises(ShapeError, match=r"ids must be \[3\]"):
        SketchTier.restore(one, none, torch.arange(4), 3)
    with pytest.raises(ShapeError, match=r"codes must be \[2, 4, 64\]"):
        SketchTier.restore(one, none, None, 17)
    with pytest.raises(ConfigError, match="must ascend"):
        SketchTier.restore(one, none, torch.tensor([1, 1, 2]).int(), 3)


def test_searches_that_do_not_fit_are_refused() -> None:
    keys, queries = torch.randn(37, 64), torch.randn(1, 2, 64)
    tiers = one_tier(keys[:30], 16)
    searcher = SketchSearcher([keys], [tiers])
    with pytest.raises(ShapeError, match=r"a tier must hold rows of keys \[20, 64\], got 30 rows"):
        SketchSearcher([keys[:20]], [tiers])
    with pytest.raises(ShapeError, match="each of 1 heads, got 0"):
        SketchSearcher([keys], [])
    with pytest.raises(ShapeError, match=r"queries must be \[1, M, 64\]"):
        searcher.search(queries[..., 1:], 3, num_rerank=[9])
    with pytest.raises(ConfigError, match="top_k must be at least 1"):
        searcher.search(queries, 0, num_rerank=[9])
    with pytest.raises(ConfigError, match="most must be at least top_k 3"):
        searcher.search(queries, 3, num_rerank=[9], most=2)
    with pytest.raises(ConfigError, match="num_rerank must be 1 numbers"):
        searcher.search(queries, 3, num_rerank=[9, 9])
    with pytest.raises(ConfigError, match=r"num_exact must be 0\.\.7"):
        searcher.search(queries, 3, num_rerank=[9], num_exact=8)


def test_what_is_not_finite_is_refused_and_nothing_is_held() -> None:
    keys = torch.randn(37, 64)
    keys[21, 5] = torch.nan
    tier = SketchTier(make_map(PLANS[16], 64), with_ids=False)
    with pytest.raises(NonFiniteError, match="row 21 of the keys"):
        tier.append(keys)
    assert tier.count == 0
    tier.append(keys[:21])
    searcher = SketchSearcher([keys], [[tier]])
    with pytest.raises(NonFiniteError, match="queries must be finite"):
        searcher.search(torch.full((1, 1, 64), torch.inf), 3, num_rerank=[3])
