"""Cost of a step of several streams with contexts of their own, beside a stream alone.

    python benchmarks/streams/run.py --context 32k --streams 8

Layers of an 8B model with their weights; each stream has a context that no other one has. One
forward of all streams and one forward of a single stream are timed in turn. Stdout is one JSON
document: milliseconds of a step, and Python calls of the cache's part of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

if __name__ == "__main__":  # a script: the project's root is not on its path
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from transformers import AutoModelForCausalLM

import hybrid_kv as hkv
from benchmarks.common.step_cost import counted
from benchmarks.common.surroundings import surroundings
from hybrid_kv.config import parse_count
from hybrid_kv.eval.filling import SyntheticContext, filled_cache
from hybrid_kv.models.attach import Attachment
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.joined import JoinedCache
from hybrid_kv.models.shapes import random_config
from hybrid_kv.report.files import compact

_WARM = 4
_VOCAB = 4096
"""Of the model: the output head is no part of the question."""


def streams(runtime: Attachment, count: int, tokens: int, steps: int) -> list[TieredCache]:
    """Caches of contexts of their own."""
    caches = []
    for seed in range(count):
        context = SyntheticContext(runtime.info, tokens, max_steps=steps, seed=100 * seed)
        caches.append(filled_cache(runtime, context))
        print(f"stream {seed + 1} of {count} has its context", file=sys.stderr)
    return caches


def step_of(model: Any, caches: list[TieredCache]) -> Callable[[], Any]:
    """A forward of one new token for each of the caches."""
    ids, joined = torch.ones(len(caches), 1, dtype=torch.long), JoinedCache(caches)

    def alone() -> Any:
        return model(ids, **passing(caches[0]), logits_to_keep=1).logits

    def together() -> Any:
        positions = torch.tensor(joined.positions)
        logits = model(ids, **passing(joined), position_ids=positions, logits_to_keep=1).logits
        if errors := [error for error in joined.errors if error is not None]:
            raise errors[0]
        return logits

    return alone if len(caches) == 1 else together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--context", type=parse_count, default=2**15)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--method", default="hybrid")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = random_config("llama-3-8b", options.layers)
    shape.vocab_size = _VOCAB
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).eval()
    config = hkv.HybridConfig(method=options.method, index_build="wait")
    with torch.inference_mode(), ExitStack() as stack:
        runtime = stack.enter_context(hkv.attach(model, config))
        most = 2 * (options.steps + _WARM) + 4
        caches = streams(runtime, options.streams + 1, options.context, most)
        one, all_ = step_of(model, caches[:1]), step_of(model, caches[1:])
        times: dict[str, list[float]] = {"one": [], "all": []}
        for number in range(options.steps + _WARM):
            for name, step in (("one", one), ("all", all_)):
                begin = perf_counter()
                step()
                if number >= _WARM:
                    times[name].append(1e3 * (perf_counter() - begin))
        calls = {name: counted(step).own_calls for name, step in (("one", one), ("all", all_))}
    ratio = median(times["all"]) / options.streams / median(times["one"])
    report = {
        "benchmark": "streams",
        "settings": vars(options),
        **surroundings(),
        "one_ms": median(times["one"]),
        "all_ms": median(times["all"]),
        "each_beside_one": ratio,
        "calls": calls,
    }
    print(
        f"one stream {report['one_ms']:.2f} ms, {options.streams} together {report['all_ms']:.2f} "
        f"ms: each {ratio:.2f} of one alone; Python calls {calls['one']} and {calls['all']}",
        file=sys.stderr,
    )
    print(compact(report), end="")


if __name__ == "__main__":
    main()
