"""Small heads for the tests of the graph."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_kv.ops.key_graph import BuildParams, KeyGraph, pack_lists, unpack_lists
from hybrid_kv.ops.native.graph import GraphSearcher, project
from hybrid_kv.ops.native.rows import QuantisedKeys
from tests.ops.native import graph_oracle as portable


@dataclass
class Head:
    """keys [N, D], sampled queries [Q, D] and their lists [Q, K]."""

    keys: Tensor
    queries: Tensor
    lists: Tensor

    def rows(self, engine: ctypes.CDLL, graph: KeyGraph) -> QuantisedKeys:
        """What a search of the graph reads, its nodes."""
        return self.take(engine, graph.keys_of.long())

    def take(self, engine: ctypes.CDLL, keys: Tensor) -> QuantisedKeys:
        """Some keys in 8 bits, with the statistics of all."""
        quantised = QuantisedKeys(
            1, self.keys.shape[1], with_rows=True, with_blocks=False, engine=engine
        )
        quantised.build(self.keys[None])
        return quantised.take(0, keys)

    def searcher(self, engine: ctypes.CDLL, graph: KeyGraph | None = None) -> GraphSearcher:
        graph = self.graph(engine) if graph is None else graph
        return GraphSearcher(self.keys[None], [self.rows(engine, graph)], [graph], engine=engine)

    def twin(self, engine: ctypes.CDLL, graph: KeyGraph) -> portable.GraphSearcher:
        rows = self.take(engine, graph.rows(len(self.keys)))
        return portable.GraphSearcher(self.keys[None], [rows], [graph])

    def graph(self, engine: ctypes.CDLL, **params: int) -> KeyGraph:
        return project(self.lists, self.keys, self.queries, BuildParams(**params), engine=engine)


def make_head(
    num_keys: int,
    dim: int,
    *,
    num_queries: int = 200,
    length: int = 20,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Head:
    """Keys with a spectrum and queries near some of them, as attention has."""
    random = torch.Generator().manual_seed(seed)
    spectrum = torch.linspace(2.0, 0.2, dim)
    keys = (torch.randn(num_keys, dim, generator=random) * spectrum + 1.0).to(dtype)
    queries = torch.randn(num_queries, dim, generator=random) * spectrum
    if num_keys:
        targets = torch.randint(num_keys, (num_queries,), generator=random)
        queries = 0.7 * queries + 0.7 * (keys[targets].float() - 1.0)
    return Head(keys, queries, exact_lists(keys, queries, length))


def exact_lists(keys: Tensor, queries: Tensor, length: int) -> Tensor:
    """The best keys of each query [Q, min(length, N)] int32, ties by lower number."""
    scores = queries @ keys.float().T
    order = scores.sort(dim=1, descending=True, stable=True).indices
    return order[:, :length].to(torch.int32).contiguous()


def make_graph(neighbours: Tensor, entries: list[int]) -> KeyGraph:
    """A graph of which all keys are nodes: neighbours [N, degree] int32, -1 for none."""
    count, degree = neighbours.shape
    keys_of = torch.arange(count, dtype=torch.int32)
    starts = torch.tensor(entries, dtype=torch.int32)
    return KeyGraph(keys_of, pack_lists(neighbours), starts, count, degree)


def neighbours_of(graph: KeyGraph) -> Tensor:
    """[num_nodes, degree] int32, nodes or -1."""
    return unpack_lists(graph.lists, graph.degree)


def reachable(graph: KeyGraph) -> Tensor:
    """Keys that a search that never stops would see, in ascending order."""
    neighbours = neighbours_of(graph)
    found = set(graph.entries.tolist())
    todo = list(found)
    while todo:
        for node in neighbours[todo.pop()].tolist():
            if node >= 0 and node not in found:
                found.add(node)
                todo.append(node)
    return graph.keys_of[sorted(found)].long()
