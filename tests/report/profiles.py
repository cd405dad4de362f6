"""Made-up profiles as the verb `profile` writes them, with all that can happen in a sweep."""

from __future__ import annotations

import random
from typing import Any

from hybrid_kv.report.profile import BytesPerToken, ProfileRow
from hybrid_kv.report.run import (
    AuditedHead,
    AuditReport,
    Cpu,
    Environment,
    EstimateReport,
    MachineGbps,
    MemoryBytes,
    Percentiles,
    PhasesMs,
    Run,
    WorkReport,
)
from hybrid_kv.report.schema import (
    ChatReport,
    DemoReport,
    LayerReport,
    LayerRun,
    ProfileReport,
    RunReport,
)

CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
METHODS = ("full", "flat", "ivf", "hnsw", "quest", "retrieval_attention", "hybrid")
HOSTILE = '<script src="https://evil.example/x.js">alert("&1")</script>'

_PHASES = {  # at 128K, ms: search, cold, resident, select
    "full": (0.0, 0.0, 262.0, 0.0),
    "flat": (131.0, 2.4, 1.9, 0.0),
    "ivf": (38.0, 2.3, 1.9, 0.0),
    "hnsw": (29.0, 2.6, 1.9, 0.0),
    "quest": (0.0, 0.0, 9.5, 14.0),
    "retrieval_attention": (9.5, 2.5, 1.9, 0.0),
    "hybrid": (6.1, 2.2, 3.8, 1.2),
}
_MISSED = {
    "flat": 0.021,
    "ivf": 0.034,
    "hnsw": 0.041,
    "quest": 0.083,
    "retrieval_attention": 0.024,
    "hybrid": 0.012,
}


def environment(torch: str = "2.13.0+cpu") -> Environment:
    versions = {"python": "3.11.7", "hybrid-kv": "0.1.0", "torch": torch, "flashinfer": None}
    cpu = Cpu(model="AMD EPYC 9B45", cores=2, threads=2, features=("avx2", "avx512f"))
    return Environment(
        versions=versions, platform="Linux x86_64", cpu=cpu, ram_bytes=67 << 30, device="cpu"
    )


def audit(
    missed: float, layers: int = 32, heads: int = 8, seed: int = 1, searched: bool = True
) -> AuditReport:
    """Means of heads around `missed`, with a bad layer; the last head was never looked at."""
    rng = random.Random(seed)
    found = []
    for layer in range(layers):
        for head in range(heads):
            worse = 6 if layer == 1 and head % 3 == 0 else 1
            share = min(0.9, missed * worse * rng.lognormvariate(-0.3, 0.9))
            found.append(
                AuditedHead(
                    layer=layer,
                    kv_head=head,
                    looks=1 + rng.randrange(3),
                    recall_at_k=max(0.0, 1 - 3 * share) if searched else None,
                    missed_mass=share,
                    output_error=min(1.0, 1.4 * share),
                )
            )
    found.pop()
    recall = EstimateReport(mean=max(0.0, 1 - 3 * missed), half_width=0.011)
    return AuditReport(
        looks=sum(head.looks for head in found),
        recall_at_k=recall if searched else None,
        missed_mass=EstimateReport(mean=missed, half_width=0.11 * missed),
        mass_error=EstimateReport(mean=-missed, half_width=0.11 * missed),
        output_error=EstimateReport(mean=1.4 * missed, half_width=None),
        heads=tuple(found),
    )


def row(
    method: str, context: int, *, seed: int = 0, slower: float = 1.0, **changes: Any
) -> ProfileRow:
    """A row that was measured, with figures that grow with the context as the method's do."""
    rng = random.Random(f"{method} {context} {seed}")
    share = context / CONTEXTS[-1]
    if method == "hnsw":
        share = share**0.5
    if method in ("retrieval_attention", "hybrid"):
        share = share**0.25
    search, cold, resident, select = (
        value * share for value in _PHASES.get(method, _PHASES["flat"])
    )
    model, python = 31.0, 2.6
    merge = 0.4 if method != "full" else 0.0
    wait = 1.1 if search else 0.0
    mean = slower * (search + cold + resident + select + merge + wait + model + python + 0.7)
    steps = tuple(mean * rng.lognormvariate(0, 0.03) for _ in range(31))
    kv = context * 131072
    missed = _MISSED.get(method)
    found = None if missed is None else audit(missed, seed=seed)
    values: dict[str, Any] = {
        "method": method,
        "context_tokens": context,
        "status": "ok",
        "config": {"method": method, "window_tokens": 512, "cold.top_k": 100, "page_size": 16},
        "ttft_s": context * 2.1e-4 + (context / 9e4) ** 2,
        "prefill_s": context * 2.1e-4,
        "index_build_s": 0.0 if method in ("full", "quest") else context * 3e-5,
        "tpot_ms": sum(steps) / len(steps),
        "step_ms": steps,
        "itl_ms": Percentiles(p50=mean, p90=1.05 * mean, p99=1.12 * mean),
        "phases_ms": PhasesMs(
            search=slower * search,
            cold_attention=slower * cold,
            resident_attention=slower * resident,
            select=slower * select,
            merge=slower * merge,
            transfer=0.0,
            wait=slower * wait,
            other=slower * (model + python + 0.7),
            model=slower * model,
            python=slower * python,
        ),
        "recorder_ratio": 0.004,
        "work": WorkReport(
            scored_ratio=0.03 if missed else None,
            retrieved_tokens=100.0 if missed else None,
            attended_tokens=640.0 if missed else float(context),
        ),
        "audit": found,
        "memory_bytes": MemoryBytes(
            host_kv=kv,
            host_index=0 if method in ("full", "quest") else kv // 7,
            host_peak=kv + (3 << 30),
        ),
        "bytes_per_token": BytesPerToken(
            weights=1 << 30,
            resident_attention=kv if method == "full" else 80 << 20,
            search=int(kv * 0.02),
            cold_attention=13 << 20,
        ),
        "limit_ms": 0.62 * mean,
        "cache_limit_ms": 0.21 * mean,
        "predicted_ms": {"device": 0.5 * mean, "host": 0.31 * mean},
        "backends": {"attend": "native"},
        "index": ({"layer": 0, "kv_head": 0, "kind": "graph"},),
    }
    return ProfileRow(**{**values, **changes})


