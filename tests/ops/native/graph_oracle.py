"""The oracle of the engine's graph over keys: builds the same graph, finds the same keys.

Written to be read. Building is integer arithmetic, so its graphs equal the engine's bit for bit; a
traversal visits the same keys in the same order, and only the exact scores at its end may differ
in their last digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.key_graph import (
    BuildParams,
    KeyGraph,
    Searched,
    check_graph,
    check_lists,
    check_params,
    num_ranked,
    one_of_each,
    pack_lists,
    query_points,
    unpack_lists,
)

_Ints = NDArray[np.int64]
_TOP_WEIGHT = 256
_WEIGHT_BINS = 1024
_GROUP = 16
_LARGEST_CODE = 127


class QuantisedRows(Protocol):
    """Keys of one head in 8 bits: the engine's or portable ones."""

    channel: Tensor  # [1, D] float32
    levels: Tensor  # [1, 256] float32
    rows: Tensor  # [1, capacity, row_bytes] uint8
    scale_codes: Tensor  # [1, capacity] uint8
    count: int


# ---- Building. "Nodes" are the keys that have a list, in the order of their numbers.


def project(
    lists: Tensor,
    keys: Tensor,
    queries: Tensor,
    params: BuildParams | None = None,
    *,
    extra: Tensor | None = None,
) -> KeyGraph:
    """Builds the graph of one head; see `hybrid_kv.ops.native.graph.project`.

    Raises:
        ShapeError: lists, keys, queries or extra do not fit together.
        ConfigError: a parameter is out of range, or a list names a key that does not exist.
    """
    params = params or BuildParams()
    check_lists(lists, keys, extra)
    check_params(params)
    list_of = _cover(lists, extra, len(keys))
    key_of = (list_of >= 0).nonzero()[:, 0]
    points = query_points(keys, key_of, queries, params.metric_dims)

    def nodes(ids: Tensor, none: int) -> _Ints:
        found = torch.cat([list_of, list_of.new_tensor([-1])])[ids.long()].long()
        return np.ascontiguousarray(torch.where(found < 0, none, found).numpy())

    further = lists.new_empty(len(key_of), 0) if extra is None else extra[key_of]
    linked, popular = _project(
        nodes(lists, len(key_of)),
        nodes(further, len(key_of)),
        params.max_degree,
        points.numpy().astype(np.int64),
        _rank_weights(lists.shape[1]),
        params.cap,
        params.candidates,
        np.float32(params.alpha),
        np.uint64(params.seed),
    )
    order = np.lexsort((np.arange(len(popular)), -popular))[: params.num_entries]
    entries = torch.from_numpy(order).to(torch.int32)
    neighbours = torch.from_numpy(linked).to(torch.int32)
    keys_of, lists = key_of.to(torch.int32), pack_lists(neighbours)
    return KeyGraph(keys_of, lists, entries, len(keys), params.max_degree)


def _cover(lists: Tensor, extra: Tensor | None, num_keys: int) -> Tensor:
    """list_of [N] with lists for all keys that are named, in the order of the keys."""
    named = lists.reshape(-1)
    if extra is not None:
        named = torch.cat([named, extra.reshape(-1)])
    if named.numel() and not (int(named.min()) >= -1 and int(named.max()) < num_keys):
        raise ConfigError("a list names a key that does not exist")
    is_named = torch.zeros(num_keys + 1, dtype=torch.bool)
    is_named[named.long()] = True
    is_named = is_named[:-1]
    if extra is not None:
        is_named |= (extra >= 0).any(1)
    list_of = torch.full([num_keys], -1, dtype=torch.int32)
    named = is_named.nonzero()[:, 0]
    list_of[named] = torch.arange(len(named), dtype=torch.int32)
    return list_of


def _rank_weights(length: int) -> _Ints:
    weights = np.floor(_TOP_WEIGHT / (1.0 + 0.05 * np.arange(length + 1)))
    return np.maximum(1, weights).astype(np.int64)


def _compiled(function: Any) -> Any:
    return numba.njit(cache=True)(function)


@_compiled
def _project(lists, extra, degree, points, weights, cap, candidates, alpha, seed):  # type: ignore[no-untyped-def]
    """[nodes, degree] neighbours as nodes, -1 for none, and how many queries retrieved each."""
    num_nodes = len(points)
    starts, visits = _invert(lists, num_nodes)
    own = np.full((num_nodes, degree), -1, np.int64)
    weight = np.zeros(num_nodes + 1, np.int64)
    for node in range(num_nodes):
        some = _choose_visits(
            visits[starts[node] : starts[node + 1]], node, lists.shape[1], cap, seed
        )
        heaviest = _heaviest(node, some, lists, extra, weights, weight, candidates, cap)
        _prune(node, heaviest, np.int64(0), own[node], points, alpha)  # of one type, compiled once
    starts_in, edges = _invert(own, num_nodes)
    linked = np.full((num_nodes, degree), -1, np.int64)
    for node in range(num_nodes):
        chosen_by = edges[starts_in[node] : starts_in[node + 1]] // degree
        mine = own[node]
        _link(node, mine[mine >= 0], chosen_by, linked[node], points, alpha)
    return linked, starts[1:] - starts[:-1]


