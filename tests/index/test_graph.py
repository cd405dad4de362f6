"""The graph index: learned heads, the fallback, growth, and its file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig, IndexConfig
from hybrid_kv.errors import ConfigError, FileFormatError, ShapeError
from hybrid_kv.index._file import read_arrays
from hybrid_kv.index._graph_learner import hold_out
from hybrid_kv.index.graph import GraphIndex
from hybrid_kv.plugins import Index
from hybrid_kv.types import Needs
from tests.index.oracle import check_result, recall

HEADS, GROUP, DIM, NUM_KEYS = 2, 3, 72, 3000
SETTINGS: dict[str, Any] = {
    "min_keys": 1000,
    "check_positions": 32,
    "check_top_k": 20,
    "list_length": 40,
    "max_degree": 32,
    "max_scanned": 0.8,
}


def attention_like(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [Hkv, N, D], prefill queries [Hkv, G, M, D] and later queries [Hkv, G, D].

    Queries look for what few directions say, away from where the keys lie.
    """
    draw = torch.Generator().manual_seed(seed)
    basis = torch.randn(HEADS, 6, DIM, generator=draw)
    keys = torch.randn(HEADS, NUM_KEYS, 6, generator=draw) @ basis
    keys += 0.3 * torch.randn(keys.shape, generator=draw) + 5.0
    wanted = torch.randn(HEADS, GROUP * 900, 6, generator=draw) @ basis
    queries = wanted + 4.0 * torch.randn(HEADS, 1, DIM, generator=draw)
    queries = queries.unflatten(1, (GROUP, 900))
    return keys, queries[:, :, :880], queries[:, :, 880:].flatten(1, 2)


def build(keys: Tensor, samples: Tensor | None, **changes: Any) -> GraphIndex:
    index: Index = IndexConfig(kind="graph", **{**SETTINGS, **changes}).build()
    assert isinstance(index, GraphIndex)
    index.build(keys, samples)
    return index


def served_as(index: GraphIndex, how: Sequence[tuple[int, int]]) -> GraphIndex:
    """The same index with other beams and walks of its heads."""
    index.reports = tuple(
        replace(report, beam=beam, walks=walks)
        for report, (beam, walks) in zip(index.reports, how, strict=True)
    )
    index._serve(index._graphs)
    return index


needs_engine = pytest.mark.usefixtures("_engine")


@pytest.fixture
def _engine() -> None:
    from hybrid_kv.ops.native import engine_state

    if engine_state().isa is None:
        pytest.skip(f"no native engine: {engine_state().detail}")


@needs_engine
def test_learned_heads_find_what_later_queries_want_and_read_less() -> None:
    keys, samples, later = attention_like()
    index = build(keys, samples)
    assert [report.serves for report in index.reports] == ["graph", "graph"]
    result = index.search(later, 20)
    check_result(result, later, keys, 20)
    assert recall(result, later, keys, 20) >= 0.93
    exhaustive = HEADS * later.shape[1] * NUM_KEYS
    assert result.scored < 0.9 * exhaustive
    for report in index.reports:
        assert report.trials[-1].recall >= 0.95
        assert report.beam == report.trials[-1].beam
        assert 0 < report.top_mass <= 1
        assert 1 < report.effective_dim < 12


@needs_engine
def test_the_whole_beam_comes_at_no_further_cost() -> None:
    keys, samples, later = attention_like()
    index = build(keys, samples)
    beam = max(report.beam for report in index.reports)
    asked, whole = index.search(later, 20), index.search(later, 20, 3000)
    check_result(whole, later, keys, 20, 3000)
    assert whole.ids.shape[2] == max(beam, 20 + 32)
    assert whole.rows_read == asked.rows_read
    assert index.search(later, 20, 33).ids.shape[2] == 33


