"""What the graph over one head's keys is made of, for the engine and for its portable twin.

The graph follows RoarGraph (Chen et al., VLDB 2024) in learning from queries, and HNSW's heuristic
(Malkov & Yashunin, 2018) in pruning; neighbours are chosen by co-visit: the keys that the same
queries retrieve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError

POINT_DIMS = 32
POINT_LIMIT = 4095
_METRIC_QUERIES = 16384
_ROWS_AT_ONCE = 16384
_MEDIAN_ROWS = 4096
_OUTLIER = 16.0


@dataclass(frozen=True, slots=True)
class BuildParams:
    """How a graph is built.

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
    """A graph over the first `len(list_of)` keys of one head; all int32 on the CPU.

    neighbours: [num_lists, max_degree] key numbers, each list padded with -1 at its end.
    list_of: [N] a key's row in `neighbours`, or -1: it has none and cannot be found.
    entries: [E] where a search starts.
    """

    neighbours: Tensor
    list_of: Tensor
    entries: Tensor

    def __len__(self) -> int:
        return self.list_of.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes that the graph takes."""
        return sum(t.nbytes for t in (self.neighbours, self.list_of, self.entries))


class Searched(NamedTuple):
    """What a search found, and what it cost.

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


def check_params(params: BuildParams) -> None:
    """Checks the ranges.

    Raises:
        ConfigError: one of them is out of range.
    """
    ranges = {
        "max_degree": (1, 256),
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


def check_graph(graph: KeyGraph) -> None:
    """Checks that a graph can be searched, wherever it comes from.

    Raises:
        ShapeError: an array has another shape or type.
        ConfigError: it names a key or a list that does not exist.
    """
    arrays = (("neighbours", graph.neighbours, 2), ("list_of", graph.list_of, 1))
    for name, array, dims in (*arrays, ("entries", graph.entries, 1)):
        if array.dim() != dims or array.dtype != torch.int32 or not array.is_contiguous():
            raise ShapeError(
                f"{name} of a graph must be contiguous int32 with {dims} dimensions, got "
                f"{list(array.shape)} {array.dtype}"
            )
    limits = (len(graph), len(graph.neighbours), len(graph))
    for (name, array, _), limit in zip(
        (*arrays, ("entries", graph.entries, 1)), limits, strict=True
    ):
        if array.numel() and not (int(array.min()) >= -1 and int(array.max()) < limit):
            raise ConfigError(f"{name} of a graph must be -1..{limit - 1}; the graph is damaged")


def check_extends(graph: KeyGraph, keys: Tensor, params: BuildParams) -> None:
    """Checks that a graph can be extended to keys [N, D].

    Raises:
        ShapeError: it is over more keys.
        ConfigError: params are for another degree.
    """
    check_graph(graph)
    if len(graph) > len(keys):
        raise ShapeError(f"a graph links {len(graph)} keys, but there are only {len(keys)}")
    if graph.neighbours.shape[1] != params.max_degree:
        raise ConfigError(
            f"max_degree must be the graph's {graph.neighbours.shape[1]}, got {params.max_degree}"
        )


def keys_of_lists(list_of: Tensor) -> Tensor:
    """[num_lists] int64, the key of each list."""
    keys = (list_of >= 0).nonzero()[:, 0]
    ordered = torch.empty_like(keys)
    ordered[list_of[keys].long()] = keys
    return ordered


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
