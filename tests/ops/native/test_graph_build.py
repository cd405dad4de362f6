"""The graph builder: every engine and the portable twin build the same, sound graph."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.key_graph import BuildParams, KeyGraph, query_points
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.graph import project
from hybrid_kv.ops.native.library import Pool
from tests.ops.native import graph_oracle as portable
from tests.ops.native.engines import each_engine, needs_engine
from tests.ops.native.graph_data import (
    Head,
    make_head,
    neighbours_of,
    reachable,
)

pytestmark = needs_engine


def assert_same(one: KeyGraph, other: KeyGraph) -> None:
    assert (one.num_keys, one.degree) == (other.num_keys, other.degree)
    for name in ("keys_of", "entries", "lists"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def assert_sound(graph: KeyGraph, head: Head, max_degree: int) -> None:
    """The keys that lists name are nodes, in their order; neighbours are others, each once."""
    assert torch.equal(graph.keys_of, head.lists[head.lists >= 0].unique())
    neighbours = neighbours_of(graph)
    assert neighbours.shape == (len(graph.keys_of), max_degree)
    for node, row in enumerate(neighbours.tolist()):
        used = [other for other in row if other >= 0]
        assert row == used + [-1] * (max_degree - len(used))
        assert len(set(used)) == len(used)
        assert node not in used
        assert all(other < len(neighbours) for other in used)


_twins: dict[tuple[object, ...], KeyGraph] = {}
"""The twin's graphs, for the other engines that are given the same."""


def twin_of(head: Head, chosen: BuildParams, extra: Tensor | None) -> KeyGraph:
    given = [head.lists, head.keys, head.queries, torch.empty(0) if extra is None else extra]
    key = (chosen, *(pickle.dumps(one.tolist()) for one in given))
    if key not in _twins:
        _twins[key] = portable.project(*given[:3], chosen, extra=extra)
    return _twins[key]


def both(head: Head, isa: str, extra: Tensor | None = None, **params: int) -> KeyGraph:
    """The engine's graph, after comparing it with the twin's."""
    chosen = BuildParams(**params)
    engine = library.load(isa)
    graph = project(head.lists, head.keys, head.queries, chosen, extra=extra, engine=engine)
    assert_same(graph, twin_of(head, chosen, extra))
    return graph


@each_engine
@pytest.mark.parametrize("dim", [8, 64, 72, 128])
@pytest.mark.parametrize("max_degree", [16, 32, 64])
def test_the_twin_builds_the_same(isa: str, dim: int, max_degree: int) -> None:
    head = make_head(400, dim, num_queries=300)
    graph = both(head, isa, max_degree=max_degree)
    assert_sound(graph, head, max_degree)


