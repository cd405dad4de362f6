"""Building of one KV head's graph: lists from sampled queries, projection, self-check."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from hybrid_kv.index._trial import (
    Goal,
    HeadReport,
    HeldOut,
    Trial,
    choose,
    effective_dim,
    hold_out,
    log_sums,
    num_like_later,
    run_trials,
)
from hybrid_kv.ops.key_graph import BuildParams, KeyGraph


class Found(Protocol):
    """Result of a search."""

    @property
    def ids(self) -> Tensor:
        """[1, G, K] int64, -1 for none."""
        ...

    @property
    def scores(self) -> Tensor:
        """[1, G, K] float32, -inf for none."""
        ...

    @property
    def rows_visited(self) -> int:
        """Distinct keys that were read."""
        ...


class Searcher(Protocol):
    """Searches the graph of one head."""

    def search(self, queries: Tensor, top_k: int, *, beam: int, walks: int) -> Found:
        """The best keys of queries [1, G, D], which so many walks share."""
        ...


class LearningEngine(Protocol):
    """The arithmetic of learning one head, over its keys; queries [Q, D]."""

    def nearest(self, queries: Tensor, count: int) -> Tensor:
        """The exact best keys of each query, [Q, count] int32, best first."""
        ...

    def lists(self, queries: Tensor, count: int) -> Tensor:
        """As `nearest`, but nearly: what a graph is made from need not be exact."""
        ...

    def project(self, lists: Tensor, queries: Tensor, params: BuildParams) -> KeyGraph:
        """The graph of what queries retrieved: lists [Q, K] int32."""
        ...

    def searcher(self, graph: KeyGraph) -> Searcher:
        """Searches that graph."""
        ...


BEAMS = (24, 1024)
"""The smallest and the largest that the self-check tries."""
DRIFT = 0.015
"""Recall that is lost between the prompt, where heads are checked, and the text that follows."""
_WIDER = (1.25, 2.0)
"""Of the beams that are tried where walks share a head's queries, over that of one walk."""
_METRIC_QUERIES = 16384


def learn(
    keys: Tensor,
    samples: Tensor,
    params: BuildParams,
    list_length: int,
    goal: Goal,
    engine: LearningEngine,
    nearest: Tensor | None = None,
    walks: int = 1,
) -> tuple[KeyGraph | None, HeadReport]:
    """The graph of one KV head, or None where it does not reach the goal.

    Args:
        keys: [N, D].
        samples: [G, M, D] prefill queries of the group's heads at M positions.
        engine: over the same keys.
        nearest: [G, M, K] int32, the exact best keys of all samples where they are known.
        walks: how many shall share the queries of a search, if they find as much.
    """
    among = num_like_later(samples.shape[1], goal.recent, keys.shape[0])
    build, check = hold_out(samples, goal.positions, among)
    if check.shape[1] == 0:
        return None, HeadReport("flat", f"{samples.shape[1]} sampled positions are too few")
    queries = build.flatten(0, 1)
    begin = perf_counter()
    known_build, known_check = (None, None)
    if nearest is not None:
        known_build, known_check = hold_out(nearest, goal.positions, among)
    lists = _nearest(engine.lists, queries, min(list_length, keys.shape[0]), known_build)
    listed = perf_counter()
    graph = engine.project(lists, queries, params)
    projected = perf_counter()
    held = _exact_answers(keys, check, goal.top_k, engine, known_check)
    searcher = engine.searcher(graph)
    trials = run_trials(held, beam_search(searcher, held.ids.shape[-1], len(keys)), goal)
    trial, reason = choose(trials, goal)
    if trial is not None and walks > 1:
        shared = _shared(trial, held, searcher, len(keys), goal, walks)
        trials += shared
        trial = next((one for one in reversed(shared) if goal.is_reached(one)), trial)
    sample = queries[:: max(1, len(queries) // _METRIC_QUERIES)].float()
    report = HeadReport(
        serves="flat" if trial is None else "graph",
        reason=reason,
        **({} if trial is None else promised(trial)),
        trials=tuple(trials),
        top_mass=held.top_mass,
        effective_dim=effective_dim(keys, sample.T @ sample / len(sample)),
        lists_s=listed - begin,
        project_s=projected - listed,
    )
    return (None if trial is None else graph), report


def _shared(
    alone: Trial, held: HeldOut, searcher: Searcher, num_keys: int, goal: Goal, walks: int
) -> list[Trial]:
    """Trials of walks that share the queries of a head which one walk serves as `alone` says.

    Each sees fewer keys, so they need wider beams, and how much wider depends on the head. Threads
    would idle otherwise, so that keys are not counted.
    """
    narrowest, widest = (min(BEAMS[1], int(factor * alone.beam)) for factor in _WIDER)
    beams = (narrowest, max(narrowest, widest))
    search = beam_search(searcher, held.ids.shape[-1], num_keys, walks)
    trials = run_trials(held, search, replace(goal, beams=beams, max_scanned=math.inf))
    return [replace(one, walks=walks) for one in trials]


def promised(trial: Trial) -> dict[str, Any]:
    """Fields of a report from the trial that decides how a head is served."""
    return {name: getattr(trial, name) for name in ("beam", "walks", "recall", "mass")}


def beam_search(
    searcher: Searcher, top_k: int, num_keys: int, walks: int = 1
) -> Callable[[Tensor, int], tuple[Tensor, Tensor, float]]:
    """Search for `run_trials`: positions [P, G, D] one by one, as decoding does."""

    def search(asked: Tensor, beam: int) -> tuple[Tensor, Tensor, float]:
        found = [searcher.search(group[None], top_k, beam=beam, walks=walks) for group in asked]
        rows = sum(result.rows_visited for result in found)
        return (
            torch.cat([result.ids for result in found]),
            torch.cat([result.scores for result in found]),
            rows / (len(found) * num_keys),
        )

    return search


def _nearest(
    find: Callable[[Tensor, int], Tensor], queries: Tensor, count: int, known: Tensor | None
) -> Tensor:
    """The exact best keys [Q, count] of queries [Q, D]; known: [..., K] the same queries'."""
    if known is None or known.shape[-1] < count:
        return find(queries, count)
    return known.reshape(-1, known.shape[-1])[:, :count].contiguous()


def _exact_answers(
    keys: Tensor, check: Tensor, top_k: int, engine: LearningEngine, known: Tensor | None
) -> HeldOut:
    """Exact answers of the held-out queries [G, P, D]; known: [G, P, K], their best keys."""
    by_position = check.transpose(0, 1).float().contiguous()  # [P, G, D]
    flat = by_position.flatten(0, 1)
    known = None if known is None else known.transpose(0, 1)
    ids = _nearest(engine.nearest, flat, min(top_k, keys.shape[0]), known).long()
    scores = torch.einsum("qkd,qd->qk", keys[ids].float(), flat)
    scale = keys.shape[1] ** -0.5  # of nearly all models; the check compares shares
    total = log_sums(flat, keys, scores, scale)
    shape = by_position.shape[:2]
    return HeldOut(
        by_position,
        ids.unflatten(0, shape),
        scores.unflatten(0, shape),
        total.unflatten(0, shape),
        scale,
    )
