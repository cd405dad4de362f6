"""The exact scan."""

from __future__ import annotations

import pytest
import torch

from hybrid_kv.config import IndexConfig
from hybrid_kv.errors import IntegrityError
from hybrid_kv.index import _base
from hybrid_kv.index import flat as flat_module
from hybrid_kv.index.flat import FlatIndex
from hybrid_kv.ops.native.library import engine
from hybrid_kv.types import SearchResult
from tests.index.oracle import check_result, clustered, recall


def flat(keys: torch.Tensor) -> FlatIndex:
    index = FlatIndex(FlatIndex.Params())
    index.build(keys, None)
    return index


def test_keys_stay_where_they_are() -> None:
    keys, queries = clustered(37)
    index = flat(keys)
    keys.mul_(2)
    check_result(index.search(queries, 5), queries, keys, 5)
    assert index.memory_bytes == 0


@pytest.mark.parametrize("stretch", [1, 7, 40, 333])
def test_the_width_of_blocks_changes_nothing(stretch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, queries = clustered(333)
    whole = flat(keys).search(queries, 16)
    monkeypatch.setattr(_base, "SCRATCH_BYTES", 4 * 2 * 9 * stretch)
    monkeypatch.setattr(_base, "_BLOCK_BYTES", 1)
    pieces = flat(keys).search(queries, 16)
    assert torch.equal(pieces.ids, whole.ids)
    assert recall(pieces, queries, keys, 16) == 1.0


def test_of_equal_scores_the_lower_id_comes_first() -> None:
    keys = torch.randn(2, 6, 72).repeat(1, 20, 1)
    ids = flat(keys).search(torch.randn(2, 9, 72), 60).ids
    for block in ids.split(20, -1):
        assert (block.diff(dim=-1) > 0).all()


def test_an_index_that_was_never_built_says_so() -> None:
    with pytest.raises(IntegrityError, match=r"the index was used before build; call build"):
        FlatIndex(FlatIndex.Params()).search(torch.randn(2, 9, 72), 5)


def int8(keys: torch.Tensor, **params: float) -> FlatIndex:
    index = FlatIndex(FlatIndex.Params(precision="int8", **params))
    index.build(keys, None)
    return index


@pytest.fixture(params=["engine", "portable"])
def served_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who serves: the native engine where there is one, or what replaces it."""
    if request.param == "portable":
        monkeypatch.setattr(flat_module, "engine", lambda: None)
    elif flat_module.engine() is None:
        pytest.skip("there is no native engine")
    return str(request.param)


def test_instances_say_whether_they_are_exact() -> None:
    exact = {
        precision: FlatIndex(FlatIndex.Params(precision=precision)).exact
        for precision in ("exact", "stored", "int8")
    }
    assert exact == {"exact": True, "stored": True, "int8": False}
    assert FlatIndex(FlatIndex.Params()).params.precision == "exact"


@pytest.mark.skipif(engine() is None, reason="its portable twin holds four bytes less")
@pytest.mark.parametrize("dim", [40, 64, 72, 96, 128])
@pytest.mark.parametrize(
    "config",
    [
        IndexConfig(kind="flat", precision="int8"),
        IndexConfig(kind="sketch"),
        IndexConfig(kind="graph"),
        IndexConfig(kind="auto"),
    ],
    ids=lambda config: config.kind,
)
def test_bytes_of_a_scanned_key_are_what_it_takes(config: IndexConfig, dim: int) -> None:
    index = config.build()
    index.build(torch.randn(2, 160, dim), None)
    statistics = 4 * (2 * dim + 256)
    announced = index.bytes_per_key(config.params, 160, dim)
    assert index.memory_bytes == 2 * (160 * announced + statistics)


def test_int8_finds_the_best_keys_whoever_serves(served_by: str, dtype: torch.dtype) -> None:
    keys, queries = clustered(3000, offset=3.0)
    keys = keys.to(dtype)
    result = int8(keys).search(queries, 50)
    check_result(result, queries, keys, 50)
    assert recall(result, queries, keys, 50) > 0.99
    assert result.scored == 2 * 9 * (3000 + 82)


@pytest.mark.parametrize("count", [1, 300])
def test_int8_scores_more_candidates_when_asked_to(served_by: str, count: int) -> None:
    keys, queries = clustered(3000)
    result = int8(keys, rerank=3).search(queries, count)
    assert result.scored == 2 * 9 * (3000 + max(3 * count, count + 32))


def test_int8_follows_rows_that_outgrow_their_statistics(served_by: str) -> None:
    keys, queries = clustered(1200)
    keys[:, 10:] *= 50.0  # the ten known rows say nothing about the rest
    index = int8(keys[:, :10])
    index.add(keys)
    result = index.search(queries, 16)
    # The scores are 50 times those that SCORE_TOLERANCE is for.
    best = torch.einsum("hmd,hnd->hmn", queries, keys).topk(16, -1).values
    assert (result.scores >= best[..., -1:] * (1 - 1e-4)).double().mean() > 0.98


def test_int8_ranks_by_rows_that_came_later_too(served_by: str) -> None:
    keys, queries = clustered(900)
    index = int8(keys[:, :700].clone())
    index.add(keys)
    result = index.search(queries, 50)
    check_result(result, queries, keys, 50)
    assert recall(result, queries, keys, 50) > 0.99


def test_stored_is_served_by_torch_without_an_engine(served_by: str) -> None:
    keys, queries = clustered(333)
    index = FlatIndex(FlatIndex.Params(precision="stored"))
    index.build(keys, None)
    index.add(keys)
    assert (index._scan is None) == (served_by == "portable")
    check_result(index.search(queries, 21), queries, keys, 21)
    assert recall(index.search(queries, 21), queries, keys, 21) == 1.0
    assert index.memory_bytes == 0


@pytest.mark.parametrize("precision", ["stored", "int8"])
def test_rows_that_the_engine_cannot_read_are_copied(precision: str, served_by: str) -> None:
    base, queries = clustered(120)
    for keys in (base.transpose(1, 2).contiguous().transpose(1, 2), base[:, :1].expand(2, 120, -1)):
        index = FlatIndex(FlatIndex.Params(precision=precision))
        index.build(keys, None)
        check_result(index.search(queries, 21), queries, keys, 21)


def test_a_kind_that_finds_in_its_own_way_has_no_plan_of_its_parent() -> None:
    # The engine searched by the parent's plan and passed the child's search over.
    class Child(FlatIndex):
        def _find(self, queries: torch.Tensor, count: int, most: int) -> SearchResult:
            return super()._find(queries, count, most)

    keys = torch.randn(2, 73, 24)
    for kind, planned in ((FlatIndex, engine() is not None), (Child, False)):
        index = kind(FlatIndex.Params(precision="stored"))
        index.build(keys, None)
        assert (index.plan(5, 5) is not None) == planned
