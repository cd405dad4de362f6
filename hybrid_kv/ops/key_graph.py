"""Graph over one head's keys: its parts and the layout of its lists, for engine and oracle.

The graph follows RoarGraph (Chen et al., VLDB 2024) in learning from queries, and HNSW's heuristic
(Malkov & Yashunin, 2018) in pruning; neighbours are chosen by co-visit: the keys that the same
queries retrieve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.native.rows import row_bytes

MAX_DEGREE = 256
MAX_BEAM = 2**20
POINT_DIMS = 32
POINT_LIMIT = 4095
_METRIC_QUERIES = 16384
_ROWS_AT_ONCE = 16384
_MEDIAN_ROWS = 4096
_OUTLIER = 16.0


@dataclass(frozen=True, slots=True)
class BuildParams:
    """Parameters of building a graph.

    max_degree: longest list of neighbours.
    cap: queries that the candidates of a key are taken from.
    candidates: the heaviest of them are considered as neighbours.
    alpha: on squared distances; how much nearer an accepted neighbour must be to stand for one.
    num_entries: keys where a search starts, the most popular ones.
    metric_dims: directions of the metric that is pruned in, at most 32.
    """

    max_degree: int = 64
    cap: int = 32
    candidates: int = 512
    alpha: float = 1.2
    num_entries: int = 16
    metric_dims: int = 32
    seed: int = 0


@dataclass(frozen=True, slots=True)
class KeyGraph:
    """A graph over the first `num_keys` keys of one head; its arrays lie on the CPU.

    Only keys that some query retrieved are nodes, numbered in the order of the keys; the others
    cannot be found, and take no memory.

    keys_of: [num_nodes] int32, the key of each node, ascending.
    lists: [num_nodes, list_bytes] uint8, each node's neighbours; see `graph_lists`.
    entries: [E] int32, nodes where a search starts.
    degree: longest list of neighbours.
    """

    keys_of: Tensor
    lists: Tensor
    entries: Tensor
    num_keys: int
    degree: int

    def __len__(self) -> int:
        return self.num_keys

    @property
    def nbytes(self) -> int:
        """Bytes that the graph takes."""
        return sum(t.nbytes for t in (self.keys_of, self.lists, self.entries))

    def rows(self, num_keys: int) -> Tensor:
        """[n] int64, the keys that a search reads: the nodes, then all from len(self) on."""
        return torch.cat([self.keys_of.long(), torch.arange(self.num_keys, num_keys)])


def no_graph(degree: int = 64) -> KeyGraph:
    """A graph of no keys: all of them are scored."""
    none = torch.empty(0, dtype=torch.int32)
    lists = torch.empty(0, list_bytes(degree, 0), dtype=torch.uint8)
    return KeyGraph(none, lists, none, 0, degree)


class Searched(NamedTuple):
    """Result of a search, and its cost.

    ids: [Hkv, M, K] int64, best first, -1 where fewer were found.
    scores: [Hkv, M, K] float32 exact dot products, -inf where ids is -1.
    rows_visited: distinct quantised keys that were read, all heads together; a head with more than
        16 queries reads them once per 16.
    dots: dot products, those with quantised keys and the exact ones.
    """

    ids: Tensor
    scores: Tensor
    rows_visited: int
    dots: int


def one_of_each(name: str, value: int | Sequence[int], num_heads: int) -> list[int]:
    """A number of a search per head, its beam or its walks, from one for all or one for each.

    Raises:
        ConfigError: there are more or fewer than heads, or one is out of range.
    """
    values = [value] * num_heads if isinstance(value, int) else list(value)
    if len(values) != num_heads:
        raise ConfigError(
            f"{name} must be one number or one per head, {num_heads}, got {len(values)}"
        )
    for one in values:
        if not 1 <= one <= MAX_BEAM:
            raise ConfigError(f"{name} must be 1..{MAX_BEAM}, got {one}")
    return values


def num_ranked(top_k: int) -> int:
    """Keys that are ranked exactly for so many results, unless a caller says how many.

    8 bits put few of the best keys further down than that, but near the end they swap many.
    """
    return top_k + max(32, top_k // 2)


# Layout of a graph's neighbours in memory and in files --------------------------------------------
#
# A list has a slot for each of `degree` neighbours, rounded up to 16. First come the low 16 bits of
# all slots, little-endian, then one plane for every higher bit that node numbers need: bit i of
# plane p, counted from the lowest bit of its first byte, is bit 16 + p of slot i. Slots without a
# neighbour name the node itself, which a search has always visited by then. A list is filled with
# zeros to whole cache lines where that adds at most an eighth, else to a multiple of 8 bytes. This
# is the oracle of the engine's `native/src/graph_lists.h`.

_SLOTS = 16
_LOW_BITS = 16


def num_slots(degree: int) -> int:
    """Places for neighbours in a packed list."""
    return -(-degree // _SLOTS) * _SLOTS


def num_planes(num_nodes: int) -> int:
    """Bits of a node's number beyond the first 16."""
    return max(0, (num_nodes - 1).bit_length() - _LOW_BITS)