@each_engine
@pytest.mark.parametrize(
    ("num_keys", "num_queries"), [(0, 0), (0, 5), (1, 3), (15, 9), (5000, 700)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sizes(isa: str, num_keys: int, num_queries: int, dtype: torch.dtype) -> None:
    head = make_head(num_keys, 64, num_queries=num_queries, dtype=dtype)
    graph = both(head, isa, max_degree=32)
    assert_sound(graph, head, 32)
    assert len(graph) == num_keys


@each_engine
@pytest.mark.parametrize("cap", [2, 3, 7, 254])
@pytest.mark.parametrize("candidates", [1, 30, 4000])
def test_few_of_many_queries_and_candidates(isa: str, cap: int, candidates: int) -> None:
    head = make_head(60, 16, num_queries=400)
    both(head, isa, cap=cap, candidates=candidates, max_degree=16, seed=7)


@each_engine
def test_a_seed_changes_which_queries_are_used(isa: str) -> None:
    head = make_head(300, 16, num_queries=500)
    one, other = (head.graph(library.load(isa), cap=4, seed=seed) for seed in (0, 1))
    assert not torch.equal(one.lists, other.lists)


@each_engine
def test_equal_keys(isa: str) -> None:
    head = make_head(100, 16)
    head.keys[:] = head.keys[0]
    assert_sound(both(head, isa, max_degree=16), head, 16)


@each_engine
def test_duplicates_in_lists(isa: str) -> None:
    head = make_head(50, 16)
    head.lists[:, 1:] = head.lists[:, :1]
    head.lists[:10] = 3
    both(head, isa, cap=254, max_degree=16)


@each_engine
def test_missing_ids(isa: str) -> None:
    head = make_head(500, 16)
    head.lists[::2, 5:] = -1
    head.lists[1] = -1
    assert_sound(both(head, isa), head, 64)


@each_engine
def test_extra_neighbours_give_uncovered_keys_a_list(isa: str) -> None:
    head = make_head(400, 16, num_queries=3)
    extra = torch.stack([torch.arange(400) - 1, (torch.arange(400) + 1) % 400], 1).to(torch.int32)
    graph = both(head, isa, extra=extra)
    assert graph.keys_of.tolist() == list(range(400))
    assert len(reachable(graph)) == 400


@each_engine
def test_no_lists_at_all(isa: str) -> None:
    head = make_head(40, 16, num_queries=0)
    graph = both(head, isa)
    assert len(graph) == 40
    assert (len(graph.keys_of), len(graph.lists), len(graph.entries)) == (0, 0, 0)


@each_engine
def test_entries_are_the_most_popular_keys(isa: str) -> None:
    head = make_head(500, 32)
    counts = head.lists.flatten().bincount(minlength=500)
    popular = counts.sort(descending=True, stable=True).indices[:5]
    graph = head.graph(library.load(isa), num_entries=5)
    assert graph.keys_of[graph.entries].tolist() == popular.tolist()


@each_engine
@pytest.mark.parametrize("threads", [2, 5])
def test_threads_do_not_show(isa: str, threads: int) -> None:
    if library.engine() is not library.load(isa):
        pytest.skip("a pool belongs to the engine in use")
    head = make_head(2000, 32, num_queries=500)
    pool = Pool(threads)
    arguments = (head.lists, head.keys, head.queries, BuildParams(cap=8))
    assert_same(project(*arguments), project(*arguments, pool))
    pool.close()


def test_engines_agree_on_a_large_head() -> None:
    head = make_head(4000, 128, num_queries=3000, length=50)
    graphs = [head.graph(library.load(isa)) for isa in library.runnable()]
    for graph in graphs[1:]:
        assert_same(graphs[0], graph)


def test_strided_keys_build_the_same() -> None:
    head = make_head(300, 32)
    wide = torch.zeros(300, 2, 32)
    wide[:, 1] = head.keys
    strided = Head(wide[:, 1], head.queries, head.lists)
    engine = library.load("baseline")
    assert_same(head.graph(engine), strided.graph(engine))


def test_points_measure_what_queries_see() -> None:
    head = make_head(200, 16, num_queries=5000)
    points = query_points(head.keys, torch.arange(200), head.queries, 16).double()
    scores = head.keys.double() @ head.queries.double().T
    seen = torch.cdist(points, points).pow(2)
    wanted = torch.cdist(scores, scores).pow(2)
    ratio = (seen / wanted)[~torch.eye(200, dtype=torch.bool)]
    assert ratio.std() / ratio.mean() < 0.01


def test_points_of_extreme_keys_keep_the_resolution_of_others() -> None:
    head = make_head(1000, 16)
    head.keys[0] *= 1e6
    points = query_points(head.keys, torch.arange(1000), head.queries, 16)
    assert int(points.abs().max()) <= 4095
    assert len(points.unique(dim=0)) == 1000


WRONG = {
    "max_degree": 0,
    "cap": 255,
    "candidates": 0,
    "alpha": 0.0,
    "num_entries": 0,
    "metric_dims": 33,
    "seed": -1,
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("build", [project, portable.project])
def test_wrong_parameters(name: str, build: object) -> None:
    head = make_head(20, 8)
    with pytest.raises(ConfigError, match=f"{name} must be"):
        build(head.lists, head.keys, head.queries, BuildParams(**{name: WRONG[name]}))  # type: ignore[operator]


@pytest.mark.parametrize("build", [project, portable.project])
@pytest.mark.parametrize("wrong", [-2, 20])
def test_a_list_names_no_key(build: object, wrong: int) -> None:
    head = make_head(20, 8)
    head.lists[3, 2] = wrong
    with pytest.raises(ConfigError, match="names a key that does not exist"):
        build(head.lists, head.keys, head.queries)  # type: ignore[operator]


@pytest.mark.parametrize("build", [project, portable.project])
def test_wrong_shapes(build: object) -> None:
    head = make_head(20, 8)
    with pytest.raises(ShapeError, match="lists must be 2-dimensional int32"):
        build(head.lists.long(), head.keys, head.queries)  # type: ignore[operator]
    with pytest.raises(ShapeError, match="one head at a time"):
        build(head.lists, head.keys[None], head.queries)  # type: ignore[operator]
    with pytest.raises(ShapeError, match="must have the keys' 8 channels"):
        build(head.lists, head.keys, head.queries[:, :4])  # type: ignore[operator]
    with pytest.raises(ShapeError, match="extra must have 20 rows"):
        build(head.lists, head.keys, head.queries, extra=head.lists[:5])  # type: ignore[operator]
