"""Graphs over keys in the engine: they are built, and searched for many heads at once."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import addressof, byref, c_int32, c_int64
from functools import partial

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.host_memory import host_array
from hybrid_kv.ops.key_graph import (
    BuildParams,
    KeyGraph,
    Searched,
    check_graph,
    check_lists,
    check_params,
    list_bytes,
    num_ranked,
    one_of_each,
    query_points,
)
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.bindings import (
    SEARCH_GRAPH,
    GraphHeadStruct,
    GraphQueryStruct,
    ProjectionStruct,
)
from hybrid_kv.ops.native.library import Pool, find_engine
from hybrid_kv.ops.native.rows import QuantisedKeys, describe, pool_handle
from hybrid_kv.ops.native.scans import ID_TYPES, FlatScan
from hybrid_kv.ops.native.step import EngineSearch


def pack(neighbours: Tensor, pool: Pool | None = None, engine: ctypes.CDLL | None = None) -> Tensor:
    """As `hybrid_kv.ops.key_graph.pack_lists`.

    Raises:
        ConfigError: a list names a node that does not exist.
        BackendUnavailable: there is no engine.
    """
    engine = find_engine(engine)
    nodes, degree = neighbours.shape
    neighbours = neighbours.contiguous()
    lists = host_array([nodes, list_bytes(degree, nodes)], torch.uint8)
    status = engine.hkv_graph_pack(
        pool_handle(pool), degree, nodes, neighbours.data_ptr(), lists.data_ptr()
    )
    library.check(engine, status)
    return lists


def unpack(
    lists: Tensor, degree: int, pool: Pool | None = None, engine: ctypes.CDLL | None = None
) -> Tensor:
    """As `hybrid_kv.ops.key_graph.unpack_lists`; raises as `pack`."""
    engine = find_engine(engine)
    neighbours = host_array([len(lists), degree], torch.int32)
    status = engine.hkv_graph_unpack(
        pool_handle(pool), degree, len(lists), lists.data_ptr(), neighbours.data_ptr()
    )
    library.check(engine, status)
    return neighbours


def project(
    lists: Tensor,
    keys: Tensor,
    queries: Tensor,
    params: BuildParams | None = None,
    pool: Pool | None = None,
    *,
    extra: Tensor | None = None,
    engine: ctypes.CDLL | None = None,
) -> KeyGraph:
    """Builds the graph of one head; the same for any number of threads and instruction set.

    Args:
        lists: [Q, K] int32, the keys that each sampled query retrieves, best first; -1 for none.
        keys: [N, D] float32, float16 or bfloat16.
        queries: [..., D], a sample of queries that defines the metric.
        pool: threads to share the work; None for the calling one.
        extra: [N, x] int32, further candidates of each key, such as its nearest keys.
        engine: a library other than the one in use.

    Raises:
        ShapeError: lists, keys, queries or extra do not fit together.
        ConfigError: a parameter is out of range, or a list names a key that does not exist.
        BackendUnavailable: there is no engine.
    """
    params = params or BuildParams()
    check_lists(lists, keys, extra)
    check_params(params)
    engine = find_engine(engine)
    lists = lists.contiguous()  # kept alive here: the projection only points at them
    extra = None if extra is None else extra.contiguous()
    projection = _describe_projection(lists, extra, len(keys), params)
    list_of = torch.full([len(keys)], -1, dtype=torch.int32)
    num_lists = c_int64(0)
    library.check(
        engine, engine.hkv_graph_cover(byref(projection), list_of.data_ptr(), byref(num_lists))
    )
    key_of = (list_of >= 0).nonzero()[:, 0]  # lists are numbered in the order of their keys
    points = query_points(keys, key_of, queries, params.metric_dims)
    neighbours = host_array([num_lists.value, params.max_degree], torch.int32)
    entries = torch.empty(params.num_entries, dtype=torch.int32)
    status = engine.hkv_graph_project(
        pool_handle(pool),
        byref(projection),
        list_of.data_ptr(),
        num_lists,
        0,  # lists of a graph that it would be linked into
        points.data_ptr(),
        neighbours.data_ptr(),
        entries.data_ptr(),
    )
    library.check(engine, status)
    lists = pack(neighbours, pool, engine)
    found = entries[entries >= 0]
    return KeyGraph(key_of.to(torch.int32), lists, found, len(keys), params.max_degree)


def _describe_projection(
    lists: Tensor, extra: Tensor | None, num_keys: int, params: BuildParams
) -> ProjectionStruct:
    return ProjectionStruct(
        lists=lists.data_ptr(),
        extra=None if extra is None else extra.data_ptr(),
        num_keys=num_keys,
        num_queries=lists.shape[0],
        list_length=lists.shape[1],
        extra_length=0 if extra is None else extra.shape[1],
        degree=params.max_degree,
        cap=params.cap,
        candidates=params.candidates,
        num_entries=params.num_entries,
        alpha=params.alpha,
        seed=params.seed,
    )


__all__ = ["GraphSearcher", "KeyGraph", "Searched"]


class GraphSearcher:
    """Searches the graphs of all KV heads in one call.

    Keys beyond a head's graph (`len(graph)` .. N) are scanned in every search, as a flat scan reads
    them: all keys of a head whose graph is empty. A long scan is divided over the threads.

    Args:
        keys: [Hkv, N, D], the originals; the searcher refers to them.
        rows: one per KV head, the codes of its nodes, `quantised.take(head, graph.keys_of.long())`;
            the keys beyond are quantised with the same statistics.
        graphs: one per KV head.
        pool: threads to share the check of the graphs; None for the calling one.

    Raises:
        ShapeError, ConfigError: they do not fit together.
    """

    def __init__(
        self,
        keys: Tensor,
        rows: Sequence[QuantisedKeys],
        graphs: Sequence[KeyGraph],
        *,
        pool: Pool | None = None,
        engine: ctypes.CDLL | None = None,
    ) -> None:
        self._engine = find_engine(engine)
        if not len(keys) == len(graphs) == len(rows):
            raise ShapeError(
                f"graphs and rows must be one per head, {len(keys)}, got {len(graphs)} and "
                f"{len(rows)}"
            )
        for graph in graphs:
            check_graph(graph, partial(unpack, pool=pool, engine=engine))
        self.graphs, self.rows = tuple(graphs), tuple(rows)
        self._tails = tuple(one.like(0, with_blocks=True) for one in rows)
        self.append(keys, pool)

    def append(self, keys: Tensor, pool: Pool | None = None) -> None:
        """Searches keys [Hkv, N, D] from now on: those known, and further ones.

        Raises:
            ShapeError, ConfigError: they do not fit, or are fewer than those known.
        """
        for head, (graph, tail) in enumerate(zip(self.graphs, self._tails, strict=True)):
            if len(graph) > keys.shape[1]:
                raise ShapeError(
                    f"a graph links {len(graph)} keys, but there are only {keys.shape[1]}"
                )
            tail.append(keys[head : head + 1, len(graph) :], pool)
        self._refer(keys)

    @property
    def memory_bytes(self) -> int:
        """Bytes of graphs and of keys in 8 bits."""
        graphs = sum(graph.nbytes for graph in self.graphs)
        return graphs + sum(keys.memory_bytes for keys in (*self.rows, *self._tails))

    def _refer(self, keys: Tensor) -> None:
        described = describe("keys", keys)
        for graph, rows in zip(self.graphs, self.rows, strict=True):
            if rows.count != len(graph.keys_of):
                raise ShapeError(
                    f"rows must hold the {len(graph.keys_of)} nodes of the graph, got "
                    f"{rows.count}; take graph.keys_of"
                )
        self._keys = keys  # keeps what the descriptors point at
        self._heads = (GraphHeadStruct * len(keys))(
            *(
                GraphHeadStruct(
                    *(described[head], rows.structs[0], tail.structs[0]),
                    *(graph.lists.data_ptr(), graph.keys_of.data_ptr(), graph.entries.data_ptr()),
                    *(len(graph), len(graph.keys_of), graph.degree, len(graph.entries)),
                )
                for head, (graph, rows, tail) in enumerate(
                    zip(self.graphs, self.rows, self._tails, strict=True)
                )
            )
        )

    def search(
        self,
        queries: Tensor,
        top_k: int,
        *,
        beam: int | Sequence[int] = 160,
        walks: int | Sequence[int] = 1,
        pool_size: int | None = None,
        width: int = 4,
        beta: float | None = None,
        warm: Tensor | None = None,
        pool: Pool | None = None,
    ) -> Searched:
        """The best keys of queries [Hkv, M, D] float32, ranked by exact scores.

        Args:
            top_k: results per query; all that was ranked with top_k = pool_size.
            beam: only the best `beam` keys of a query are expanded; raises recall and cost. One
                for all heads, or one for each.
            walks: how many walks, of which threads may take one each, share the queries of a head.
                Queries of one walk see each other's keys: more walks find fewer at equal beams. One
                number for all heads, or one for each; 16 queries walk together at most.
            pool_size: keys per query that are ranked exactly, at least top_k; default 1.5 top_k
                and at least top_k + 32.
            width: keys expanded per query and step.
            beta: leaves out keys whose score is more than this below the best one's.
            warm: [Hkv, M, W] int64 where to start besides the entries, such as the last step's
                results; -1 for none. Keys that are no nodes are passed over.
            pool: threads to share the heads; None for the calling one.

        Raises:
            ShapeError: queries or warm do not fit the keys.
            ConfigError: a number is out of range, or beam or walks are neither one number nor one
                per head.
        """
        heads, _, dim = self._keys.shape
        if queries.dim() != 3 or (queries.shape[0], queries.shape[2]) != (heads, dim):
            raise ShapeError(f"queries must be [{heads}, M, {dim}], got {list(queries.shape)}")
        queries = queries.to(torch.float32).contiguous()
        if top_k < 1:
            raise ConfigError(f"top_k must be at least 1, got {top_k}")
        beams = (c_int32 * heads)(*one_of_each("beam", beam, heads))
        shares = (c_int32 * heads)(*one_of_each("walks", walks, heads))
        pool_size = num_ranked(top_k) if pool_size is None else pool_size
        num_warm = 0 if warm is None else warm.shape[-1]
        params = GraphQueryStruct(
            *(addressof(beams), queries.shape[1], top_k, pool_size, width, num_warm),
            math.inf if beta is None else beta,
            addressof(shares),
        )
        if warm is not None:
            warm = _checked_warm(warm, queries)
        return self._run(params, queries, warm, pool)

    def plan(
        self,
        top_k: int,
        *,
        beam: Sequence[int],
        walks: Sequence[int],
        pool_size: int,
        width: int = 4,
    ) -> EngineSearch:
        """The same search as a part of a step that is one call; see `search`."""
        return EngineSearch(
            SEARCH_GRAPH,
            range(len(self._keys)),
            self._heads,
            (self, self._keys, self.graphs, self.rows, self._tails),
            top_k,
            num_ranked=pool_size,
            beams=beam,
            walks=walks,
            num_expanded=width,
        )

    def _run(
        self, params: GraphQueryStruct, queries: Tensor, warm: Tensor | None, pool: Pool | None
    ) -> Searched:
        heads = queries.shape[0]
        ids = torch.empty(heads, params.queries, params.top_k, dtype=torch.int64)
        scores = torch.empty(heads, params.queries, params.top_k)
        rows, dots = (c_int64 * heads)(), (c_int64 * heads)()
        status = self._engine.hkv_graph_search(
            pool_handle(pool),
            heads,
            self._heads,
            byref(params),
            queries.data_ptr(),
            None if warm is None else warm.data_ptr(),
            *(ids.data_ptr(), scores.data_ptr(), rows, dots),
        )
        library.check(self._engine, status)
        return Searched(ids, scores, sum(rows), sum(dots))


def _checked_warm(warm: Tensor, queries: Tensor) -> Tensor:
    if warm.dim() != 3 or warm.shape[:2] != queries.shape[:2] or warm.dtype != torch.int64:
        raise ShapeError(
            f"warm must be [{queries.shape[0]}, {queries.shape[1]}, W] int64, got "
            f"{list(warm.shape)} {warm.dtype}"
        )
    return warm.contiguous()


def nearest_keys(
    scan: FlatScan,
    head: int,
    queries: Tensor,
    top_k: int,
    *,
    rerank: int = 0,
    pool: Pool | None = None,
) -> Tensor:
    """The best keys of very many queries of one head of a scan, for building an index.

    Args:
        queries: [M, D] float32, float16 or bfloat16, rows contiguous.
        rerank: as in `search`; 2 * top_k finds what an exact search does, up to ties.
        pool: threads that share the queries.

    Returns:
        [M, top_k] int32, best first, padded with -1.

    Raises:
        ShapeError, ConfigError: an argument does not fit.
    """
    if queries.dim() != 2 or queries.shape[1] != scan.keys.shape[2]:
        raise ShapeError(
            f"queries must be [M, {scan.keys.shape[2]}], got shape {list(queries.shape)}"
        )
    if top_k < 1:
        raise ConfigError(f"top_k must be at least 1, got {top_k}; ask for at least one key")
    described = describe("queries", queries[None])
    ids = torch.empty((len(queries), top_k), dtype=torch.int32)
    status = scan._engine.hkv_knn(
        pool_handle(pool),
        byref(scan._structs[head]),
        described,
        *(top_k, rerank, ID_TYPES[torch.int32], ids.data_ptr(), None),
    )
    library.check(scan._engine, status)
    return ids
