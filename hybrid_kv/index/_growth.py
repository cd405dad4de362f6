"""Growth of a graph: later keys are linked through the searches that have found them.

Until then every search scores them one and all, so the searches of decoding know exactly which new
keys their queries want. RetrievalAttention (section 3.2) inserts nothing; linking by co-visit from
what decoding retrieves is ours.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.index._graph_learner import (
    BEAMS,
    DRIFT,
    Goal,
    Searcher,
    beam_search,
    choose,
    promised,
    run_trials,
)
from hybrid_kv.index._trial import HeadReport, HeldOut, Trial
from hybrid_kv.ops.key_graph import BuildParams
from hybrid_kv.ops.native.graph import GraphSearcher, extend
from hybrid_kv.ops.native.library import pool_here
from hybrid_kv.ops.native.scans import FlatScan

_CHECKED = 16
"""Positions that are held out of the links, to check them."""
_SPARED = 0.01
"""Recall above the goal that may be given for less work."""
_WIDEST = 1.6
"""Of the beams that are tried for a longer graph, over the head's: more take too long."""


class RecentSearches:
    """The last positions that were searched for, with what was found; bounded, and safe to share.

    Args:
        positions: how many are kept.
        list_length: the best keys that are kept of each search.
    """

    def __init__(self, positions: int, list_length: int) -> None:
        self._positions, self._list_length = positions, list_length
        self._lock = threading.Lock()
        self._count = 0
        self._queries = torch.empty(0)
        self._lists = torch.empty(0, dtype=torch.int32)

    def __len__(self) -> int:
        return min(self._count, self._positions)

    @property
    def memory_bytes(self) -> int:
        return self._queries.nbytes + self._lists.nbytes

    def record(self, queries: Tensor, ids: Tensor) -> None:
        """Takes one position: queries [Hkv, G, D], ids [Hkv, G, K], best first, -1 for none."""
        kept = ids[..., : self._list_length]
        with self._lock:
            if not self._queries.numel():
                size = (self._positions, *queries.shape[:2])
                self._queries = torch.empty(*size, queries.shape[2], dtype=torch.bfloat16)
                self._lists = torch.empty(*size, self._list_length, dtype=torch.int32)
            slot = self._count % self._positions
            self._queries[slot] = queries
            self._lists[slot, ..., kept.shape[-1] :] = -1
            self._lists[slot, ..., : kept.shape[-1]] = kept
            self._count += 1

    def of_head(self, head: int) -> tuple[Tensor, Tensor]:
        """Queries [P, G, D] bfloat16 and lists [P, G, K] int32 of one KV head."""
        with self._lock:
            count = len(self)
            return self._queries[:count, head].clone(), self._lists[:count, head].clone()


@dataclass(frozen=True, slots=True)
class Wanted:
    """Evidence of one head's recent searches for keys that are not linked yet.

    queries, lists: [Q, D], [Q, K], the searches that found such keys. held: [P, G, D] float32,
    positions that are kept apart.
    """

    queries: Tensor
    lists: Tensor
    held: Tensor