def profile(
    contexts: tuple[int, ...] = CONTEXTS,
    methods: tuple[str, ...] = METHODS,
    *,
    rows: tuple[ProfileRow, ...] | None = None,
    seed: int = 0,
    slower: float = 1.0,
    torch: str = "2.13.0+cpu",
    **changes: Any,
) -> ProfileReport:
    """A sweep in which one row failed, one was skipped and the last one was interrupted."""
    if rows is None:
        rows = tuple(
            troubled(row(method, context, seed=seed, slower=slower), contexts)
            for context in contexts
            for method in methods
        )
    values: dict[str, Any] = {
        "arguments": {
            "model": "random:llama-3-8b",
            "context": list(contexts),
            "methods": list(methods),
            "layers": 32,
        },
        "model": "random:llama-3-8b",
        "layers": 32,
        "fill": "prefill",
        "new_tokens": 32,
        "warmup_tokens": 4,
        "threads": {"torch": 2, "engine": 2},
        "bandwidth_gbps": MachineGbps(dram=38.2, h2d=None, d2h=None, device=38.2, gather=21.7),
        "recorder_us": 0.8,
        "rows": rows,
    }
    return ProfileReport(environment=environment(torch), **{**values, **changes})


def troubled(one: ProfileRow, contexts: tuple[int, ...]) -> ProfileRow:
    """The row, or what became of it in this sweep."""
    place = (one.method, one.context_tokens)
    bare = {"method": one.method, "context_tokens": one.context_tokens, "config": one.config}
    if place == ("hnsw", contexts[-1]):
        return ProfileRow(**bare, status="failed", reason="memory ran out while hnsw was built")
    if place == ("flat", contexts[0]):
        return ProfileRow(**bare, status="skipped", reason="the budget covers the whole context")
    if place == ("hybrid", contexts[-1]):
        return one.model_copy(update={"status": "interrupted", "reason": "Ctrl-C at step 31"})
    return one


def synthetic(**changes: Any) -> ProfileReport:
    """Two of 32 layers, with KV put in place: no TTFT, and audits of 2 x 8 heads."""
    rows = []
    for context in (32768, 131072, 524288):
        for method in METHODS:
            made = row(method, context)
            missed = _MISSED.get(method)
            rows.append(
                made.model_copy(
                    update={
                        "ttft_s": None,
                        "prefill_s": None,
                        "fill_s": context * 3e-5,
                        "audit": None if missed is None else audit(missed, layers=2),
                    }
                )
            )
    return profile(
        rows=tuple(rows), layers=2, shape_layers=32, fill="synthetic", interrupted=True, **changes
    )


def run(method: str = "hybrid", text: str = "the answer is 07", **changes: Any) -> Run:
    made = row(method, 8192)
    shared = {
        name: getattr(made, name) for name in ProfileRow.model_fields if name in Run.model_fields
    }
    return Run(
        **{
            **shared,
            "model": "needle",
            "new_tokens": 32,
            "text": text,
            "token_ids": (3, 5),
            **changes,
        }
    )


def generation(**changes: Any) -> RunReport:
    made = run(**changes)
    values = {name: getattr(made, name) for name in Run.model_fields}
    return RunReport(environment=environment(), **values)


def chat() -> ChatReport:
    return ChatReport(environment=environment(), turns=(run(), run(text="second answer")))


def demo() -> DemoReport:
    return DemoReport(
        environment=environment(),
        question="? key 3f a0",
        expected="11 5c 9e 07",
        agree=True,
        correct=True,
        attended_ratio=0.021,
        device_kv_bytes=1_363_148,
        read_s=25.0,
        runs=(run("full"), run("hybrid")),
        layer=LayerReport(
            shape="Llama-3-8B",
            context_tokens=131072,
            kv_bytes=2**29,
            steps=24,
            runs=(layer_run("full", 70.0, 1.0), layer_run("hybrid", 14.0, 0.922)),
        ),
    )


def layer_run(method: str, step_ms: float, mass: float) -> LayerRun:
    return LayerRun(
        config={"method": method},
        method=method,
        step_ms=step_ms,
        attended_ratio=1.0 if method == "full" else 0.006,
        mass=mass,
        device_kv_bytes=2**29 if method == "full" else 2**21,
        host_bytes=0 if method == "full" else 2**29,
    )
