"""The engine's graph over keys: building it and searching many heads at once."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import cache

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.key_graph import (
    BuildParams,
    KeyGraph,
    Searched,
    check_extends,
    check_graph,
    check_lists,
    check_params,
    keys_of_lists,
    query_points,
)
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.memory import host_array
from hybrid_kv.ops.native.pool import Pool
from hybrid_kv.ops.native.rows import (
    KeysStruct,
    QuantisedKeys,
    QuantisedStruct,
    describe,
    find_engine,
    pool_handle,
)

__all__ = ["BuildParams", "GraphSearcher", "KeyGraph", "Searched", "extend", "project"]


class _Projection(Structure):
    """`hkv_projection`."""

    _fields_ = (
        *((name, c_void_p) for name in ("lists", "extra")),
        *((name, c_int64) for name in ("num_keys", "num_queries")),
        *((name, c_int32) for name in ("list_length", "extra_length", "degree", "cap")),
        *((name, c_int32) for name in ("candidates", "num_entries")),
        ("alpha", c_float),
        ("seed", c_uint64),
    )


class _Head(Structure):
    """`hkv_graph_head`."""

    _fields_ = (
        ("keys", KeysStruct),
        ("quantised", QuantisedStruct),
        *((name, c_void_p) for name in ("neighbours", "list_of", "entries")),
        *((name, c_int64) for name in ("linked", "num_lists")),
        *((name, c_int32) for name in ("degree", "num_entries")),
    )


class _Query(Structure):
    """`hkv_graph_query`."""

    _fields_ = (
        *((name, c_int32) for name in ("queries", "top_k", "beam", "pool_size")),
        *((name, c_int32) for name in ("width", "num_warm")),
        ("beta", c_float),
    )


@cache
def _declared(engine: ctypes.CDLL) -> ctypes.CDLL:
    projection = POINTER(_Projection)
    library.declare(engine, "hkv_graph_cover", projection, c_void_p, POINTER(c_int64))
    library.declare(
        engine,
        "hkv_graph_project",
        *(c_void_p, projection, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p),
    )
    library.declare(
        engine,
        "hkv_graph_search",
        *(c_void_p, c_int32, POINTER(_Head), POINTER(_Query)),
        *(c_void_p,) * 6,
    )
    return engine


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
    graph = KeyGraph(
        torch.empty(0, params.max_degree, dtype=torch.int32),
        *(torch.empty(0, dtype=torch.int32) for _ in range(2)),
    )
    return extend(graph, lists, keys, queries, params, pool, extra=extra, engine=engine)


def extend(
    graph: KeyGraph,
    lists: Tensor,
    keys: Tensor,
    queries: Tensor,
    params: BuildParams | None = None,
    pool: Pool | None = None,
    *,
    extra: Tensor | None = None,
    engine: ctypes.CDLL | None = None,
) -> KeyGraph:
    """Links further keys into a graph, which stays as it is; the result is over all of `keys`.

    A key that `lists` or `extra` name and that has no list yet gets one, by the rule of `project`
    applied to these lists; the old keys that it links to compete for the last quarter of their
    lists with it. A new key that nothing names cannot be found afterwards.

    Args:
        graph: over the first len(graph) of the keys.
        lists: [Q, K] int32, what queries since then (or sampled ones, searched again) retrieve.
        keys, queries, params, pool, extra, engine: as for `project`; params.num_entries is not
            used, and max_degree must be the graph's.

    Raises:
        ShapeError, ConfigError, BackendUnavailable: as `project`.
    """
    params = params or BuildParams(max_degree=graph.neighbours.shape[1])
    check_lists(lists, keys, extra)
    check_params(params)
    check_extends(graph, keys, params)
    engine = _declared(find_engine(engine))
    lists = lists.contiguous()  # kept alive here: the projection only points at them
    extra = None if extra is None else extra.contiguous()
    projection = _describe_projection(lists, extra, len(keys), params)
    known = len(graph.neighbours)
    list_of = host_array([len(keys)], torch.int32)
    list_of[: len(graph)] = graph.list_of
    list_of[len(graph) :] = -1
    num_lists = c_int64(known)
    library.check(
        engine, engine.hkv_graph_cover(byref(projection), list_of.data_ptr(), byref(num_lists))
    )
    points = query_points(keys, keys_of_lists(list_of), queries, params.metric_dims)
    neighbours = host_array([num_lists.value, params.max_degree], torch.int32)
    neighbours[:known] = graph.neighbours
    entries = torch.empty(params.num_entries, dtype=torch.int32)
    status = engine.hkv_graph_project(
        pool_handle(pool),
        byref(projection),
        list_of.data_ptr(),
        num_lists,
        known,
        points.data_ptr(),
        neighbours.data_ptr(),
        entries.data_ptr(),
    )
    library.check(engine, status)
    return KeyGraph(neighbours, list_of, graph.entries if known else entries[entries >= 0])


def _describe_projection(
    lists: Tensor, extra: Tensor | None, num_keys: int, params: BuildParams
) -> _Projection:
    return _Projection(
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


class GraphSearcher:
    """Searches the graphs of all KV heads in one call.

    Keys beyond a head's graph (`len(graph)` .. N) are scored one and all in every search.

    Args:
        keys: [Hkv, N, D], the originals; the searcher refers to them.
        quantised: the same keys, with rows.
        graphs: one per KV head.
        pool: threads to share the heads; None for the calling one.

    Raises:
        ShapeError, ConfigError: they do not fit together.
    """

    def __init__(
        self,
        keys: Tensor,
        quantised: QuantisedKeys,
        graphs: Sequence[KeyGraph],
        *,
        pool: Pool | None = None,
        engine: ctypes.CDLL | None = None,
    ) -> None:
        self._engine = _declared(find_engine(engine))
        self._pool = pool
        self.graphs: tuple[KeyGraph, ...] = ()
        self.update(keys, quantised, graphs)

    def update(
        self, keys: Tensor, quantised: QuantisedKeys, graphs: Sequence[KeyGraph] | None = None
    ) -> None:
        """Refers to other arrays from now on, for example with appended keys."""
        described = describe("keys", keys)
        if quantised.count < keys.shape[1]:
            raise ShapeError(
                f"quantised must hold all {keys.shape[1]} keys, it has {quantised.count}; "
                "call quantised.append(keys) first"
            )
        if graphs is not None:
            for graph in graphs:
                check_graph(graph)
            self.graphs = tuple(graphs)
        if len(self.graphs) != len(keys):
            raise ShapeError(f"graphs must be one per head, {len(keys)}, got {len(self.graphs)}")
        for graph in self.graphs:
            if len(graph) > keys.shape[1]:
                raise ShapeError(
                    f"a graph links {len(graph)} keys, but there are only {keys.shape[1]}"
                )
        self._keys, self._quantised = keys, quantised  # keeps what the descriptors point at
        self._heads = (_Head * len(keys))(
            *(
                _Head(
                    *(described[head], quantised.structs[head]),
                    *(graph.neighbours.data_ptr(), graph.list_of.data_ptr()),
                    *(graph.entries.data_ptr(), len(graph), len(graph.neighbours)),
                    *(graph.neighbours.shape[1], len(graph.entries)),
                )
                for head, graph in enumerate(self.graphs)
            )
        )

    def search(
        self,
        queries: Tensor,
        top_k: int,
        *,
        beam: int = 160,
        pool_size: int | None = None,
        width: int = 4,
        beta: float | None = None,
        warm: Tensor | None = None,
    ) -> Searched:
        """The best keys of queries [Hkv, M, D] float32, ranked by exact scores.

        Args:
            top_k: results per query; all of the pool with top_k = pool_size.
            beam: only the best `beam` keys of a query are expanded; raises recall and cost.
            pool_size: keys per query that are ranked exactly, at least top_k; default 1.5 top_k
                and at least beam.
            width: keys expanded per query and step.
            beta: leaves out keys whose score is more than this below the best one's.
            warm: [Hkv, M, W] int64 where to start besides the entries, such as the last step's
                results; -1 for none.

        Raises:
            ShapeError: queries or warm do not fit the keys.
            ConfigError: a number is out of range.
        """
        heads, _, dim = self._keys.shape
        if queries.dim() != 3 or (queries.shape[0], queries.shape[2]) != (heads, dim):
            raise ShapeError(f"queries must be [{heads}, M, {dim}], got {list(queries.shape)}")
        queries = queries.to(torch.float32).contiguous()
        if top_k < 1:
            raise ConfigError(f"top_k must be at least 1, got {top_k}")
        size = pool_size if pool_size is not None else max(beam, top_k + top_k // 2)
        params = _Query(
            queries=queries.shape[1],
            top_k=top_k,
            beam=beam,
            pool_size=size,
            width=width,
            num_warm=0 if warm is None else warm.shape[-1],
            beta=math.inf if beta is None else beta,
        )
        if warm is not None:
            warm = _checked_warm(warm, queries)
        return self._run(params, queries, warm)

    def _run(self, params: _Query, queries: Tensor, warm: Tensor | None) -> Searched:
        heads = queries.shape[0]
        ids = torch.empty(heads, params.queries, params.top_k, dtype=torch.int64)
        scores = torch.empty(ids.shape)
        counts = torch.zeros(2, heads, dtype=torch.int64)
        status = self._engine.hkv_graph_search(
            pool_handle(self._pool),
            heads,
            self._heads,
            byref(params),
            queries.data_ptr(),
            None if warm is None else warm.data_ptr(),
            *(ids.data_ptr(), scores.data_ptr(), counts[0].data_ptr(), counts[1].data_ptr()),
        )
        library.check(self._engine, status)
        rows, dots = counts.sum(1).tolist()
        return Searched(ids, scores, rows, dots)


def _checked_warm(warm: Tensor, queries: Tensor) -> Tensor:
    if warm.dim() != 3 or warm.shape[:2] != queries.shape[:2] or warm.dtype != torch.int64:
        raise ShapeError(
            f"warm must be [{queries.shape[0]}, {queries.shape[1]}, W] int64, got "
            f"{list(warm.shape)} {warm.dtype}"
        )
    return warm.contiguous()
