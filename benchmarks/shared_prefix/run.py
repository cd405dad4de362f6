#!/usr/bin/env python3
"""What do rows save that attend the context which they share together?

    python benchmarks/shared_prefix/run.py --context 32k --rows 4,16 --layers 4 --head-dim 128

A cache of random keys and values is forked; then all rows take the same decode steps twice, once
one by one and once together, step by step in turn. Attention only, no weights; with several layers
a layer's keys have left the CPU's caches when its turn comes again. CPU seconds are those of all
threads of the process; `HYBRID_KV_THREADS` says how many the engine has. After `--alone` steps what
has left the window of a row lies in an extent of its own. Stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # a script: the project's root is not on its path
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from hybrid_kv.config import HybridConfig, parse_count
from hybrid_kv.report.files import compact
from hybrid_kv.runtime import KVCache
from hybrid_kv.runtime.together import JointRow, attend_shared
from hybrid_kv.types import LayerShape, ModelInfo

SCAN = {"kind": "flat", "precision": "int8"}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "hybrid": {"method": "hybrid", "window_tokens": 512, "cold": {"top_k": 100, "index": SCAN}},
}


def forks(own: HybridConfig, model: ModelInfo, tokens: int, rows: int) -> list[KVCache]:
    cache = KVCache(model, own)
    for shape in model.layers:
        size = (1, shape.num_kv_heads, tokens, shape.head_dim)
        cache.load(shape.layer_idx, torch.randn(size), torch.randn(size))
    return [cache, *(cache.fork() for _ in range(rows - 1))]


def one_by_one(
    rows: list[KVCache], layer: int, q: torch.Tensor, new: Any, scale: float
) -> list[torch.Tensor]:
    own = ((row, q[n : n + 1], tuple(t[n : n + 1] for t in new)) for n, row in enumerate(rows))
    return [row.attend(layer, one, pair, None, scale=scale).out for row, one, pair in own]


def together(
    rows: list[KVCache], layer: int, q: torch.Tensor, new: Any, scale: float
) -> list[torch.Tensor]:
    """As a joined step of the server does: those that nobody shares with attend by themselves."""
    joint = [
        JointRow(row, layer, q[n : n + 1], tuple(t[n : n + 1] for t in new))
        for n, row in enumerate(rows)
    ]
    attend_shared(joint, scale=scale, softcap=None)
    outs = []
    for row in joint:
        part = row.taken()
        if part is None:
            part = row.kv.attend(layer, row.q, row.new, None, scale=scale)
        outs.append(part.out)
    return outs


def measure(
    own: HybridConfig, model: ModelInfo, tokens: int, rows: int, steps: int, alone: int
) -> dict[str, Any]:
    ways: dict[str, Callable[..., list[torch.Tensor]]] = {
        "one_by_one": one_by_one,
        "together": together,
    }
    every = forks(own, model, tokens, 2 * rows)
    caches = {"one_by_one": every[:rows], "together": every[rows:]}
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    shape = model.layers[0]
    scale = shape.head_dim**-0.5
    for step in range(alone + 2 + steps):
        q = 2 * torch.randn(rows, shape.num_q_heads, 1, shape.head_dim)
        new = tuple(torch.randn(rows, shape.num_kv_heads, 1, shape.head_dim) for _ in range(2))
        outs: dict[str, list[torch.Tensor]] = {}
        for name in sorted(ways, reverse=bool(step % 2)):
            begin, used = time.perf_counter(), time.process_time()
            for layer in range(len(model.layers)):
                outs[name] = ways[name](caches[name], layer, q, new, scale)
            if step >= alone + 2:
                wall[name].append(1e3 * (time.perf_counter() - begin))
                cpu[name].append(1e3 * (time.process_time() - used))
        torch.testing.assert_close(torch.cat(outs["together"]), torch.cat(outs["one_by_one"]))
    layers = len(model.layers)
    found = {f"{name}_cpu_ms": round(median(cpu[name]) / layers, 3) for name in ways}
    found |= {f"{name}_ms": round(median(wall[name]) / layers, 3) for name in ways}
    gain = found["one_by_one_cpu_ms"] / found["together_cpu_ms"]
    extents = [len(row.stores[0].rows[0].chain.spans) for row in caches["together"]]
    result = {"method": own.method, "rows": rows, "extents": max(extents), **found}
    return {**result, "gain_cpu": round(gain, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--context", default="32k")
    parser.add_argument("--rows", default="4,16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--alone", type=int, default=0, help="steps before those that are timed")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokens = int(str(parse_count(args.context)))
    model = ModelInfo(tuple(LayerShape(n, 32, 8, args.head_dim) for n in range(args.layers)))
    results = []
    for name in args.methods.split(","):
        for rows in map(int, args.rows.split(",")):
            own = HybridConfig(**METHODS[name], index_build="wait")
            results.append(measure(own, model, tokens, rows, args.steps, args.alone))
            print(name, results[-1], file=sys.stderr)
    about = {
        "context_tokens": tokens,
        "layer": {"query_heads": 32, "kv_heads": 8, "head_dim": args.head_dim, "dtype": "float32"},
        "layers": args.layers,
        "steps_before": args.alone,
        "cpu": platform.processor() or platform.machine(),
        "threads": args.threads,
    }
    print(compact({**about, "results": results}), end="")


if __name__ == "__main__":
    main()
