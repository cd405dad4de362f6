"""The sketch kind: what codes find, what becomes of later keys and of heads it does not suit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import IndexConfig
from hybrid_kv.errors import FileFormatError
from hybrid_kv.eval.synthetic import PAPER, SyntheticHead
from hybrid_kv.index import _sketch_head
from hybrid_kv.index._file import read_arrays, write_arrays
from hybrid_kv.index._sketch_head import HeadSketch, Placing, SketchMaker
from hybrid_kv.index.sketch import SCANNED_KEYS, SketchIndex
from hybrid_kv.ops.sketch_codes import SketchPlan
from hybrid_kv.plugins import BuildCancelled
from hybrid_kv.types import SearchResult
from tests.index.oracle import check_result, recall
from tests.index.sketch_heads import seen_head, seen_heads

OPEN: dict[str, Any] = {"min_keys": 1, "gain": 0, "target_mass": 0.9}


def sketch(keys: Tensor, samples: Tensor | None, **params: Any) -> SketchIndex:
    index: SketchIndex = IndexConfig(kind="sketch", **{**OPEN, **params}).build()
    index.build(keys, samples)
    return index


def flat(queries: Tensor) -> Tensor:
    return queries.flatten(1, 2)


def equal(one: SearchResult, other: SearchResult) -> bool:
    return torch.equal(one.ids, other.ids) and torch.equal(one.scores, other.scores)


def tiered(num_keys: int = 20_000) -> tuple[Tensor, Tensor, Tensor]:
    """A made-up head of the kind that tiers are for: keys, samples and later queries."""
    made = SyntheticHead(PAPER, num_keys, num_q_heads=2, test_tokens=64)
    rows = torch.linspace(num_keys - 3000, num_keys - 1, 700).long()
    samples = torch.stack([made.build_queries(head, rows) for head in range(2)])
    later = torch.stack([made.test_queries(head) for head in range(2)])
    return made.keys[None], samples[None], later[None]


@pytest.mark.parametrize("dim", [16, 64, 70, 72, 129, 300])
def test_codes_find_what_later_queries_want_at_any_head_dim(dim: int) -> None:
    keys, samples, later = seen_heads(2, 5003, dim=dim)
    index = sketch(keys, samples)
    assert [report["serves"] for report in index.describe()] == ["sketch", "sketch"]
    found = index.search(flat(later), 37)
    check_result(found, flat(later), keys, 37)
    assert recall(found, flat(later), keys, 37) > 0.95
    assert index.memory_bytes < 2 * 5003 * (dim + 4) + 2**20, "less than 8-bit copies and the maps"


def test_every_decision_is_told_and_fits_json() -> None:
    keys, samples, _ = seen_heads(2, 3000)
    (report, _) = json.loads(json.dumps(sketch(keys, samples).describe()))
    assert report["recall"] >= 0.96
    assert report["num_rerank"] >= 100
    assert sum(tier["num_keys"] for tier in report["tiers"]) == 3000
    assert any("of the scan's work" in forecast for forecast in report["forecasts"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda k, s: (k[:, :1].expand(-1, 700, -1).contiguous(), s), "see no difference"),
        (lambda k, s: (k[:, :1], s), "see no difference"),
        (lambda k, s: (k, None), "there are no prefill queries"),
        (lambda k, s: (k, s[:, :, :0]), "there are no prefill queries"),
        (lambda k, s: (k, s[:, :, :7]), "7 sampled positions are too few"),
        (lambda k, s: (k, s.masked_fill(s == s[0, 0, 3, 5], torch.nan)), "NaN or infinity"),
        (lambda k, s: (k, s.masked_fill(s == s[0, 0, 3, 5], torch.inf)), "NaN or infinity"),
        (
            lambda k, s: (k[..., :3].contiguous(), s[..., :3]),
            "3 channels are too few for such codes",
        ),
        (lambda k, s: (k.mT.contiguous().mT, s), "do not read torch.float32 rows of strides"),
        (lambda k, s: (k.new_zeros(1, 0, 72), s), "0 keys, a sketch takes 1"),
    ],
)
def test_a_head_that_cannot_be_sketched_is_scanned_and_says_why(change: Any, reason: str) -> None:
    keys, samples = change(*seen_heads(1, 700)[:2])
    index = sketch(keys, samples)
    (report,) = index.describe()
    assert report["serves"] == "flat"
    assert reason in report["reason"]
    queries = torch.randn(1, 5, keys.shape[2])
    check_result(index.search(queries, 16), queries, keys, 16)


def test_heads_with_and_without_a_sketch_are_searched_together() -> None:
    keys, samples, later = seen_heads(5, 2000)
    alone = sketch(keys[1:2], samples[1:2])
    for head in (0, 2, 3):
        samples[head] = torch.nan
    index = sketch(keys, samples)
    assert [r["serves"] for r in index.describe()] == ["flat", "sketch", "flat", "flat", "sketch"]
    queries = flat(later)[:, :7]
    found = index.search(queries, 37)
    check_result(found, queries, keys, 37)
    assert torch.equal(found.ids[1:2], alone.search(queries[1:2], 37).ids)
    assert recall(found, queries, keys, 37) > 0.95
    wide = index.search(queries, 37, 2000)
    check_result(wide, queries, keys, 37, 2000)
    assert wide.scored == found.scored
    assert found.rows_read is not None
    assert found.rows_read > 3 * 2000


def test_tiers_hold_every_key_once_and_later_ones_by_their_potential() -> None:
    keys, samples, later = tiered()
    index = sketch(keys[:, :19_000], samples, target_mass=0.95, horizon_tokens=100)
    (report,) = index.describe()
    assert len(report["tiers"]) == 3, report
    before = flat(later)
    assert recall(index.search(before, 100), before, keys[:, :19_000], 100) > 0.94
    for stop in (19_010, 19_500, 20_000):
        index.add(keys[:, :stop])
    tiers = index._coded.sketches[0].tiers
    ids = torch.cat([tier.ids for tier in tiers if tier.ids is not None])
    assert torch.equal(ids.sort().values, torch.arange(19_900, dtype=torch.int32)), "100 wait"
    placing = index._coded.sketches[0].placing
    assert placing is not None
    tier_of = placing.of(keys[0])
    for number, tier in enumerate(tiers):
        assert tier.ids is not None
        assert bool((tier_of[tier.ids.long()] == number).all())
    assert recall(index.search(before, 100), before, keys, 100) > 0.93


def test_each_later_key_is_found_from_the_moment_it_is_there() -> None:
    keys, samples, later = seen_heads(2, 1500)
    index = sketch(keys[:, :700], samples, horizon_tokens=300)
    query = flat(later)[:, :1]
    keys[:, 700:] += 3 * query  # better than anything before
    scanned, encoded = 700 + SCANNED_KEYS, 700 + 2 * 300
    stops = [701, 702, 737, scanned - 1, scanned, scanned + 1, encoded - 1, encoded, encoded + 1]
    for stop in [*stops, 1500]:
        index.add(keys[:, :stop])
        found = index.search(query, 16)
        check_result(found, query, keys[:, :stop], 16)
        assert int(found.ids[0].amax()) >= 700
        newest = query @ keys[:, stop - 1 : stop].transpose(1, 2)
        if bool((newest > found.scores[..., -1:]).all()):
            assert bool((found.ids == stop - 1).any(-1).all())
        assert index._coded.encoded == (700 if stop <= encoded else encoded + 1 - 300)
    assert recall(index.search(query, 16), query, keys, 16) > 0.9


@pytest.mark.parametrize("horizon", [4096, 0])
@pytest.mark.parametrize("odd", [False, True])
def test_later_keys_that_lie_elsewhere_are_found_like_the_first(horizon: int, odd: bool) -> None:
    keys, samples, later = seen_heads(3, 3000)
    elsewhere = torch.stack([2 * seen_head(2037, seed=7 + head)[0] for head in range(3)])
    if odd:
        samples[1] = torch.nan  # scanned, between two that have a sketch
    keys = torch.cat([keys, elsewhere], 1)
    index = sketch(keys[:, :3000], samples, horizon_tokens=horizon)
    asked = flat(later)[:, :40]
    for stop in (3016, 3400, 5037):
        index.add(keys[:, :stop])
        found = index.search(asked, 100)
        check_result(found, asked, keys[:, :stop], 100)
        best = (asked @ keys[:, :stop].mT).topk(100)
        is_found = found.scores >= best.values[..., -1:] - 1e-3
        num_later = (best.indices >= 3000).sum((1, 2))
        num_found = (is_found & (found.ids >= 3000)).sum((1, 2))
        sketched = [head for head, report in enumerate(index.reports) if report.serves == "sketch"]
        assert len(sketched) == 3 - odd
        assert (num_found >= 0.99 * num_later)[sketched].all()
        own = SearchResult(found.ids[sketched], found.scores[sketched], 0)
        assert recall(own, asked[sketched], keys[sketched, :stop], 100) > 0.95
    assert (num_later > 20 * 40).all(), "later keys are wanted"


def test_budgets_beyond_what_was_ranked_are_kept() -> None:
    keys, samples, later = seen_heads(1, 3000)
    index = sketch(keys, samples)
    queries = flat(later)[:, :9]
    ranked = index.describe()[0]["num_rerank"]
    for top_k in (ranked + 1, 2000, 3000, 9999):
        found = index.search(queries, top_k)
        check_result(found, queries, keys, top_k)
        assert recall(found, queries, keys, top_k) > 0.95
    assert index.search(queries, 10, 9999).ids.shape[2] == ranked
    assert torch.equal(index.search(queries, 3000).ids.sort().values[0, 0], torch.arange(3000))


@pytest.mark.parametrize(
    ("codes", "sizes"),
    [("32", [[16]]), ("64", [[32]]), ("tiers", [[8, 16, 32], [4, 16, 32], [4, 32]])],
)
def test_codes_and_candidates_can_be_fixed(codes: str, sizes: list[list[int]]) -> None:
    keys, samples, later = seen_heads(1, 3000, dim=64)
    index = sketch(keys, samples, codes=codes, target_recall=0.5, num_rerank=150)
    assert [tier["code_bytes"] for tier in index.describe()[0]["tiers"]] in sizes
    few = index.search(flat(later), 20)
    index.params = index.params.model_copy(update={"num_rerank": 900})
    assert index.search(flat(later), 20).scored - few.scored == 480 * 750


def test_tiers_need_channels_that_tell_them_apart() -> None:
    keys, samples, _ = seen_heads(1, 700, dim=8)
    (report,) = sketch(keys, samples, codes="tiers").describe()
    assert (report["serves"], report["reason"]) == (
        "flat",
        "8 channels are too few for such codes",
    )


def test_few_keys_are_all_ranked() -> None:
    keys, samples, later = seen_heads(1, 37)
    index = sketch(keys, samples)
    assert index.describe()[0]["serves"] == "sketch"
    assert recall(index.search(flat(later), 16), flat(later), keys, 16) == 1


def test_what_was_learned_ages_with_the_horizon_and_a_scan_when_it_has_doubled() -> None:
    keys, samples, _ = seen_heads(1, 700)
    assert sketch(keys, samples, horizon_tokens=500).relearn_keys == 500
    # Scanned: when there are twice as many, or a horizon more.
    assert sketch(keys, None, horizon_tokens=500).relearn_keys == max(500, keys.shape[1])
    assert sketch(keys, None, horizon_tokens=0).relearn_keys == 0
    needs = SketchIndex.needs(SketchIndex.Params(sampled_queries=7, recent_queries=5))
    assert (needs.sampled_queries, needs.last_queries, needs.horizon_tokens) == (7, 5, 4096)


def test_a_short_context_is_scanned_without_a_stand_in() -> None:
    keys, samples, _ = seen_heads(1, 700)
    index = SketchIndex(SketchIndex.Params(min_keys=701))
    assert index.stand_in(keys, samples) is None
    assert SketchIndex(SketchIndex.Params(min_keys=700)).stand_in(keys, samples) is not None


def test_a_build_is_given_up_between_heads() -> None:
    keys, samples, _ = seen_heads(2, 700)
    index = SketchIndex(SketchIndex.Params(**OPEN))
    index.cancel()
    with pytest.raises(BuildCancelled):
        index.build(keys, samples)


def test_the_portable_twin_makes_and_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, samples, later = seen_heads(2, 3000)
    index = sketch(keys, samples)
    monkeypatch.setattr(_sketch_head, "engine", lambda: None)
    twin = sketch(keys, samples)
    assert [head["tiers"] for head in twin.describe()] == [h["tiers"] for h in index.describe()]
    assert equal(index.search(flat(later)[:, :5], 37), twin.search(flat(later)[:, :5], 37))


@pytest.mark.parametrize("with_tiers", [False, True])
def test_a_saved_index_finds_the_same_and_goes_on(with_tiers: bool, tmp_path: Path) -> None:
    keys, samples, later = tiered(9000) if with_tiers else seen_heads(3, 9000, dim=70)
    if not with_tiers:
        samples[1] = torch.nan
    params = {"target_mass": 0.95} if with_tiers else {}
    index = sketch(keys[:, :8500], samples, **params)
    index.add(keys[:, :8510])
    path = tmp_path / "index.hkv"
    index.save(path)
    loaded = SketchIndex.load(path, keys[:, :8500])
    assert loaded.reports == index.reports
    for stop in (8510, 8600, 9000):
        for one in (index, loaded):
            one.add(keys[:, :stop])
        queries = flat(later)[:, :9]
        assert equal(index.search(queries, 37), loaded.search(queries, 37))
    assert index.memory_bytes == loaded.memory_bytes


def test_an_engine_reads_what_another_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, samples, later = seen_heads(1, 3000)
    index = sketch(keys, samples)
    index.save(tmp_path / "index.hkv")
    monkeypatch.setattr(_sketch_head, "engine", lambda: None)
    twin = SketchIndex.load(tmp_path / "index.hkv", keys)
    assert equal(index.search(flat(later)[:, :5], 37), twin.search(flat(later)[:, :5], 37))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda meta: meta.update(codes=2), "has codes of version 2, this package reads 1"),
        (lambda meta: meta.pop("codes"), "lacks 'codes'"),
        (lambda meta: meta["keys"].update(crc32=1), "was made for other keys"),
        (lambda meta: meta["keys"]["shape"].__setitem__(1, 701), "was made for other keys"),
        (lambda meta: meta.update(reports=meta["reports"][:1]), "is damaged"),
        (lambda meta: meta["sketches"]["0"]["tiers"].clear(), "must have tiers"),
        (lambda meta: meta["sketches"]["0"].update(num_rerank=0), "rank at least one key"),
        (lambda meta: meta["sketches"]["0"]["tiers"][0].update(count=699), "is damaged"),
        (lambda meta: meta["sketches"]["0"]["tiers"][0].update(groups=[[4, 7]]), "is damaged"),
        (lambda meta: meta["sketches"].update({"9": meta["sketches"]["0"]}), "is damaged"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    keys, samples, _ = seen_heads(2, 700)
    path = tmp_path / "index.hkv"
    sketch(keys, samples).save(path)
    meta, arrays = read_arrays(path, "sketch")
    change(meta)
    write_arrays(path, "sketch", meta, arrays)
    with pytest.raises(FileFormatError, match=message):
        SketchIndex.load(path, keys)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_arrays(tmp_path / "index.hkv", "graph", {}, {})
    with pytest.raises(FileFormatError, match="kind 'graph', expected 'sketch'"):
        SketchIndex.load(tmp_path / "index.hkv", seen_head(37)[0][None])


@pytest.mark.parametrize("count", [1, 16, 1003])
@pytest.mark.parametrize("with_tiers", [False, True])
def test_the_first_codes_are_those_of_the_first_keys(count: int, with_tiers: bool) -> None:
    keys, samples, _ = seen_head(2000)
    maker = SketchMaker(keys, samples.flatten(0, 1))
    plans = [SketchPlan(groups) for groups in (((32, 4),), ((32, 8),))][: 1 + with_tiers]
    maps = [maker.map_of(plan) for plan in plans]
    placing = Placing(maker.potential, maker.potential.of(keys).median()[None])
    own = placing if with_tiers else None
    whole, alone = HeadSketch.of(maps, keys, own), HeadSketch.of(maps, keys[:count], own)
    first = whole.first(count)
    assert first.count == count
    for one, other in zip(first.tiers, alone.tiers, strict=True):
        assert one.count == other.count
        if with_tiers:
            assert torch.equal(one.ids, other.ids)
        filled, rest = divmod(one.count, 16)
        assert torch.equal(one.codes[:filled], other.codes[:filled])
        assert one.codes.shape == other.codes.shape
        last = [tier.codes[filled:].unflatten(2, (16, 4))[:, :, :rest] for tier in (one, other)]
        assert torch.equal(*last)


def test_a_shortened_index_finds_the_first_keys_alone() -> None:
    keys, samples, later = seen_heads(2, 5003)
    index = sketch(keys, samples)
    few = keys[:, :3001].contiguous()
    shorter = index.shortened(few)
    assert len(shorter) == 3001
    assert shorter.describe()[0]["coded_keys"] == 3001
    again = SketchIndex.serving(index.params, few, shorter.reports, shorter._coded.sketches)
    found = again.search(flat(later), 37)
    check_result(found, flat(later), few, 37)
    assert recall(found, flat(later), few, 37) > 0.95
    assert len(index) == 5003
    assert recall(index.search(flat(later), 37), flat(later), keys, 37) > 0.95
