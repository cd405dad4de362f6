"""What does it cost to wait for the graphs, and what to build them beside decoding?

    python benchmarks/index_build/run.py --context 32k --layers 4 --kv-heads 2

A stack of layers holds made-up heads (`hybrid_kv.eval.synthetic`, four query heads per KV head) and
is sealed with queries of their prompt; a product with weights of `--hidden` squared per layer
stands for the rest of a model, so that a step has something beside attention to do. Both settings
of `index_build` do the same, in turns: `first_s` is the time from the stored prompt to the end of
the first step (builds that are waited for are in it, the prompt's own computation is not),
`beside_ms` a step after it, `later_ms` a step when all graphs are built; `..._cpu_...` is processor
time of the decoding thread. Stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from time import perf_counter, sleep, thread_time
from typing import Any

import torch

import hybrid_kv as hkv
from hybrid_kv.config import parse_count
from hybrid_kv.eval.synthetic import PROFILES, SyntheticHead
from hybrid_kv.report.files import compact
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import Evidence, LayerShape, ModelInfo

MODES = ("wait", "background")


class Stack:
    """Layers of equal content under one cache per run."""

    def __init__(self, heads: list[SyntheticHead], layers: int, hidden: int, index: str) -> None:
        self.heads = heads
        group = heads[0].num_q_heads
        shape = LayerShape(0, len(heads) * group, len(heads), heads[0].keys.shape[1])
        self.shapes = [LayerShape(i, *_sizes(shape)) for i in range(layers)]
        self.config = {"method": "hybrid", "cold": {"index": index}}
        self.keys = torch.stack([head.keys for head in heads])[None].bfloat16()
        self.values = torch.randn(self.keys.shape, dtype=torch.float32).bfloat16()
        rows = torch.arange(0, self.keys.shape[2], 4)
        asked = [head.build_queries(g, rows) for head in heads for g in range(group)]
        self.evidence = Evidence(self.keys.shape[2], torch.stack(asked).bfloat16())
        later = [head.test_queries(g) for head in heads for g in range(group)]
        self.later = torch.stack(later)[None].bfloat16()  # [1, Hq, positions, D]
        self.weights = torch.randn(hidden, hidden) if hidden else None

    def run(self, mode: str, steps: int) -> dict[str, float]:
        config = hkv.HybridConfig(**self.config, index_build=mode)
        kv = KVCache(ModelInfo(tuple(self.shapes)), config)
        first = timed(lambda: (self._load(kv), self._step(kv, 0)))
        waited = kv.phases.seconds["index_build"]
        beside = [timed(lambda i=i: self._step(kv, i)) for i in range(1, 1 + steps)]
        while any(head.get("build") == "in progress" for head in self._served(kv)):
            sleep(0.2)
            self._step(kv, steps)
        later = [timed(lambda i=i: self._step(kv, i)) for i in range(1 + steps, 1 + 2 * steps)]
        graphs = sum(head["serves"] == "graph" for head in self._served(kv))
        built = kv.means.builds.clock.seconds
        kv.close()
        return {
            "first_s": first[0],
            "first_cpu_s": first[1],
            "waited_s": waited,
            "index_build_s": built,
            "beside_ms": 1e3 * statistics.median(wall for wall, _ in beside),
            "beside_cpu_ms": 1e3 * statistics.median(cpu for _, cpu in beside),
            "later_ms": 1e3 * statistics.median(wall for wall, _ in later),
            "later_cpu_ms": 1e3 * statistics.median(cpu for _, cpu in later),
            "graphs": graphs,
        }

    def _load(self, kv: KVCache) -> None:
        for shape in self.shapes:
            kv.load(shape.layer_idx, self.keys, self.values, (self.evidence,))

    def _step(self, kv: KVCache, step: int) -> None:
        q = self.later[:, :, step : step + 1]
        new = (self.keys[:, :, step : step + 1], self.values[:, :, step : step + 1])
        for shape in self.shapes:
            if self.weights is not None:
                torch.mv(self.weights, self.weights[0])
            kv.attend(shape.layer_idx, q, new, None, scale=shape.head_dim**-0.5)

    def _served(self, kv: KVCache) -> list[dict[str, Any]]:
        return [head for layer in kv.stores.values() for head in layer.cold.describe_indexes()]


def _sizes(shape: LayerShape) -> tuple[int, int, int]:
    return shape.num_q_heads, shape.num_kv_heads, shape.head_dim


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall seconds and processor seconds of this thread."""
    wall, cpu = perf_counter(), thread_time()
    work()
    return perf_counter() - wall, thread_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--context", type=parse_count, default=32768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--index", default="graph")
    args = parser.parse_args()
    torch.manual_seed(0)
    made = [
        SyntheticHead(PROFILES["paper"], args.context, weight_seed=seed, text_seed=0)
        for seed in range(args.kv_heads)
    ]
    stack = Stack(made, args.layers, args.hidden, args.index)
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with torch.inference_mode():
        for _ in range(args.repeats):
            for mode in MODES:
                runs[mode].append(stack.run(mode, args.steps))
                print(mode, {k: round(v, 3) for k, v in runs[mode][-1].items()}, file=sys.stderr)
    medians = {
        mode: {name: statistics.median(run[name] for run in found) for name in found[0]}
        for mode, found in runs.items()
    }
    print(compact({"settings": vars(args), "medians": medians, "runs": runs}), end="")


if __name__ == "__main__":
    main()
