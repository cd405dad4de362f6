"""What is measured, in the order of importance: what does not fit into the time comes last."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from benchmarks.gpu_check.jobs import Job

PARTS = ("tests", "first", "micro", "128k", "32k", "64k")
"""Tests; what a first run must show; small measurements; end to end at some number of tokens."""

FAULTS = "faults"
"""A part of rehearsals only: jobs that crash and hang on purpose."""

SHARES_S = {"tests": 130.0, "first": 150.0, "micro": 100.0}
"""What these may take at most when other parts follow."""

UNCAPPED = ("static", "static_transformers", "quest", "full")
"""Systems that keep everything on the GPU, and so run without the cap."""

CONTEXT_BYTES = int(0.6 * 2**30)
"""What CUDA's context and libraries take of a card beside the allocator: an estimate, subtracted
from the cap. Reports have the measured number.
"""

_LIMIT_S = {"128k": 150.0, "64k": 90.0, "32k": 60.0}
_LEAST_S = {"128k": 35.0, "64k": 25.0, "32k": 20.0}
_ORDER = (
    ("128k", ("hybrid", "static", "offloaded", "retrieval_attention")),
    ("32k", ("hybrid", "static")),
    ("128k", ("quest", "flat")),
    ("32k", ("offloaded", "retrieval_attention", "quest", "flat")),
    ("64k", ("hybrid", "static", "offloaded", "retrieval_attention", "quest", "flat")),
    ("128k", ("full", "static_transformers")),
    ("32k", ("full", "static_transformers")),
    ("64k", ("full", "static_transformers")),
)
SYSTEMS = tuple(dict.fromkeys(system for _, systems in _ORDER for system in systems))

_MICRO: tuple[tuple[str, str, dict[str, Any], float], ...] = (
    ("copies", "copies", {}, 40),
    ("page gather", "page_gather", {}, 60),
    ("decode attention", "decode_attention", {"by": ["sdpa", "triton", "reference"]}, 60),
    ("selection", "selection", {}, 40),
    ("device select", "device_select", {}, 90),
    ("prefill attention", "prefill_attention", {}, 60),
    ("nearest keys", "nearest_keys", {}, 40),
    ("decoder layer", "decoder_layer", {}, 40),
    ("memops", "memops", {}, 30),
    # FlashInfer compiles for minutes where its kernels were not brought along.
    ("decode attention of flashinfer", "decode_attention", {"by": ["flashinfer"]}, 60),
)


_THREADS = (1, 8, 16, 32)

_FIRST: tuple[tuple[str, str, dict[str, Any], float], ...] = (
    ("facts", "facts", {}, 30),
    ("kernels", "kernels", {}, 60),
    *(
        (look, "first_run", {"look": look}, 150)
        for look in (
            *("agreement", "integrity", "waits of a step", "launches of a step"),
            *("prefill by layer", "the plan", "times of steps", "a later turn", "graphs"),
        )
    ),
)


def jobs(
    parts: Collection[str],
    *,
    device: str,
    rehearse: bool,
    cap_bytes: int | None,
    systems: Sequence[str] = SYSTEMS,
) -> list[Job]:
    """Everything that belongs to the parts, most important first."""
    shared: dict[str, Any] = {"device": device, "rehearse": rehearse}
    found = []
    if "tests" in parts:
        found.append(Job("tests", "tests", "tests", shared, limit_s=540))
    if "first" in parts:
        found += _first_jobs(shared)
    if "micro" in parts:
        found += [
            Job("micro", name, kind, {**shared, **settings}, limit_s=limit)
            for name, kind, settings, limit in _MICRO
        ]
        found += _host_jobs(shared)
    found += [
        _end_to_end(system, context, shared, cap_bytes)
        for context, group in _ORDER
        for system in group
        if context in parts and system in systems
    ]
    if FAULTS in parts and rehearse:
        found += [
            Job(FAULTS, "deliberate crash", "fault", {**shared, "fault": "crash"}),
            Job(FAULTS, "deliberate hang", "fault", {**shared, "fault": "hang"}, limit_s=15),
        ]
    return found


def _first_jobs(shared: dict[str, Any]) -> list[Job]:
    """A model each; the answer of thousands of tokens comes last, as it takes minutes."""
    looks = [
        Job("first", name, kind, {**shared, **settings}, limit_s=limit)
        for name, kind, settings, limit in _FIRST
    ]
    steps = {**shared, "look": "times of steps"}
    looks += [
        Job(
            *("first", f"times of steps, {threads} threads", "first_run"),
            {**steps, "threads": threads},
            limit_s=150,
            environment={"HYBRID_KV_THREADS": str(threads)},
        )
        for threads in _THREADS
    ]
    long = {**shared, "look": "a long answer"}
    return [*looks, Job("first", "a long answer", "first_run", long, limit_s=560, least_s=200)]


def _host_jobs(shared: dict[str, Any]) -> list[Job]:
    return [
        Job(
            *("micro", f"host gather, {threads}", "host_gather", {**shared, "threads": threads}),
            limit_s=60,
            environment=environment,
        )
        for threads, environment in (("all cores", {}), ("one core", {"HYBRID_KV_THREADS": "1"}))
    ]


def _end_to_end(system: str, context: str, shared: dict[str, Any], cap_bytes: int | None) -> Job:
    cap = None if system in UNCAPPED else cap_bytes
    settings = {**shared, "system": system, "context": context, "cap_bytes": cap}
    return Job(
        *(context, f"{system}, {context}", "end_to_end", settings),
        limit_s=_LIMIT_S[context],
        least_s=_LEAST_S[context],
    )