@needs_engine
def test_a_head_is_searched_with_beam_and_walks_of_its_report() -> None:
    keys, samples, later = attention_like()
    index = build(keys, samples, target_recall=0.1)
    how = ((5, 1), (90, 1), (90, 2))
    later = later[:, :GROUP]
    assert len({served_as(index, [one, one]).search(later, 20).rows_read for one in how}) == 3
    beams = ((5, 2), (90, 1))
    served_as(index, beams)
    together = index.search(later, 20)
    rows = 0
    for i, beam in enumerate(beams):
        head = slice(i, i + 1)
        alone = served_as(build(keys[head], samples[head], target_recall=0.1), [beam])
        found = alone.search(later[head], 20)
        assert torch.equal(found.ids[0], together.ids[i])
        rows += found.rows_read or 0
    assert together.rows_read == rows


@needs_engine
def test_a_head_that_misses_its_goal_is_scanned_and_the_other_is_not() -> None:
    keys, samples, later = attention_like()
    held = torch.isin(samples[1], hold_out(samples[1], 32)[1])
    samples[1] = torch.where(held, samples[1], samples[1, :, :1])  # all others ask for the same
    index = build(keys, samples)
    assert index.reports[0].serves == "graph"
    assert index.reports[1].serves == "flat"
    assert "misses the target 0.965 within 80%" in index.reports[1].reason
    result = index.search(later, 20)
    check_result(result, later, keys, 20)
    exact = (later[1] @ keys[1].T).topk(20).indices
    found = (result.ids[1][:, :, None] == exact[:, None]).any(-1).float().mean()
    assert found >= 0.99


@pytest.mark.parametrize(
    ("samples", "changes", "reason"),
    [
        ("all", {"min_keys": 3001}, "3000 keys, a graph takes 3001"),
        ("none", {}, "there are no prefill queries to learn from"),
        ("few", {}, "5 sampled positions are too few"),
    ],
)
def test_what_cannot_be_learned_is_scanned_and_says_why(
    samples: str, changes: dict[str, Any], reason: str
) -> None:
    keys, queries, later = attention_like()
    given = {"all": queries, "none": None, "few": queries[:, :, :5]}[samples]
    index = build(keys, given, **changes)
    assert [report.reason for report in index.reports] == [reason] * 2
    result = index.search(later, 20)
    assert recall(result, later, keys, 20) >= 0.999


def test_without_the_engine_all_heads_are_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_KV_ISA", "none")
    from hybrid_kv.ops.native import library

    library.engine.cache_clear()
    try:
        keys, samples, later = attention_like()
        index = build(keys, samples)
        assert {report.serves for report in index.reports} == {"flat"}
        assert "switched off by HYBRID_KV_ISA=none" in index.reports[0].reason
        assert recall(index.search(later, 20), later, keys, 20) >= 0.99
    finally:
        library.engine.cache_clear()


@needs_engine
def test_keys_that_are_added_are_found() -> None:
    keys, samples, later = attention_like()
    more, _, _ = attention_like(seed=1)
    index = build(keys, samples)
    grown = torch.cat([keys, 1.5 * more[:, :700]], 1)
    for stop in (NUM_KEYS + 1, NUM_KEYS + 300, NUM_KEYS + 700):
        index.add(grown[:, :stop])
    result = index.search(later, 20)
    check_result(result, later, grown, 20)
    assert recall(result, later, grown, 20) >= 0.93
    assert (result.ids >= NUM_KEYS).any()


@needs_engine
def test_a_beam_may_be_changed_after_the_build() -> None:
    keys, samples, later = attention_like()
    index = build(keys, samples, beam=30, target_recall=0.1)
    work = []
    for beam in (30, 90):
        index.params = index.params.model_copy(update={"beam": beam})
        work.append(index.search(later, 20).scored)
    assert work[1] > 1.1 * work[0]


@needs_engine
def test_a_key_that_queries_share_is_read_once() -> None:
    keys, samples, later = attention_like()
    index = build(keys, samples)
    together = index.search(later[:, :5], 20)
    apart = [index.search(later[:, place : place + 1], 20) for place in range(5)]
    rows = [found.rows_read or 0 for found in apart]
    assert together.rows_read is not None
    assert max(rows) < together.rows_read < 0.9 * sum(rows)
    assert together.scored > 5 * together.rows_read  # and those that are ranked exactly