@_compiled
def _invert(targets, num_targets):  # type: ignore[no-untyped-def]
    """For each target, the positions in `targets` that name it: starts, positions."""
    flat = targets.reshape(-1)
    starts = np.zeros(num_targets + 1, np.int64)
    for target in flat:
        if 0 <= target < num_targets:
            starts[target + 1] += 1
    starts = np.cumsum(starts)
    after = starts.copy()
    positions = np.empty(starts[-1], np.int64)
    for at in range(len(flat)):
        target = flat[at]
        if 0 <= target < num_targets:
            positions[after[target]] = at
            after[target] += 1
    return starts, positions


@_compiled
def _mix(value):  # type: ignore[no-untyped-def]
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@_compiled
def _choose_visits(visits, node, length, cap, seed):  # type: ignore[no-untyped-def]
    """Up to `cap` of the visits: half those of the best rank, half spread over the others."""
    if len(visits) <= cap:
        return visits
    by_rank = np.argsort(visits % length, kind="mergesort")
    is_best = np.zeros(len(visits), np.bool_)
    is_best[by_rank[: cap // 2]] = True
    rest = visits[~is_best]
    chosen = np.empty(cap, np.int64)
    chosen[: cap // 2] = visits[is_best]
    wanted = cap - cap // 2
    for i in range(wanted):
        first, last = len(rest) * i // wanted, len(rest) * (i + 1) // wanted
        random = _mix(seed ^ _mix((np.uint64(node) << np.uint64(16)) | np.uint64(i)))
        chosen[cap // 2 + i] = rest[first + np.int64(random % np.uint64(last - first))]
    return chosen


@_compiled
def _heaviest(node, visits, lists, extra, weights, weight, candidates, cap):  # type: ignore[no-untyped-def]
    """The nodes retrieved with this one, heaviest first, of equal ones the first found.

    `weight` is working memory, 0 for every node before and after.
    """
    length = lists.shape[1]
    touched = np.empty(len(visits) * length + extra.shape[1], np.int64)
    count = 0
    for visit in visits:
        query, rank = visit // length, visit % length
        for i in range(length):
            other = lists[query, i]
            touched[count] = other
            count += weight[other] == 0
            weight[other] = (weight[other] + weights[max(rank, i)]) & 0xFFFF
    for other in extra[node]:
        touched[count] = other
        count += weight[other] == 0
        weight[other] = (weight[other] + weights[length]) & 0xFFFF
    touched = touched[:count]
    weight[node] = weight[len(weight) - 1] = 0
    shift = 0
    while (_TOP_WEIGHT * (cap + 1)) >> shift >= _WEIGHT_BINS:
        shift += 1
    order = np.argsort(-(weight[touched] >> shift), kind="mergesort")
    weight[touched] = 0
    heaviest = touched[order[: candidates + 2]]
    return heaviest[(heaviest != node) & (heaviest != len(weight) - 1)][:candidates]


@_compiled
def _distance(a, b):  # type: ignore[no-untyped-def]
    total = np.int64(0)
    for i in range(len(a)):
        total += (a[i] - b[i]) ** 2
    return total


@_compiled
def _stands_for(accepted, other, limit, points, alpha):  # type: ignore[no-untyped-def]
    """Whether an accepted neighbour is so near to `other` that it is not needed."""
    for neighbour in accepted:
        near = np.float32(_distance(points[neighbour], points[other]))
        if np.float32(alpha * near) < np.float32(limit):
            return True
    return False


@_compiled
def _prune(node, others, kept, neighbours, points, alpha):  # type: ignore[no-untyped-def]
    """Adds others in order, first those that no neighbour stands for; returns the new length."""
    count = kept
    is_rejected = np.zeros(len(others), np.bool_)
    for i in range(len(others)):
        if count == len(neighbours):
            break
        limit = _distance(points[node], points[others[i]])
        if _stands_for(neighbours[:count], others[i], limit, points, alpha):
            is_rejected[i] = True
        else:
            neighbours[count] = others[i]
            count += 1
    for other in others[is_rejected]:
        if count < len(neighbours):
            neighbours[count] = other
            count += 1
    return count


@_compiled
def _link(node, own, chosen_by, neighbours, points, alpha):  # type: ignore[no-untyped-def]
    """The own choice and nodes that chose this one; the nearest compete for the last quarter."""
    degree = len(neighbours)
    wanted = min(len(chosen_by), 4 * degree)
    others = np.empty(wanted + len(own), np.int64)
    count = 0
    for i in range(wanted):
        other = chosen_by[len(chosen_by) * i // wanted]
        if other != node and not np.any(own == other):
            others[count] = other
            count += 1
    if len(own) + count <= degree:
        neighbours[: len(own)] = own
        neighbours[len(own) : len(own) + count] = others[:count]
        return
    kept = min(len(own), degree * 3 // 4)
    neighbours[:kept] = own[:kept]
    for other in own[kept:]:
        others[count] = other
        count += 1
    others = others[:count][np.argsort(others[:count], kind="mergesort")]  # compiled already
    distances = np.empty(count, np.int64)
    for i in range(count):
        distances[i] = _distance(points[node], points[others[i]])
    _prune(node, others[np.argsort(distances, kind="mergesort")], kept, neighbours, points, alpha)


# ---- Searching.


class GraphSearcher:
    """Searches the graphs of all KV heads; see `hybrid_kv.ops.native.graph.GraphSearcher`.

    Args:
        keys: [Hkv, N, D], the originals.
        rows: one per KV head, its keys graph.rows(N) in 8 bits.
        graphs: one per KV head.

    Raises:
        ShapeError, ConfigError: they do not fit together.
    """

    def __init__(
        self, keys: Tensor, rows: Sequence[QuantisedRows], graphs: Sequence[KeyGraph]
    ) -> None:
        if not len(keys) == len(graphs) == len(rows):
            raise ShapeError(
                f"graphs and rows must be one per head, {len(keys)}, got {len(graphs)} and "
                f"{len(rows)}"
            )
        for graph in graphs:
            check_graph(graph)
        self._keys, self._rows, self.graphs = keys, tuple(rows), tuple(graphs)

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
    ) -> Searched:
        """The best keys of queries [Hkv, M, D] float32, ranked by exact scores."""
        heads, num_queries, _ = queries.shape
        beams, shares = one_of_each("beam", beam, heads), one_of_each("walks", walks, heads)
        ranked = num_ranked(top_k) if pool_size is None else pool_size
        if not (1 <= top_k <= ranked and width >= 1):
            raise ConfigError(
                f"top_k must be 1..pool_size ({ranked}) and width at least 1, got {top_k}, {width}"
            )
        ids = torch.full((heads, num_queries, top_k), -1, dtype=torch.int64)
        scores = torch.full(ids.shape, -math.inf)
        rows = dots = 0
        for head in range(heads):
            together = min(_GROUP, -(-num_queries // shares[head]))
            for first in range(0, num_queries, together):
                some = slice(first, first + together)
                group = queries[head, some].float()
                starts = warm[head, some] if warm is not None else torch.empty(0)
                pools, read = self._traverse(head, group, starts, (beams[head], ranked, width))
                rows += read
                dots += read * len(group)
                for i, found in enumerate(pools):
                    dots += len(found)
                    best, exact = self._rank(head, group[i], found, top_k, beta)
                    ids[head, first + i, : len(best)] = best
                    scores[head, first + i, : len(best)] = exact
        return Searched(ids, scores, rows, dots)

    def _traverse(
        self, head: int, queries: Tensor, warm: Tensor, limits: tuple[int, int, int]
    ) -> tuple[list[Tensor], int]:
        """Keys to rank for each query, at most limits[1], and how many rows were read."""
        beam, ranked, width = limits
        graph, quantised = self.graphs[head], self._rows[head]
        key_of = graph.rows(self._keys.shape[1])
        wanted = warm.reshape(-1).long()
        warm_nodes = (graph.keys_of[None] == wanted[:, None]).nonzero()[:, 1]
        codes, sums = _quantise_queries(queries, quantised.channel[0])
        rows, num_nodes = quantised.rows[0, : len(key_of)], len(graph.keys_of)
        found, found_scores, counts, read = _traverse(
            unpack_lists(graph.lists, graph.degree).numpy(),
            np.concatenate([graph.entries.long().numpy(), warm_nodes.numpy()]),
            rows[:num_nodes].numpy(),
            quantised.scale_codes[0].numpy(),
            quantised.levels[0].numpy(),
            codes,
            sums,
            *(beam, max(beam, ranked), width),
        )
        tail = rows[num_nodes:, : codes.shape[1]].double() @ torch.from_numpy(codes).double().T
        tail -= 128 * torch.from_numpy(sums)
        levels = quantised.levels[0, quantised.scale_codes[0, num_nodes : len(key_of)].long()]
        tail_scores = tail.float() * levels[:, None]
        beyond = torch.arange(num_nodes, len(key_of))
        pools = []
        for query, count in enumerate(counts):
            walked = min(int(count), ranked)
            nodes = torch.cat([torch.from_numpy(found[query, :walked]), beyond])
            scores = torch.cat(
                [torch.from_numpy(found_scores[query, :walked]), tail_scores[:, query]]
            )
            best = scores.sort(descending=True, stable=True).indices[:ranked]
            pools.append(key_of[nodes[best]])
        return pools, int(read) + len(beyond)

    def _rank(
        self, head: int, query: Tensor, found: Tensor, top_k: int, beta: float | None
    ) -> tuple[Tensor, Tensor]:
        found = found.sort().values
        exact = self._keys[head, found].float() @ query
        order = exact.sort(descending=True, stable=True).indices[:top_k]
        found, exact = found[order], exact[order]
        if beta is not None and len(exact):
            near = exact >= exact[0] - beta
            found, exact = found[near], exact[near]
        return found, exact


def _quantise_queries(queries: Tensor, channel: Tensor) -> tuple[NDArray[np.int8], _Ints]:
    """Signed codes [M, D] and their sums; the scale does not change an order."""
    values = queries * channel
    scale = values.abs().amax(1, keepdim=True) / _LARGEST_CODE
    tiny = torch.finfo(torch.float32).tiny
    inverse = torch.where(scale >= tiny, 1.0 / scale, torch.zeros(()))
    rounded = (values * inverse).nan_to_num(-_LARGEST_CODE).round()
    codes = rounded.clamp(-_LARGEST_CODE, _LARGEST_CODE).to(torch.int8)
    return codes.numpy(), codes.sum(1, dtype=torch.int64).numpy()


@_compiled
def _traverse(  # type: ignore[no-untyped-def]
    neighbours, starts, rows, scale_codes, levels, codes, sums, beam, size, width
):
    """Pools of rows and scores [M, size], best first, how many each holds, and the rows read."""
    num_nodes, num_queries = len(neighbours), len(codes)
    ids = np.full((num_queries, size), -1, np.int64)
    scores = np.full((num_queries, size), -np.inf, np.float32)
    counts = np.zeros(num_queries, np.int64)
    cursors = np.zeros(num_queries, np.int64)  # no entry before it can be expanded
    is_visited = np.zeros(num_nodes, np.bool_)
    is_expanded = np.zeros(num_nodes, np.bool_)
    fresh = [np.int64(0) for _ in range(0)]
    for node in starts:
        if node >= 0 and not is_visited[node]:
            is_visited[node] = True
            fresh.append(np.int64(node))
    read = 0
    while True:
        read += len(fresh)
        for query in range(num_queries):
            for row in fresh:
                score = _score(rows[row], codes[query], sums[query], levels[scale_codes[row]])
                _insert(row, score, ids[query], scores[query], counts, cursors, query)
        chosen = [np.int64(0) for _ in range(0)]
        for query in range(num_queries):
            wanted = width
            while wanted > 0 and cursors[query] < min(beam, counts[query]):
                node = ids[query, cursors[query]]
                cursors[query] += 1
                if not is_expanded[node]:
                    is_expanded[node] = True
                    chosen.append(np.int64(node))
                    wanted -= 1
        if len(chosen) == 0:
            return ids, scores, counts, read
        fresh = [np.int64(0) for _ in range(0)]
        for expanded in chosen:
            for node in neighbours[expanded]:
                if node >= 0 and not is_visited[node]:
                    is_visited[node] = True
                    fresh.append(np.int64(node))


@_compiled
def _score(row, codes, code_sum, level):  # type: ignore[no-untyped-def]
    product = np.int64(0)
    for i in range(len(codes)):
        product += np.int64(row[i]) * np.int64(codes[i])
    return np.float32(np.float32(product - 128 * code_sum) * level)


@_compiled
def _insert(key, score, ids, scores, counts, cursors, query):  # type: ignore[no-untyped-def]
    """Puts a key into its place in a pool; the worst one falls out of a full pool."""
    place = counts[query]
    while place > 0 and (
        scores[place - 1] < score or (scores[place - 1] == score and ids[place - 1] > key)
    ):
        place -= 1
    if place == len(ids) or np.isnan(score):
        return
    last = min(counts[query], len(ids) - 1)
    ids[place + 1 : last + 1] = ids[place:last].copy()
    scores[place + 1 : last + 1] = scores[place:last].copy()
    ids[place], scores[place] = key, score
    counts[query] = min(counts[query] + 1, len(ids))
    cursors[query] = min(cursors[query], place)
