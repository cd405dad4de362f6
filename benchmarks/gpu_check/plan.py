"""What is measured, in the order of importance: what does not fit into the time comes last."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from benchmarks.gpu_check.jobs import Job

MODELS = {"full": "random:llama-3-8b", "tiny": "random:tiny"}
"""By sizes, the model that is run."""

SHARES_S = {
    "right": 80.0,
    "constants": 120.0,
    "steps": 420.0,
    "prompt": 180.0,
    "beside": 180.0,
    "tests": 150.0,
}
"""The parts of a check of 20 minutes, and the seconds that each may take at most: values, what
single things cost, decode steps, one real prompt, what stands beside it, the tests marked gpu."""

PARTS = tuple(SHARES_S)
MORE_PARTS = ("micro", "long", "128k", "32k", "64k")
"""Only when they are named: small measurements, an answer of 8K tokens, end to end at a length."""

FAULTS = "faults"
"""A part of tiny sizes only: jobs that crash and hang on purpose."""

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


_THREADS = 4
"""Of the engine, beside its own choice; a step's search on the host is timed with both."""
_BESIDE = ("static", "offloaded")


def jobs(
    parts: Collection[str],
    *,
    device: str,
    sizes: str,
    cap_bytes: int | None,
    systems: Sequence[str] = SYSTEMS,
) -> list[Job]:
    """Everything that belongs to the parts, most important first."""
    shared: dict[str, Any] = {"device": device, "sizes": sizes}
    found = [job for job in _main_jobs(shared, cap_bytes) if job.part in parts]
    if "micro" in parts:
        found += [
            Job("micro", name, kind, {**shared, **settings}, limit_s=limit)
            for name, kind, settings, limit in _MICRO
        ]
        found += _host_jobs(shared)
    if "long" in parts:
        long = {**shared, "cases": ["a long answer"], "contexts": ["128k"]}
        found.append(Job("long", "a long answer", "steps", long, limit_s=560, least_s=200))
    found += [
        _end_to_end(context, system, context, shared, cap_bytes)
        for context, group in _ORDER
        for system in group
        if context in parts and system in systems
    ]
    if FAULTS in parts and sizes == "tiny":
        found += [
            Job(FAULTS, "deliberate crash", "fault", {**shared, "fault": "crash"}),
            Job(FAULTS, "deliberate hang", "fault", {**shared, "fault": "hang"}, limit_s=15),
        ]
    return found


def _main_jobs(shared: dict[str, Any], cap_bytes: int | None) -> list[Job]:
    """Those of the parts that are run unless others are named."""
    fewer = {"cases": ["select on the host"], "contexts": ["128k"], "threads": _THREADS}
    threads = {"HYBRID_KV_THREADS": str(_THREADS)}
    return [
        Job("right", "facts", "facts", shared, limit_s=30),
        Job("right", "kernels", "kernels", shared, limit_s=60),
        Job("right", "values", "right", shared, limit_s=80),
        Job("constants", "constants", "constants", shared, limit_s=120),
        Job("steps", "steps", "steps", shared, limit_s=330, least_s=40),
        Job(
            *("steps", f"steps, {_THREADS} threads", "steps", {**shared, **fewer}),
            limit_s=90,
            least_s=40,
            environment=threads,
        ),
        Job("prompt", "prompt", "prompt", shared, limit_s=180, least_s=40),
        *(_end_to_end("beside", one, "128k", shared, cap_bytes) for one in _BESIDE),
        Job("tests", "tests", "tests", shared, limit_s=540),
    ]


def _host_jobs(shared: dict[str, Any]) -> list[Job]:
    return [
        Job(
            *("micro", f"host gather, {threads}", "host_gather", {**shared, "threads": threads}),
            limit_s=60,
            environment=environment,
        )
        for threads, environment in (("all cores", {}), ("one core", {"HYBRID_KV_THREADS": "1"}))
    ]


def _end_to_end(
    part: str, system: str, context: str, shared: dict[str, Any], cap_bytes: int | None
) -> Job:
    cap = None if system in UNCAPPED else cap_bytes
    settings = {**shared, "system": system, "context": context, "cap_bytes": cap}
    return Job(
        *(part, f"{system}, {context}", "end_to_end", settings),
        limit_s=_LIMIT_S[context],
        least_s=_LEAST_S[context],
    )