@needs_engine
def test_reports_say_how_long_lists_and_projection_took() -> None:
    keys, samples, _ = attention_like()
    for report in build(keys, samples).reports:
        assert report.lists_s > 0
        assert report.project_s > 0


@needs_engine
def test_more_results_than_were_checked_are_found_too() -> None:
    keys, samples, later = attention_like()
    index = build(keys, samples)
    result = index.search(later, 60)
    check_result(result, later, keys, 60)
    assert recall(result, later, keys, 60) >= 0.9


@needs_engine
def test_the_same_build_gives_the_same_index() -> None:
    keys, samples, later = attention_like()
    one, other = (build(keys, samples).search(later, 20) for _ in range(2))
    assert torch.equal(one.ids, other.ids)
    assert one.scored == other.scored


@needs_engine
def test_memory_counts_graph_and_codes(tmp_path: Path) -> None:
    keys, samples, _ = attention_like()
    index = build(keys, samples)
    index.save(tmp_path / "layer.hkv")
    _, arrays = read_arrays(tmp_path / "layer.hkv", "graph")
    nodes = [len(arrays[f"{head}.keys_of"]) for head in range(HEADS)]
    assert 0.1 * NUM_KEYS < min(nodes) < 0.8 * NUM_KEYS
    codes, lists = 128 + 1, 2 * 32 + 4  # rows are padded to 64 bytes
    rest = index.memory_bytes - sum(nodes) * (codes + lists)
    assert 0 < rest <= HEADS * 4096
    before = index.memory_bytes
    index.add(torch.cat([keys, keys[:, :10]], 1))
    block = (72 // 4 + 1) * 64  # of 16 keys
    assert index.memory_bytes == before + HEADS * block
    index.add(torch.cat([keys, keys[:, :40]], 1))
    assert index.memory_bytes == before + HEADS * 3 * block


@needs_engine
def test_a_saved_index_comes_back(tmp_path: Path) -> None:
    keys, samples, later = attention_like()
    index = build(keys, samples)
    index.save(tmp_path / "layer.hkv")
    grown = torch.cat([keys, keys[:, :50] + 1], 1)
    loaded = GraphIndex.load(tmp_path / "layer.hkv", keys)
    assert loaded.reports == index.reports
    assert loaded.params == index.params
    assert torch.equal(loaded.search(later, 20).ids, index.search(later, 20).ids)
    loaded = GraphIndex.load(tmp_path / "layer.hkv", grown)
    index.add(grown)
    assert recall(loaded.search(later, 20), later, grown, 20) >= 0.93


@needs_engine
def test_a_saved_index_is_refused_for_other_keys_and_when_damaged(tmp_path: Path) -> None:
    keys, samples, _ = attention_like()
    path = tmp_path / "layer.hkv"
    build(keys, samples).save(path)
    other = keys.clone()
    other[1, 1500:] += 1
    for wrong in (other, keys[:, :-1], keys[:1], keys.bfloat16()):
        with pytest.raises(FileFormatError, match=r"was made for other keys \(\[2, 3000, 72\]\)"):
            GraphIndex.load(path, wrong)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(FileFormatError, match=r"layer.hkv is damaged: .* is cut off"):
        GraphIndex.load(path, keys)


def test_reports_are_json_ready() -> None:
    keys, samples, _ = attention_like()
    index = build(keys, samples)
    assert json.loads(json.dumps([report.to_dict() for report in index.reports]))


def test_the_method_asks_for_the_queries_that_the_index_wants() -> None:
    index = {"kind": "graph", "sampled_queries": 500, "recent_queries": 30}
    method = HybridConfig(method="hybrid", cold={"index": index}).build()
    assert method.needs == Needs(500, 30, nearest_keys=100, horizon_tokens=4096)
    assert HybridConfig(method="flat").build().needs == Needs()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_degree": 300}, "max_degree: input should be less than or equal to 256, got 300"),
        ({"beam": 0}, "beam"),
        ({"target_recall": 1.5}, "target_recall: input should be less than or equal to 1, got 1.5"),
        ({"degree": 3}, "unknown graph setting 'degree'"),
    ],
)
def test_wrong_settings_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        IndexConfig(kind="graph", **setting)


