"""A graph by RoarGraph's rule, for comparison: our reimplementation from the paper, not its code.

Every query links its best key, the pivot, to the other keys that it retrieves, pruned by occlusion
in the inner product; then every key looks for itself in that graph and is linked to what it finds,
so that little is out of reach (Chen et al., VLDB 2024). The queries of one pivot share its list.
Queries, exact lists and search are those of our own graph, so the rows differ in the rule alone.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numba
import numpy as np
import torch

from benchmarks.cold_search.engines import Own
from benchmarks.cold_search.heads import Prompt
from hybrid_kv.index import _graph_learner as graph_learner
from hybrid_kv.ops.key_graph import KeyGraph, pack_lists

DEGREE = 64
"""Half for what queries say, half for what keys find; the length of our own graph's lists."""
FOUND = 100
"""Keys that a key finds when it looks for itself."""
CANDIDATES = 512
ENTRIES = 16
_TOGETHER = 16
"""Keys that look for themselves in one call."""


class PivotGraph(Own):
    """The rule in place of ours; everything else is our graph index."""

    def __init__(self, **params: Any) -> None:
        super().__init__("graph", **params)

    def build(self, keys: torch.Tensor, prompt: Prompt) -> None:
        link(np.array([[1], [0]], np.int32), np.eye(2, dtype=np.float32), 2)  # compiles, not timed
        with patch.object(graph_learner._HeadEngine, "project", project):
            super().build(keys, prompt)


def project(engine: Any, lists: torch.Tensor, _queries: object, _params: object) -> KeyGraph:
    """The graph from what queries retrieve: lists [Q, K] int32, best first."""
    keys = engine._scan.keys[0].float()
    rows = keys.numpy()
    pivots = lists[:, 0].numpy()
    first = link(by_pivot(lists.numpy(), len(rows)), rows, DEGREE // 2)
    popular = np.bincount(pivots, minlength=len(rows)).argsort()[::-1][:ENTRIES]
    searcher = engine.searcher(as_graph(first, popular))
    found = [
        searcher.search(part[None], FOUND, beam=FOUND).ids[0] for part in keys.split(_TOGETHER)
    ]
    second = link(torch.cat(found).to(torch.int32).numpy(), rows, DEGREE // 2)
    return as_graph(np.concatenate([first, second], 1), popular)


def by_pivot(lists: np.ndarray, num_keys: int) -> np.ndarray:
    """[num_keys, CANDIDATES] what the queries of each pivot retrieve most often, -1 for none."""
    candidates = np.full((num_keys, CANDIDATES), -1, np.int32)
    order = lists[:, 0].argsort(kind="stable")
    starts = np.flatnonzero(np.diff(lists[order, 0], prepend=-1))
    for some in np.split(order, starts[1:]):
        others, times = np.unique(lists[some, 1:], return_counts=True)
        others = others[times.argsort()[::-1][:CANDIDATES]]
        candidates[lists[some[0], 0], : len(others)] = others
    return candidates


def as_graph(neighbours: np.ndarray, entries: np.ndarray) -> KeyGraph:
    """A graph in which every key is a node."""
    count, degree = neighbours.shape
    numbers = torch.arange(count, dtype=torch.int32)
    lists = pack_lists(torch.from_numpy(neighbours))
    return KeyGraph(numbers, lists, torch.from_numpy(entries.astype(np.int32)), count, degree)


@numba.njit(fastmath=True)
def dot(one: np.ndarray, other: np.ndarray) -> float:
    total = np.float32(0)
    for channel in range(len(one)):
        total += one[channel] * other[channel]
    return total


@numba.njit
def covered(
    place: int, given: np.ndarray, scores: np.ndarray, taken: list[int], keys: np.ndarray
) -> bool:
    """Whether a neighbour that was taken scores a candidate higher than the key itself does."""
    for one in taken:  # noqa: SIM110 (the compiler knows no generators)
        if dot(keys[given[one]], keys[given[place]]) > scores[place]:
            return True
    return False


@numba.njit
def link(candidates: np.ndarray, keys: np.ndarray, degree: int) -> np.ndarray:
    """[N, degree] neighbours from distinct candidates [N, C], -1 for none; places that pruning
    leaves are filled with what was pruned, then with links back.
    """
    count = len(keys)
    neighbours = np.full((count, degree), -1, np.int32)
    used = np.zeros(count, np.int64)
    for key in range(len(candidates)):
        given = candidates[key][(candidates[key] >= 0) & (candidates[key] != key)]
        scores = np.array([dot(keys[key], keys[other]) for other in given], np.float32)
        taken, rest = [-1 for _ in range(0)], [-1 for _ in range(0)]  # typed for the compiler
        for place in np.argsort(-scores):
            (rest if covered(place, given, scores, taken, keys) else taken).append(place)
            if len(taken) == degree:
                break
        for place in (taken + rest)[:degree]:
            neighbours[key, used[key]] = given[place]
            used[key] += 1
    for key, forward in enumerate(used.copy()):
        for other in neighbours[key, :forward]:
            if used[other] < degree and not (neighbours[other, : used[other]] == key).any():
                neighbours[other, used[other]] = key
                used[other] += 1
    return neighbours
