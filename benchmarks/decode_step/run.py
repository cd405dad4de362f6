"""Where a decode step of the runtime goes: arithmetic, or Python around it.

    python benchmarks/decode_step/run.py --context 128k

Attention-like KV of two layers of the Llama-3-8B shape is filled in; then the runtime is asked as a
model would ask it, layer by layer, without the model's own products. With `--hf` it is asked as
transformers does in `model.generate()`: keys and values go through the cache, queries
through the attention function, once for each layer of a forward. Arithmetic is what runs inside the
native engine (search, attention, merge) and torch's attention; all else is overhead. Times are CPU
times of the calling thread with one thread everywhere, so that a busy machine changes less. Stdout
is one JSON document.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from itertools import product
from statistics import fmean, median, quantiles
from time import thread_time
from typing import Any

os.environ.setdefault("HYBRID_KV_THREADS", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hybrid_kv as hkv
from hybrid_kv.config import parse_count
from hybrid_kv.eval.filling import FilledKV, SyntheticContext, filled_cache
from hybrid_kv.models.hf_attention import hybrid_attention
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.ops import fused
from hybrid_kv.ops.native import library
from hybrid_kv.report.files import compact
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import LayerShape, ModelInfo, Needs
from hybrid_kv.watch.phases import ATTENTION, PHASES

INFO = ModelInfo(tuple(LayerShape(idx, 32, 8, 128) for idx in range(2)))
ENGINE_CALLS = (
    *("hkv_flat_search", "hkv_graph_search", "hkv_sketch_search"),
    *("hkv_attend", "hkv_attend_rows", "hkv_merge", "hkv_page_scores", "hkv_attend_step"),
)


class Arithmetic:
    """Seconds inside the functions that compute, since the last `take`."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function, assigned=())
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds += thread_time() - begin

        return timed

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def filled(context: SyntheticContext, config: hkv.HybridConfig, steps: int) -> KVCache:
    """A cache that holds the context in both layers."""
    cache = FilledKV(INFO, config, context)
    cache.means.reserve(context.num_tokens + steps)
    needs = cache.means.method.needs
    for shape in INFO.layers:
        layer_idx = shape.layer_idx
        evidence = (context.evidence(layer_idx, needs, torch.bfloat16),) if needs != Needs() else ()
        cache.load(layer_idx, *context.kv(layer_idx, torch.bfloat16), evidence)
    return cache


Q = torch.ones(1, 32, 1, 128, dtype=torch.bfloat16)
NEW = torch.ones(1, 8, 1, 128, dtype=torch.bfloat16)
MODULE = torch.nn.Module()


def step(cache: KVCache) -> None:
    for shape in INFO.layers:
        cache.attend(shape.layer_idx, Q, (NEW, NEW), None, scale=128**-0.5)


def small_model() -> Any:
    """A model whose attention has the same shape, and hardly any weights."""
    config = LlamaConfig(
        **{"vocab_size": 16, "hidden_size": 64, "intermediate_size": 64, "head_dim": 128},
        **{"num_hidden_layers": len(INFO.layers), "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "max_position_embeddings": 2**21},
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def hf_step(cache: TieredCache) -> None:
    """What a forward of transformers asks of us, without the model around it."""
    with cache.forward():
        for shape in INFO.layers:
            k, v = cache.update(NEW, NEW, shape.layer_idx)
            hybrid_attention(MODULE, Q, k, v, None, scaling=128**-0.5)


def measure(cache: KVCache, steps: int, step: Callable[[], None]) -> dict[str, Any]:
    """Medians per layer, in microseconds, the share of arithmetic, and mean wall times by phase.

    The mean of the overhead has the pages that leave the window in it, which the median has not:
    give a multiple of 16 steps. The lowest tenth of the overhead is there as well: other work on
    the machine empties caches, which small pieces of Python feel most.
    """
    arithmetic = Arithmetic()
    engine, attend = library.engine(), fused.attend
    for _ in range(3):
        step()  # declares the engine's functions before they are wrapped
    calls = {name: getattr(engine, name) for name in ENGINE_CALLS if hasattr(engine, name)}
    for name, call in calls.items():
        setattr(engine, name, arithmetic.wrap(call))
    fused.attend = arithmetic.wrap(attend)
    whole, inside = [], []
    before = dict(cache.phases.seconds)
    try:
        for _ in range(steps):
            arithmetic.take()
            begin = thread_time()
            step()
            whole.append(1e6 * (thread_time() - begin) / len(INFO.layers))
            inside.append(1e6 * arithmetic.take() / len(INFO.layers))
    finally:
        fused.attend = attend
        for name, call in calls.items():
            setattr(engine, name, call)
    per_layer = 1e6 / (steps * len(INFO.layers))
    outside = [a - b for a, b in zip(whole, inside, strict=True)]
    return {
        "layer_us": median(whole),
        "arithmetic_us": median(inside),
        "overhead_us": median(outside),
        "overhead_mean_us": fmean(outside),
        "overhead_p10_us": quantiles(outside, n=10)[0],
        "arithmetic_share": median(inside) / median(whole),
        **{
            f"{name}_wall_us": per_layer * (cache.phases.seconds[name] - before[name])
            for name in (*PHASES, ATTENTION)
        },
    }


def profile(steps: int, step: Callable[[], None]) -> None:
    """Shows where the overhead lies."""
    with cProfile.Profile() as profiler:
        for _ in range(steps):
            step()
    stats = pstats.Stats(profiler, stream=sys.stderr)
    stats.sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--context", type=parse_count, default=2**17)
    parser.add_argument("--indexes", default="flat:int8,graph")
    parser.add_argument("--estimates", default="none", help="none, gaussian, or both in turn")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--hf", action="store_true", help="as transformers asks")
    parser.add_argument("--profile", action="store_true", help="print a profile of the calls")
    options = parser.parse_args()
    torch.set_num_threads(1)
    context = SyntheticContext(INFO, options.context, max_steps=4 * options.steps + 8)
    rows = {}
    for asked, estimate in product(options.indexes.split(","), options.estimates.split(",")):
        kind, _, precision = asked.partition(":")
        index = {"kind": kind, "precision": precision} if precision else {"kind": kind}
        config = hkv.HybridConfig(
            method="retrieval_attention",
            cold={"index": index, "estimate": estimate},
            index_build="wait",
        )
        name = asked if estimate == "none" else f"{asked} {estimate}"
        with torch.inference_mode(), ExitStack() as stack:
            if options.hf:
                runtime = stack.enter_context(hkv.attach(small_model(), config))
                tiered = filled_cache(runtime, context)
                kv, one_step = tiered.kv, partial(hf_step, tiered)
            else:
                kv = filled(context, config, 4 * options.steps)
                one_step = partial(step, kv)
            rows[name] = measure(kv, options.steps, one_step)
            if options.profile:
                profile(options.steps, one_step)
        cells = ", ".join(f"{key} {value:.3g}" for key, value in rows[name].items())
        print(f"{name:>12}: {cells}", file=sys.stderr)
    report = {
        "benchmark": "decode_step",
        "context_tokens": options.context,
        "layers": len(INFO.layers),
        "asked_by": "transformers" if options.hf else "runtime",
        "threads": 1,
        "isa": library.engine_state().isa,
        "torch": torch.__version__,
        "rows": rows,
    }
    print(compact(report), end="")


if __name__ == "__main__":
    main()