# Neighbours that a device has found


def exact_lists(keys: Tensor, samples: Tensor, count: int) -> Tensor:
    scores = torch.einsum("hgmd,hnd->hgmn", samples.double(), keys.double())
    return scores.topk(count, -1).indices.int()


@needs_engine
def test_known_neighbours_give_the_same_graph_and_spare_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, samples, later = attention_like()
    alone, helped = (IndexConfig(kind="graph", **SETTINGS).build() for _ in range(2))
    alone.build(keys, samples)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("they are known")

    monkeypatch.setattr("hybrid_kv.index._graph_learner._HeadEngine.nearest", refuse)
    helped.build(keys, samples, exact_lists(keys, samples, 60))
    for one, other in zip(alone._graphs, helped._graphs, strict=True):
        assert torch.equal(one.keys_of, other.keys_of)
        assert torch.equal(one.lists, other.lists)
    assert helped.reports == alone.reports
    assert recall(helped.search(later, 20), later, keys, 20) >= 0.93


@needs_engine
def test_too_few_known_neighbours_are_no_help_and_no_harm() -> None:
    keys, samples, later = attention_like()
    alone = build(keys, samples)
    helped = IndexConfig(kind="graph", **SETTINGS).build()
    helped.build(keys, samples, exact_lists(keys, samples, 3))
    assert helped.reports == alone.reports
    assert torch.equal(helped.search(later, 9).ids, alone.search(later, 9).ids)


@pytest.mark.parametrize(
    ("nearest", "message"),
    [
        (torch.zeros(HEADS, GROUP, 879, 5, dtype=torch.int32), "nearest must be int32 .*880"),
        (torch.zeros(HEADS, GROUP, 880, 5), "nearest must be int32 .*got torch.float32"),
        (torch.full((HEADS, GROUP, 880, 5), NUM_KEYS, dtype=torch.int32), "must name rows 0.."),
        (torch.full((HEADS, GROUP, 880, 5), -1, dtype=torch.int32), "must name rows 0.."),
    ],
)
def test_neighbours_that_do_not_fit_are_refused(nearest: Tensor, message: str) -> None:
    keys, samples, _ = attention_like()
    with pytest.raises(ShapeError, match=message):
        IndexConfig(kind="graph", **SETTINGS).build().build(keys, samples, nearest)
    with pytest.raises(ShapeError, match="nearest must be absent without samples"):
        IndexConfig(kind="flat").build().build(keys, None, nearest)


# Where a search begins


@needs_engine
def test_a_search_that_begins_near_finds_more_for_the_same_beam() -> None:
    keys, samples, later = attention_like()
    index = build(keys, samples, target_recall=0.1, beam=1)
    step = later[:, :GROUP]
    cold = index.search(step, 20)
    best = exact_lists(keys, step[:, None], 20)[:, 0].long()
    warm = index.search(step, 20, near=best)
    check_result(warm, step, keys, 20)
    assert recall(cold, step, keys, 20) < 0.9
    assert recall(warm, step, keys, 20) > 0.97


@pytest.mark.parametrize("kind", ["flat", "graph"])
def test_where_a_search_begins_must_fit_its_queries(kind: str) -> None:
    keys, _, later = attention_like()
    index = IndexConfig(kind=kind).build()
    index.build(keys, None)
    ids = torch.full((*later.shape[:2], 3), -1)
    assert torch.equal(index.search(later, 9, near=ids).ids, index.search(later, 9).ids)
    for bad in (ids[:, 1:], ids.int(), ids[0]):
        with pytest.raises(ShapeError, match="near must be int64"):
            index.search(later, 9, near=bad)
