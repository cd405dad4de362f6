"""What an error bar costs a decode step: the same steps with and without it, in turn.

    python benchmarks/error_bar/cost.py --contexts 4k,128k

One layer of the Llama-3-8B shape (32 query heads, 8 KV heads, 128 channels, bfloat16) over made-up
KV, under `hybrid` at 2%; its step is one call of the engine. Then whole tokens of SmolLM2-135M at
2K. Times are medians in ms of the only thread's CPU time. Stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

os.environ.setdefault("HYBRID_KV_THREADS", "1")

if __name__ == "__main__":  # a script: the project's root is not on the path
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import hybrid_kv as hkv
from hybrid_kv.cli.comparison import LAYER_DTYPE, LLAMA_3_8B, make_context
from hybrid_kv.config import HybridConfig, parse_count
from hybrid_kv.eval.filling import FilledKV
from hybrid_kv.models.cache_state import passing
from hybrid_kv.report.files import compact
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import ModelInfo, Needs
from hybrid_kv.watch.token_errors import HalfWatcher

_WARMUP = 6


class Turns:
    """Times of steps that are watched, and of those that are not, one after the other."""

    def __init__(self, kv: KVCache) -> None:
        self._kv, self._watcher = kv, HalfWatcher()
        self.plain, self.watched = list[float](), list[float]()

    def take(self, number: int, step: Any) -> None:
        """One step; of every two the second is watched."""
        is_watched = number % 2 == 1
        self._kv.watchers = [self._watcher] if is_watched else []
        begin = thread_time()
        step()
        if is_watched:
            self._watcher.take()
        taken = thread_time() - begin
        if number >= _WARMUP:
            (self.watched if is_watched else self.plain).append(1e3 * taken)

    def line(self) -> dict[str, float]:
        """Medians in ms, and their ratio."""
        plain, watched = median(self.plain), median(self.watched)
        return {"plain_ms": plain, "watched_ms": watched, "ratio": watched / plain}


def layer(tokens: int, steps: int) -> dict[str, float]:
    """Steps of a synthetic layer."""
    shape, context = LLAMA_3_8B, make_context(tokens, steps)
    config = HybridConfig(index_build="wait").at_budget("2%", tokens)
    kv = FilledKV(ModelInfo((shape,)), config, context)
    turns = Turns(kv)
    with torch.inference_mode():
        kv.means.reserve(context.num_tokens + context.max_steps)
        needs = kv.means.method.needs
        evidence = (context.evidence(0, needs, LAYER_DTYPE),) if needs != Needs() else ()
        kv.load(0, *context.kv(0, LAYER_DTYPE), evidence)
        q = torch.ones(1, shape.num_q_heads, 1, shape.head_dim, dtype=LAYER_DTYPE)
        new = torch.ones(2, 1, shape.num_kv_heads, 1, shape.head_dim, dtype=LAYER_DTYPE)
        step = partial(kv.attend, 0, q, (new[0], new[1]), None, scale=shape.head_dim**-0.5)
        for number in range(context.max_steps):
            turns.take(number, step)
    kv.close()
    return turns.line()


def model(tokens: int, steps: int) -> dict[str, float]:
    """Tokens of SmolLM2."""
    with hkv.load("smollm2", dtype="float32", dequantize=True) as llm, torch.inference_mode():
        config = HybridConfig(page_size=8, index_build="wait").at_budget("2%", tokens)
        cache = llm.runtime.cache(config)
        cache.kv.means.reserve(tokens + steps)
        llm.model(torch.randint(3, 49000, (1, tokens)), **passing(cache), logits_to_keep=1)
        turns = Turns(cache.kv)
        for number in range(steps):
            token = torch.randint(3, 49000, (1, 1))
            turns.take(number, partial(llm.model, token, **passing(cache)))
        return turns.line()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="4k,128k", help="of the layer")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = {text: layer(parse_count(text), args.steps) for text in args.contexts.split(",")}
    rows["smollm2 2k"] = model(2048, min(args.steps, 100))
    for name, row in rows.items():
        print(f"{name:12}" + "".join(f" {key} {value:.4g}" for key, value in row.items()))
    print(compact({"benchmark": "error_bar_cost", "rows": rows}), end="")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
