"""The engine's graph over the keys of one head: building, growing and packing it."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int64
from functools import partial

import torch
from torch import Tensor

from hybrid_kv.ops.graph_lists import list_bytes
from hybrid_kv.ops.host_memory import host_array
from hybrid_kv.ops.key_graph import (
    BuildParams,
    KeyGraph,
    check_extends,
    check_lists,
    check_params,
    in_key_order,
    keys_of_lists,
    lists_of_keys,
    no_graph,
    query_points,
)
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.bindings import ProjectionStruct
from hybrid_kv.ops.native.library import find_engine
from hybrid_kv.ops.native.rows import pool_handle
from hybrid_kv.ops.native.workers import Pool


def pack(neighbours: Tensor, pool: Pool | None = None, engine: ctypes.CDLL | None = None) -> Tensor:
    """As `hybrid_kv.ops.graph_lists.pack_lists`.

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
    """As `hybrid_kv.ops.graph_lists.unpack_lists`; raises as `pack`."""
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
    return extend(
        no_graph(params.max_degree), lists, keys, queries, params, pool, extra=extra, engine=engine
    )


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
    params = params or BuildParams(max_degree=graph.degree)
    check_lists(lists, keys, extra)
    check_params(params)
    engine = find_engine(engine)
    check_extends(graph, keys, params, partial(unpack, pool=pool, engine=engine))
    lists = lists.contiguous()  # kept alive here: the projection only points at them
    extra = None if extra is None else extra.contiguous()
    projection = _describe_projection(lists, extra, len(keys), params)
    known = len(graph.keys_of)
    list_of = lists_of_keys(graph, len(keys))
    num_lists = c_int64(known)
    library.check(
        engine, engine.hkv_graph_cover(byref(projection), list_of.data_ptr(), byref(num_lists))
    )
    key_of = keys_of_lists(list_of)
    points = query_points(keys, key_of, queries, params.metric_dims)
    neighbours = host_array([num_lists.value, params.max_degree], torch.int32)
    neighbours[:known] = unpack(graph.lists, graph.degree, pool, engine)
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
    entries = graph.entries if known else entries[entries >= 0]
    keys_of, neighbours, entries = in_key_order(key_of, neighbours, entries)
    lists = pack(neighbours, pool, engine)
    return KeyGraph(keys_of, lists, entries, len(keys), params.max_degree)


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