def wanted_keys(recent: RecentSearches, head: int, first: int, end: int) -> Wanted:
    """Evidence of a head's searches for the keys first .. end."""
    queries, lists = recent.of_head(head)
    held = torch.zeros(len(queries), dtype=torch.bool)
    held[torch.arange(_CHECKED) * len(queries) // _CHECKED] = True
    asked, found = queries[~held].flatten(0, 1), lists[~held].flatten(0, 1)
    found = found.masked_fill(found >= end, -1)
    new = (found >= first).any(-1)
    return Wanted(asked[new], found[new], queries[held].float())


class GraphGrowth:
    """Links later keys into the graphs of an index, from the searches that it is shown.

    Args:
        params: of the index.
        build: how graphs are built.
        num_keys: keys that each head's graph knows.
    """

    def __init__(self, params: Any, build: BuildParams, num_keys: Sequence[int]) -> None:
        self._params = params
        self._build = build
        self.recent = RecentSearches(self._params.link_positions, self._params.list_length)
        # The newest keys are left for later: few searches had a chance to find them.
        self._delay = int(self._params.link_positions) // 2
        self._due = [count + self._params.link_keys + self._delay for count in num_keys]

    def link_one(
        self, searcher: GraphSearcher, keys: Tensor, reports: Sequence[HeadReport]
    ) -> tuple[HeadReport, ...] | None:
        """Links the later keys of one head at most, so that no call takes long.

        Args:
            searcher: of all heads; it searches the longer graph afterwards.
            keys: [Hkv, N, D].

        Returns:
            The reports, one of them new; None where nothing was linked.
        """
        due = [
            head
            for head, graph in enumerate(searcher.graphs)
            if len(graph) and keys.shape[1] >= self._due[head]
        ]
        if not due or len(self.recent) < max(_CHECKED, self._delay):
            return None
        head = min(due, key=lambda head: self._due[head])
        linked, end = len(searcher.graphs[head]), keys.shape[1] - self._delay
        self._due[head] = keys.shape[1] + self._params.link_keys
        trial, reason = self._link(head, searcher, keys[head], end, reports[head])
        if trial is None:
            self._due[head] += end - linked  # a larger batch may do better
            return None
        reason = f"{reason}; {end - linked:,} later keys linked"
        served = promised(replace(trial, walks=reports[head].walks))
        new = replace(reports[head], reason=reason, **served)
        return (*reports[:head], new, *reports[head + 1 :])

    def _link(
        self, head: int, searcher: GraphSearcher, keys: Tensor, end: int, report: HeadReport
    ) -> tuple[Trial | None, str]:
        p, old, pool = self._params, searcher.graphs[head], pool_here()
        wanted = wanted_keys(self.recent, head, len(old), end)
        graph = extend(old, wanted.lists, keys[:end], wanted.queries, self._build, pool)
        before, after = searcher.of_head(head), searcher.of_head(head)
        after.relink(0, graph)
        goal = Goal(
            top_k=p.check_top_k,
            recall=min(1.0, p.target_recall + DRIFT),
            mass=p.target_mass,
            max_scanned=p.max_scanned,
            positions=len(wanted.held),
            beams=_wider_beams(report.beam) if p.beam == "auto" else (p.beam, p.beam),
        )
        held = _answers(keys, wanted.held, goal.top_k)
        trial, reason = judge(held, before, after, goal, len(keys), report.walks)
        if trial is not None:
            searcher.relink(head, graph)
        return trial, reason


def judge(
    held: HeldOut,
    before: Searcher,
    after: Searcher,
    goal: Goal,
    num_keys: int,
    walks: int = 1,
) -> tuple[Trial | None, str]:
    """The least work that serves the longer graph well enough, or None where the old one is better.

    Well enough is the goal, and nearly what is found with the new keys scored one and all. Where
    that has come to miss the goal, because text drifts away from the prompt, and no beam reaches
    it, the longer graph must find as much.

    Args:
        held: positions with their exact answers.
        before, after: of the old graph and of the longer one, over the same `num_keys`.
        walks: that share the queries of a search.
    """
    beam = goal.beams[0]
    search = beam_search(before, goal.top_k, num_keys, walks)
    scored_all = held.judge(beam, *search(held.queries, beam))
    enough = max(goal.recall, scored_all.recall - _SPARED)
    goal = replace(goal, recall=enough, mass=max(goal.mass, scored_all.mass))
    trials = run_trials(held, beam_search(after, goal.top_k, num_keys, walks), goal)
    for recall in (enough, scored_all.recall):
        chosen, reason = choose(trials, replace(goal, recall=recall))
        if chosen is not None:
            break
    return chosen, reason


def _wider_beams(beam: int) -> tuple[int, int]:
    """The beam that a head has, and the widest that may be tried."""
    return beam, max(beam, min(BEAMS[1], int(_WIDEST * beam)))


def _answers(keys: Tensor, queries: Tensor, top_k: int) -> HeldOut:
    """Exact answers of queries [P, G, D] among keys [N, D]."""
    flat = queries.flatten(0, 1)[None]
    best = FlatScan(keys[None]).search(flat, min(top_k, len(keys)), pool=pool_here())
    ids, scores = (part[0].unflatten(0, queries.shape[:2]) for part in (best.ids, best.scores))
    total = torch.zeros(queries.shape[:2])  # only shares of the exact answer are compared
    return HeldOut(queries, ids, scores, total, keys.shape[1] ** -0.5)
