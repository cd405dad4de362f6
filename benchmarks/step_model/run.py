"""What the model of a step says of the host's parts, beside what they take here.

    python benchmarks/step_model/run.py --context 32k,128k,256k --kinds sketch,graph,flat

Attention-like KV of one layer of the Llama-3-8B shape is filled in, and decode steps are made with
one thread, as for a model on a device: queries are sent, the host makes its part by one call of the
engine, and its result is delivered. Times are CPU times of that thread, the lowest tenth of the
steps: other work on the machine empties caches. Entering is the Python around that call, from the
queries' arrival to the result; launching is that of all else, which a device does not wait for
while its own part of a layer is longer. `planning.designs.HOST_COSTS` was set from such runs.
Stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from statistics import quantiles
from time import thread_time
from typing import Any

os.environ["HYBRID_KV_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"

import torch

import hybrid_kv as hkv
from hybrid_kv.config import parse_count
from hybrid_kv.eval.filling import FilledKV, SyntheticContext
from hybrid_kv.ops import Ops
from hybrid_kv.ops.native import library
from hybrid_kv.planning.designs import HOST_COSTS
from hybrid_kv.report import probe_environment
from hybrid_kv.report.files import compact
from hybrid_kv.runtime import KVCache, decode
from hybrid_kv.transfer import SyncExecutor
from hybrid_kv.transfer.cuda import CudaExecutor
from hybrid_kv.types import LayerShape, ModelInfo, Needs

SHAPE = LayerShape(0, 32, 8, 128)
KINDS = {"sketch": {"kind": "sketch"}, "graph": {"kind": "graph"}}
KINDS["flat"] = {"kind": "flat", "precision": "int8"}
_WARM = 3  # steps that set things up
ENGINE_PHASES = "search", "cold_attention"  # by the wall, within the engine's call
COST_OF = {"sketch": "sketch", "graph": "graph", "flat": "scan"}


def filled(context: SyntheticContext, kind: str, steps: int) -> KVCache:
    """A layer that holds the context, its index built."""
    config = hkv.HybridConfig(
        method="retrieval_attention", cold={"index": KINDS[kind]}, index_build="wait"
    )
    executor = CudaExecutor(SyncExecutor(), lambda device: None)  # nothing travels, and is sent
    cache = FilledKV(ModelInfo((SHAPE,)), config, context, executor)
    cache.means.reserve(context.num_tokens + steps)
    needs = cache.means.method.needs
    evidence = (context.evidence(0, needs, torch.bfloat16),) if needs != Needs() else ()
    cache.load(0, *context.kv(0, torch.bfloat16), evidence)
    return cache


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Seconds of this thread inside the engine's call, the host's part, and resident attention."""
    seconds: dict[str, float] = defaultdict(float)
    places: list[tuple[Any, str, str]] = [
        (Ops, "attend_visible", "resident attention"),
        (library.engine(), "hkv_attend_step", "call"),
        (decode, "attend_cold", "host's part"),
    ]

    def wrap(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(function, assigned=())
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name] += thread_time() - begin

        return timed

    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in places]
    for (owner, attribute, function), (_, _, name) in zip(before, places, strict=True):
        setattr(owner, attribute, wrap(function, name))
    try:
        yield seconds
    finally:
        for owner, attribute, function in before:
            setattr(owner, attribute, function)


def measure(cache: KVCache, steps: int) -> dict[str, float]:
    """Microseconds of a layer's step by part, of one thread."""
    q = torch.ones(1, 32, 1, 128, dtype=torch.bfloat16)
    new = torch.ones(1, 8, 1, 128, dtype=torch.bfloat16)
    cache.attend(0, q, (new, new), None, scale=128**-0.5)  # declares the engine's functions
    parts: dict[str, list[float]] = defaultdict(list)
    with torch.inference_mode(), watched() as seconds:
        for step in range(steps + _WARM):
            seconds.clear()
            before = dict(cache.phases.seconds)
            begin = thread_time()
            cache.attend(0, q, (new, new), None, scale=128**-0.5)
            layer = thread_time() - begin
            if step < _WARM:
                continue
            parts["layer"].append(layer)
            parts["entering"].append(seconds["host's part"] - seconds["call"])
            beside = seconds["host's part"] + seconds["resident attention"]
            parts["launching"].append(layer - beside)
            booked = [cache.phases.seconds[name] - before[name] for name in ENGINE_PHASES]
            for name, share in zip(("search", "cold attention"), booked, strict=True):
                parts[name].append(seconds["call"] * share / sum(booked))
    return {name: 1e6 * quantiles(times, n=10)[0] for name, times in parts.items()}


def predicted(kind: str, keys: int) -> dict[str, float]:
    """The same parts by the model."""
    heads, costs = SHAPE.num_kv_heads, HOST_COSTS
    return {
        "search": heads * costs.search[COST_OF[kind]].core_us(keys),
        "cold attention": heads * costs.attend.core_us(keys),
        "entering": costs.enter.at(keys),
        "launching": costs.launch.at(keys),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    counts = {"type": lambda text: [parse_count(one) for one in text.split(",")]}
    parser.add_argument("--context", default="32k,128k,256k", **counts)
    parser.add_argument("--kinds", default="sketch,flat")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for tokens in args.context:
        context = SyntheticContext(ModelInfo((SHAPE,)), tokens, max_steps=args.steps + 8)
        for kind in args.kinds.split(","):
            cache = filled(context, kind, args.steps + 8)
            found, said = measure(cache, args.steps), predicted(kind, tokens)
            ratios = {name: said[name] / found[name] for name in said if found[name]}
            rows.append(
                {"context_tokens": tokens, "index": kind, "measured_us": found, "model_us": said}
                | {"ratio": ratios}
            )
            cells = ", ".join(
                f"{name} {said[name]:.0f} / {found[name]:.0f} = {ratio:.2f}"
                for name, ratio in ratios.items()
            )
            print(f"{tokens:>8,} {kind:>7}: model / measured us: {cells}", file=sys.stderr)
    environment = json.loads(probe_environment().model_dump_json())
    print(compact({"benchmark": "step_model", "environment": environment, "rows": rows}), end="")


if __name__ == "__main__":
    main()
