"""The joint search: every engine finds what the portable twin finds, and what is there to find."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.key_graph import Searched, no_graph
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.graph import GraphSearcher
from hybrid_kv.ops.native.library import Pool
from hybrid_kv.ops.native.rows import QuantisedKeys
from tests.ops.native import graph_oracle as portable
from tests.ops.native.engines import each_engine, engine_params, needs_engine
from tests.ops.native.graph_data import (
    Head,
    make_graph,
    make_head,
    reachable,
)
from tests.pairs import in_pairs

pytestmark = needs_engine


def make_queries(head: Head, count: int, seed: int = 1) -> Tensor:
    """[1, count, D], not those of the build."""
    dim = head.keys.shape[1]
    return make_head(max(1, len(head.keys)), dim, num_queries=count, seed=seed).queries[None]


def assert_same(one: Searched, other: Searched) -> None:
    """Equal up to the last digits of exact scores, and so up to the order of ties."""
    assert (one.rows_visited, one.dots) == (other.rows_visited, other.dots)
    torch.testing.assert_close(one.scores, other.scores, rtol=1e-5, atol=1e-5)
    differ = one.ids != other.ids
    if differ.any():
        near = (one.scores[..., 1:] - one.scores[..., :-1]).abs() < 1e-4
        tied = torch.zeros_like(differ)
        tied[..., 1:] |= near
        tied[..., :-1] |= near
        assert bool((tied | ~differ).all())


def exact(head: Head, queries: Tensor, among: Tensor, count: int) -> Tensor:
    """The best of some keys [1, M, count], -1 where there are fewer."""
    scores = queries[0] @ head.keys[among].float().T
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    found = torch.full((len(queries[0]), count), -1)
    found[:, : order.shape[1]] = among[order]
    return found[None]


_found: dict[tuple[int, ...], tuple[Any, Any]] = {}
"""Graphs with what the twin finds there, for the other engines that are given the same."""


@pytest.mark.parametrize(
    ("isa", "dim", "group", "max_degree"),
    in_pairs(engine_params(), (8, 64, 72, 128), (1, 3, 4, 8), (16, 32, 64)),
)
def test_the_twin_finds_the_same(isa: str, dim: int, group: int, max_degree: int) -> None:
    head = make_head(1000, dim)
    engine = library.load(isa)
    graph = head.graph(engine, max_degree=max_degree)
    twin = head.twin(engine, graph)
    queries = make_queries(head, group)
    for beam, size, width in ((10, 15, 1), (20, 20, 4), (40, 100, 16), (90, 11, 4)):
        arguments = {"beam": beam, "pool_size": size, "width": width}
        key = (dim, group, max_degree, beam)
        if key not in _found:
            _found[key] = graph, twin.search(queries, 10, **arguments)
        same, found = _found[key]
        assert torch.equal(graph.lists, same.lists)
        assert_same(head.searcher(engine, graph).search(queries, 10, **arguments), found)


@each_engine
@pytest.mark.parametrize("num_keys", [0, 1, 15, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sizes(isa: str, num_keys: int, dtype: torch.dtype) -> None:
    head = make_head(num_keys, 64, dtype=dtype)
    engine = library.load(isa)
    graph = head.graph(engine)
    queries = make_queries(head, 17)
    found = head.searcher(engine, graph).search(queries, 20)
    twin = head.twin(engine, graph)
    assert_same(found, twin.search(queries, 20))
    assert bool((found.ids[..., min(num_keys, 20) :] == -1).all())
    assert bool((found.scores[found.ids < 0] == -torch.inf).all())


@each_engine
@pytest.mark.parametrize("group", [1, 4, 16, 21])
def test_a_search_without_limits_is_exact(isa: str, group: int) -> None:
    head = make_head(1000, 64, num_queries=400)
    engine = library.load(isa)
    graph = head.graph(engine, max_degree=16)
    queries = make_queries(head, group)
    found = head.searcher(engine, graph).search(queries, 50, beam=1000, pool_size=1000)
    among = reachable(graph)
    assert len(among) > 900
    assert torch.equal(found.ids, exact(head, queries, among, 50))
    scores = torch.einsum("hmd,hmkd->hmk", queries, head.keys[found.ids])
    torch.testing.assert_close(found.scores, scores)


@each_engine
def test_a_short_search_is_nearly_exact(isa: str) -> None:
    head = make_head(5000, 64, num_queries=3000, length=50)
    queries = make_queries(head, 64)
    found = head.searcher(library.load(isa)).search(queries, 20, beam=40)
    wanted = exact(head, queries, torch.arange(5000), 20)
    hits = (found.ids[0, :, :, None] == wanted[0, :, None]).any(2)
    assert hits.float().mean() > 0.9
    assert found.rows_visited < 4 * 5000


@each_engine
def test_equal_keys_come_in_their_order(isa: str) -> None:
    head = make_head(40, 16)
    head.keys[:] = head.keys[0]
    head.lists = torch.arange(40, dtype=torch.int32)[None].repeat(4, 1)
    found = head.searcher(library.load(isa)).search(make_queries(head, 3), 8, beam=64)
    assert found.ids.tolist() == [[list(range(8))] * 3]


@each_engine
def test_many_heads(isa: str) -> None:
    engine = library.load(isa)
    heads = [make_head(600, 32, seed=seed) for seed in range(3)]
    keys = torch.stack([head.keys for head in heads])
    quantised = QuantisedKeys(3, 32, with_rows=True, with_blocks=False, engine=engine)
    quantised.build(keys)
    graphs = [head.graph(engine) for head in heads]
    rows = [quantised.take(head, graph.keys_of.long()) for head, graph in enumerate(graphs)]
    queries = torch.cat([make_queries(head, 20) for head in heads])
    warm = torch.arange(3 * 20 * 2).view(3, 20, 2) * 7 % 600
    # A short beam, so that it shows where a search starts.
    limits = {"beam": 2, "pool_size": 9}
    together = GraphSearcher(keys, rows, graphs, engine=engine).search(
        queries, 9, **limits, warm=warm
    )
    parts = [
        head.searcher(engine, graph).search(queries[i : i + 1], 9, **limits, warm=warm[i : i + 1])
        for i, (head, graph) in enumerate(zip(heads, graphs, strict=True))
    ]
    twin = portable.GraphSearcher(keys, rows, graphs)
    assert_same(together, twin.search(queries, 9, **limits, warm=warm))
    assert torch.equal(together.ids, torch.cat([part.ids for part in parts]))
    assert together.rows_visited == sum(part.rows_visited for part in parts)
    assert together.dots == sum(part.dots for part in parts)


def test_threads_do_not_show() -> None:
    head = make_head(600, 32)
    keys = head.keys[None].repeat(4, 1, 1)
    engine = library.engine()
    assert engine is not None
    graphs = [head.graph(engine)] * 4
    rows = [head.rows(engine, graphs[0])] * 4
    queries = make_queries(head, 40).repeat(4, 1, 1)
    pool = Pool(3)
    alone = GraphSearcher(keys, rows, graphs).search(queries, 9)
    shared = GraphSearcher(keys, rows, graphs).search(queries, 9, pool=pool)
    pool.close()
    assert torch.equal(alone.ids, shared.ids)
    assert alone[2:] == shared[2:]


@each_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_strided_keys(isa: str, dtype: torch.dtype) -> None:
    head = make_head(500, 72, dtype=dtype)
    engine = library.load(isa)
    wide = torch.zeros(500, 100, dtype=dtype)
    wide[:, :72] = head.keys
    strided = Head(wide[:, :72], head.queries, head.lists)
    queries = make_queries(head, 4)
    one = head.searcher(engine).search(queries, 10)
    assert torch.equal(one.ids, strided.searcher(engine).search(queries, 10).ids)


@each_engine
def test_keys_beyond_the_graph_are_all_scored(isa: str) -> None:
    head = make_head(3000, 64, num_queries=400)
    engine = library.load(isa)
    first = Head(head.keys[:1700], head.queries, head.lists)
    first.lists = torch.where(first.lists < 1700, first.lists, -1)
    graph = first.graph(engine)
    queries = make_queries(head, 4)
    searcher = head.searcher(engine, graph)
    found = searcher.search(queries, 10, beam=1, pool_size=3000)
    tail = exact(head, queries, torch.arange(1700, 3000), 10)
    found_tail = [[i for i in row if i >= 1700] for row in exactly_sorted(found)]
    best_found = found.scores[0, :, 0]
    best_tail = (queries[0] @ head.keys.T)[:, 1700:].amax(1)
    assert bool((best_found >= best_tail - 1e-4).all())
    for row, wanted in zip(found_tail, tail[0].tolist(), strict=True):
        assert row == wanted[: len(row)]
    twin = head.twin(engine, graph)
    assert_same(searcher.search(queries, 10), twin.search(queries, 10))


def exactly_sorted(found: Searched) -> list[list[int]]:
    assert bool((found.scores.diff(dim=-1) <= 0).all())
    rows: list[list[int]] = found.ids[0].tolist()
    return rows


@each_engine
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_divide_the_keys_beyond_a_graph_and_find_the_same(isa: str, threads: int) -> None:
    head = make_head(40_037, 24, num_queries=100)
    engine = library.load(isa)
    first = Head(head.keys[:900], head.queries, head.lists.where(head.lists < 900, -1))
    searcher = first.searcher(engine, first.graph(engine))
    searcher.append(head.keys[None])
    queries = make_queries(head, 19)
    pool = Pool(threads)
    alone, shared = (searcher.search(queries, 33, pool=each) for each in (None, pool))
    pool.close()
    assert torch.equal(alone.ids, shared.ids)
    assert torch.equal(alone.scores, shared.scores)
    assert alone[2:] == shared[2:]


@each_engine
def test_a_graph_and_later_keys_do_not_crowd_each_other_out(isa: str) -> None:
    # They had one beam: later keys that filled it kept a search from expanding nodes.
    head = make_head(4000, 32, num_queries=1500, length=50)
    engine = library.load(isa)
    first = Head(head.keys[:2000], head.queries, head.lists.where(head.lists < 2000, -1))
    searcher = first.searcher(engine, first.graph(engine))
    queries = make_queries(head, 4)
    few = searcher.search(queries, 20, beam=40)
    later = head.keys[:2000] * 1.2
    searcher.append(torch.cat([head.keys[:2000], later])[None])
    both = searcher.search(queries, 20, beam=40)
    assert both.rows_visited == few.rows_visited + 2000


@each_engine
def test_unlinked_keys_alone(isa: str) -> None:
    head = make_head(2500, 64)
    queries = make_queries(head, 5)
    found = head.searcher(library.load(isa), no_graph()).search(queries, 10, pool_size=200)
    assert torch.equal(found.ids, exact(head, queries, torch.arange(2500), 10))
    assert found.rows_visited == 2500


@each_engine
def test_beta_leaves_out_what_is_far_below_the_best(isa: str) -> None:
    head = make_head(1000, 32)
    searcher = head.searcher(library.load(isa))
    queries = make_queries(head, 4)
    whole = searcher.search(queries, 100, beam=100, pool_size=100)
    found = searcher.search(queries, 100, beam=100, pool_size=100, beta=3.0)
    near = whole.scores >= whole.scores[..., :1] - 3.0
    assert 4 < int(near.sum()) < near.numel()
    assert torch.equal(found.ids, torch.where(near, whole.ids, -1))
    assert torch.equal(found.scores, whole.scores.masked_fill(~near, -torch.inf))
    alone = searcher.search(queries, 100, beam=100, pool_size=100, beta=0.0)
    assert bool((alone.ids[..., 1:] == -1).all())


@each_engine
def test_warm_starts_reach_what_the_entries_do_not(isa: str) -> None:
    head = make_head(400, 16, num_queries=100)
    engine = library.load(isa)
    ring = (torch.arange(400) + 1) % 400
    ring[199], ring[399] = 0, 200  # two rings
    graph = make_graph(ring[:, None].to(torch.int32), [0])
    searcher = head.searcher(engine, graph)
    queries = make_queries(head, 3)
    limits = {"beam": 400, "pool_size": 400}
    cold = searcher.search(queries, 10, **limits)
    assert torch.equal(cold.ids, exact(head, queries, torch.arange(200), 10))
    warm = torch.full((1, 3, 2), -1)
    warm[0, 1, 1] = 300
    both = searcher.search(queries, 10, **limits, warm=warm)
    assert torch.equal(both.ids, exact(head, queries, torch.arange(400), 10))
    assert both.rows_visited == 400
    twin = head.twin(engine, graph)
    assert_same(both, twin.search(queries, 10, **limits, warm=warm))


@each_engine
def test_starting_everywhere_reads_everything(isa: str) -> None:
    head = make_head(3000, 16)
    warm = torch.arange(3000).view(1, 2, 1500)
    queries = make_queries(head, 2)
    engine = library.load(isa)
    graph = head.graph(engine)
    found = head.searcher(engine, graph).search(queries, 10, beam=200, warm=warm)
    assert 1000 < len(graph.keys_of) < 3000
    assert torch.equal(found.ids, exact(head, queries, graph.keys_of.long(), 10))
    assert found.rows_visited == len(graph.keys_of)


@each_engine
@pytest.mark.parametrize("walks", [(1, 2), (2, 1), (9, 3)])
def test_walks_share_the_queries_of_a_head(isa: str, walks: tuple[int, int]) -> None:
    engine = library.load(isa)
    heads = [make_head(900, 72, seed=seed) for seed in range(2)]
    graphs = [head.graph(engine) for head in heads]
    rows = [head.rows(engine, graph) for head, graph in zip(heads, graphs, strict=True)]
    keys = torch.stack([head.keys for head in heads])
    queries = torch.cat([make_queries(head, 5) for head in heads])
    searcher = GraphSearcher(keys, rows, graphs, engine=engine)
    twin = portable.GraphSearcher(keys, rows, graphs)
    expected = twin.search(queries, 10, beam=20, walks=walks)
    for pool in (None, Pool(4)):
        assert_same(searcher.search(queries, 10, beam=20, walks=walks, pool=pool), expected)
    alone = [searcher.search(queries[:, i : i + 1], 10, beam=20) for i in range(5)]
    apart = searcher.search(queries, 10, beam=20, walks=5)
    assert torch.equal(apart.ids, torch.cat([each.ids for each in alone], 1))
    assert apart.rows_visited == sum(each.rows_visited for each in alone)


@each_engine
def test_every_head_has_a_beam_of_its_own(isa: str) -> None:
    engine = library.load(isa)
    heads = [make_head(900, 24, seed=seed) for seed in range(3)]
    graphs = [head.graph(engine) for head in heads]
    rows = [head.rows(engine, graph) for head, graph in zip(heads, graphs, strict=True)]
    keys = torch.stack([head.keys for head in heads])
    queries = torch.cat([make_queries(head, 5) for head in heads])
    beams = (3, 70, 20)
    found = GraphSearcher(keys, rows, graphs, engine=engine).search(queries, 10, beam=beams)
    assert_same(found, portable.GraphSearcher(keys, rows, graphs).search(queries, 10, beam=beams))
    alone = [
        head.searcher(engine, graph).search(queries[i : i + 1], 10, beam=beams[i])
        for i, (head, graph) in enumerate(zip(heads, graphs, strict=True))
    ]
    assert torch.equal(found.ids, torch.cat([each.ids for each in alone]))
    assert found.rows_visited == sum(each.rows_visited for each in alone)


@each_engine
def test_a_beam_may_be_wider_than_what_is_ranked(isa: str) -> None:
    head = make_head(2000, 32)
    engine = library.load(isa)
    graph = head.graph(engine)
    searcher = head.searcher(engine, graph)
    queries = make_queries(head, 3)
    few = searcher.search(queries, 10, beam=300, pool_size=30)
    many = searcher.search(queries, 10, beam=300, pool_size=300)
    assert few.rows_visited == many.rows_visited
    assert many.dots - few.dots == 3 * (300 - 30)
    assert few.rows_visited > searcher.search(queries, 10, beam=30).rows_visited
    assert (few.ids == many.ids).float().mean() > 0.95
    assert_same(few, head.twin(engine, graph).search(queries, 10, beam=300, pool_size=30))


@each_engine
def test_the_whole_beam(isa: str) -> None:
    head = make_head(1000, 32)
    found = head.searcher(library.load(isa)).search(
        make_queries(head, 2), 300, beam=50, pool_size=300
    )
    assert bool((found.ids >= 0).all())
    assert all(len(set(row)) == 300 for row in found.ids[0].tolist())


@each_engine
def test_a_key_that_a_list_names_twice_is_found_once(isa: str) -> None:
    head = make_head(64, 16)
    graph = make_graph(
        torch.arange(64, dtype=torch.int32).repeat_interleave(2).repeat(64, 1), [5, 5]
    )
    found = head.searcher(library.load(isa), graph).search(make_queries(head, 2), 64)
    assert found.rows_visited == 64
    assert found.ids[0].sort().values.tolist() == [list(range(64))] * 2


@each_engine
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e-38])
def test_queries_without_an_order_do_no_harm(isa: str, value: float) -> None:
    head = make_head(300, 16)
    queries = torch.full((1, 4, 16), value)
    found = head.searcher(library.load(isa)).search(queries, 10)
    assert int(found.ids.max()) < 300


@each_engine
def test_searching_twice_gives_the_same(isa: str) -> None:
    head = make_head(1000, 32)
    searcher = head.searcher(library.load(isa))
    queries = make_queries(head, 8)
    first = searcher.search(queries, 10)
    searcher.search(make_queries(head, 30, seed=5), 100)
    again = searcher.search(queries, 10)
    assert torch.equal(first.ids, again.ids)
    assert first[2:] == again[2:]


WRONG = {
    "top_k": ({"top_k": 0}, "top_k must be at least 1"),
    "pool": ({"top_k": 20, "pool_size": 19, "beam": 5}, "pool_size must be top_k"),
    "beam": ({"beam": 0}, "beam must be 1..1048576, got 0"),
    "wide beam": ({"beam": 2**20 + 1}, "beam must be 1..1048576"),
    "beams": ({"beam": [5, 6]}, "beam must be one number or one per head, 1, got 2"),
    "walks": ({"walks": 0}, "walks must be 1..1048576, got 0"),
    "walks of heads": ({"walks": [1, 2]}, "walks must be one number or one per head, 1, got 2"),
    "width": ({"width": 0}, "width must be 1"),
    "beta": ({"beta": -1.0}, "beta must be at least 0"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_wrong_numbers(arguments: dict[str, float], message: str) -> None:
    head = make_head(100, 8)
    searcher = head.searcher(library.load("baseline"))
    with pytest.raises(ConfigError, match=message):
        searcher.search(make_queries(head, 2), **{"top_k": 5, **arguments})  # type: ignore[arg-type]


def test_wrong_shapes() -> None:
    head = make_head(100, 8)
    engine = library.load("baseline")
    graph = head.graph(engine)
    rows = head.rows(engine, graph)
    searcher = head.searcher(engine, graph)
    with pytest.raises(ShapeError, match=r"queries must be \[1, M, 8\]"):
        searcher.search(torch.zeros(1, 2, 9), 5)
    with pytest.raises(ShapeError, match=r"warm must be \[1, 2, W\] int64"):
        searcher.search(torch.zeros(1, 2, 8), 5, warm=torch.zeros(1, 3, 4, dtype=torch.int64))
    with pytest.raises(ShapeError, match="graphs and rows must be one per head"):
        GraphSearcher(head.keys[None], [rows], [], engine=engine)
    with pytest.raises(ShapeError, match="links 100 keys, but there are only 90"):
        GraphSearcher(head.keys[None, :90], [rows], [graph], engine=engine)
    nodes = len(graph.keys_of)
    fewer = rows.take(0, torch.arange(nodes - 1))
    with pytest.raises(ShapeError, match=f"the {nodes} nodes of the graph, got {nodes - 1}; take"):
        GraphSearcher(head.keys[None], [fewer], [graph], engine=engine)


DAMAGED = {
    "keys_of": (100, ConfigError, "keys_of of a graph must be 0..99"),
    "lists": (255, ConfigError, "lists of a graph must be -1.."),
    "entries": (-2, ConfigError, "entries of a graph must be -1.."),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_graph_is_refused(name: str) -> None:
    head = make_head(100, 8)
    engine = library.load("baseline")
    graph = head.graph(engine)
    wrong, error, message = DAMAGED[name]
    getattr(graph, name).view(-1)[:2] = wrong
    for searcher in (head.searcher, head.twin):
        with pytest.raises(error, match=message):
            searcher(engine, graph)


def test_keys_out_of_order_are_refused() -> None:
    head = make_head(100, 8)
    engine = library.load("baseline")
    graph = head.graph(engine)
    graph.keys_of[1] = graph.keys_of[0]
    with pytest.raises(ConfigError, match="keys_of of a graph must be ascending"):
        head.searcher(engine, graph)


@each_engine
def test_appended_keys_are_all_scored(isa: str) -> None:
    head = make_head(3000, 72, num_queries=400)
    engine = library.load(isa)
    first = Head(head.keys[:1700], head.queries, head.lists.where(head.lists < 1700, -1))
    graph = first.graph(engine)
    assert len(graph.keys_of) < 1700
    queries = make_queries(head, 4)
    searcher = first.searcher(engine, graph)
    before = searcher.memory_bytes
    for count in (1701, 1950, 3000):
        searcher.append(head.keys[None, :count])
    among = torch.cat([reachable(graph), torch.arange(1700, 3000)])
    found = searcher.search(queries, 50, beam=1700, pool_size=1700)
    assert torch.equal(found.ids, exact(head, queries, among, 50))
    assert searcher.memory_bytes == before + -(-1300 // 16) * (72 // 4 + 1) * 64  # whole blocks
    with pytest.raises(ShapeError, match="must hold the"):
        searcher.append(head.keys[None, :2999])