def list_bytes(degree: int, num_nodes: int) -> int:
    """Bytes of a packed list."""
    used = num_slots(degree) * (16 + num_planes(num_nodes)) // 8
    lines, words = -(-used // 64) * 64, -(-used // 8) * 8
    return lines if 8 * lines <= 9 * used else words


def node_bytes(degree: int, num_nodes: int, head_dim: int) -> int:
    """Bytes of a node with its list, its key in 8 bits and the number of that key."""
    return list_bytes(degree, num_nodes) + row_bytes(head_dim) + 4


def pack_lists(neighbours: Tensor) -> Tensor:
    """[num_nodes, list_bytes] uint8 of neighbours [num_nodes, degree] int32, -1 for none."""
    nodes, degree = neighbours.shape
    slots = np.tile(np.arange(nodes, dtype=np.int32)[:, None], num_slots(degree))
    given = neighbours.numpy()
    slots[:, :degree] = np.where(given < 0, slots[:, :degree], given)
    packed = np.zeros((nodes, list_bytes(degree, nodes)), np.uint8)
    at = 2 * slots.shape[1]
    packed[:, :at] = slots.astype("<u2").view(np.uint8)
    for plane in range(num_planes(nodes)):
        bits = np.packbits(slots >> (_LOW_BITS + plane) & 1, axis=1, bitorder="little")
        packed[:, at : at + bits.shape[1]] = bits
        at += bits.shape[1]
    return torch.from_numpy(packed)


def unpack_lists(lists: Tensor, degree: int) -> Tensor:
    """[num_nodes, degree] int32 of what `pack_lists` gives; -1 for none, wherever it stood."""
    nodes, at = len(lists), 2 * num_slots(degree)
    packed = lists.numpy()
    found = np.ascontiguousarray(packed[:, :at]).view("<u2").astype(np.int32)
    for plane in range(num_planes(nodes)):
        bits = packed[:, at : at + found.shape[1] // 8]
        found |= np.unpackbits(bits, axis=1, bitorder="little").astype(np.int32) << (
            _LOW_BITS + plane
        )
        at += found.shape[1] // 8
    found = found[:, :degree]
    return torch.from_numpy(np.where(found == np.arange(nodes)[:, None], np.int32(-1), found))


# Checks -------------------------------------------------------------------------------------------


def check_params(params: BuildParams) -> None:
    """Checks the ranges.

    Raises:
        ConfigError: one of them is out of range.
    """
    ranges = {
        "max_degree": (1, MAX_DEGREE),
        "cap": (2, 254),
        "candidates": (1, 2**24 - 1),
        "num_entries": (1, 2**20),
        "metric_dims": (1, POINT_DIMS),
        "seed": (0, 2**63 - 1),
    }
    for name, (low, high) in ranges.items():
        value = getattr(params, name)
        if not low <= value <= high:
            raise ConfigError(f"{name} must be {low}..{high}, got {value}")
    if not params.alpha > 0:
        raise ConfigError(f"alpha must be above 0, got {params.alpha}")


def check_lists(lists: Tensor, keys: Tensor, extra: Tensor | None = None) -> None:
    """Checks ids [Q, K] and extra [N, x] against keys [N, D].

    Raises:
        ShapeError: they have other shapes or types than a build takes.
    """
    if keys.dim() != 2:
        raise ShapeError(f"keys must be [N, D], got {list(keys.shape)}; pass one head at a time")
    for name, ids in (("lists", lists), ("extra", extra)):
        if ids is not None and (ids.dim() != 2 or ids.dtype != torch.int32):
            raise ShapeError(
                f"{name} must be 2-dimensional int32, got {list(ids.shape)} {ids.dtype}; "
                "convert with .to(torch.int32)"
            )
    if extra is not None and len(extra) != len(keys):
        raise ShapeError(f"extra must have {len(keys)} rows, one per key, got {len(extra)}")


def check_graph(graph: KeyGraph, unpack: Callable[[Tensor, int], Tensor] = unpack_lists) -> None:
    """Checks that a graph can be searched, wherever it comes from.

    Args:
        unpack: `unpack_lists`, or the engine's, which is faster.

    Raises:
        ShapeError: an array has another shape or type.
        ConfigError: it names a key or a node that does not exist.
    """
    if not 1 <= graph.degree <= MAX_DEGREE:
        raise ConfigError(f"degree of a graph must be 1..{MAX_DEGREE}, got {graph.degree}")
    nodes = len(graph.keys_of)
    wanted = {
        "keys_of": (graph.keys_of, torch.int32, [nodes]),
        "lists": (graph.lists, torch.uint8, [nodes, list_bytes(graph.degree, nodes)]),
        "entries": (graph.entries, torch.int32, [graph.entries.numel()]),
    }
    for name, (array, dtype, shape) in wanted.items():
        if list(array.shape) != shape or array.dtype != dtype or not array.is_contiguous():
            raise ShapeError(
                f"{name} of a graph must be contiguous {shape} {dtype}, got {list(array.shape)} "
                f"{array.dtype}"
            )
    neighbours = unpack(graph.lists, num_slots(graph.degree))  # a search reads all slots
    limits = (("keys_of", graph.keys_of, 0, graph.num_keys), ("lists", neighbours, -1, nodes))
    for name, array, low, limit in (*limits, ("entries", graph.entries, -1, nodes)):
        if array.numel() and not (int(array.min()) >= low and int(array.max()) < limit):
            raise ConfigError(f"{name} of a graph must be {low}..{limit - 1}; the graph is damaged")
    if nodes > 1 and not bool((graph.keys_of.diff() > 0).all()):
        raise ConfigError("keys_of of a graph must be ascending; the graph is damaged")


def query_points(keys: Tensor, rows: Tensor, queries: Tensor, metric_dims: int) -> Tensor:
    """Keys as the queries see them: [len(rows), 32] int16, magnitudes up to 4095.

    The squared distance of two points is proportional to the mean over queries of the squared
    difference of the two keys' scores, up to the query directions that are left out. Integers, so
    that every implementation builds the same graph; double precision before, so that the number
    of threads does not show.

    Args:
        keys: [N, D], any float type.
        rows: [n] int64, the keys that are wanted.
        queries: [..., D]; their second moment is the metric. Without any, plain distance.

    Raises:
        ShapeError: queries and keys differ in D.
    """
    if queries.shape[-1] != keys.shape[-1]:
        raise ShapeError(
            f"queries must have the keys' {keys.shape[-1]} channels, got {queries.shape[-1]}"
        )
    directions = _leading_directions(queries.reshape(-1, keys.shape[-1]), metric_dims)
    points = torch.zeros(len(rows), POINT_DIMS, dtype=torch.float64)
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = slice(first, first + _ROWS_AT_ONCE)
        points[some, : directions.shape[1]] = keys[rows[some]].double() @ directions
    return _rounded(points) if len(rows) else points.to(torch.int16)


def _rounded(points: Tensor) -> Tensor:
    """Points in integers; a few extreme keys must not take the resolution away from all others."""
    sample = points[:: -(-len(points) // _MEDIAN_ROWS)]
    points -= sample.median(0).values
    usual = sample.abs().amax(1).median().item()  # the sample is a view
    largest = points.abs().max().item()
    limit = min(largest, _OUTLIER * usual) if usual > 0.0 else max(largest, 1.0)
    points *= POINT_LIMIT / limit
    return points.round_().clamp_(-POINT_LIMIT, POINT_LIMIT).to(torch.int16)


def _leading_directions(queries: Tensor, count: int) -> Tensor:
    """[D, count] float64, eigenvectors of the second moment times root eigenvalues."""
    dim = queries.shape[1]
    step = max(1, -(-len(queries) // _METRIC_QUERIES))
    sample = queries[::step].double()
    moment = sample.T @ sample / len(sample) if len(sample) else torch.eye(dim).double()
    values, vectors = torch.linalg.eigh(moment)
    leading = slice(max(0, dim - count), dim)
    directions: Tensor = vectors[:, leading] * values[leading].clamp_min(0.0).sqrt()
    return directions
