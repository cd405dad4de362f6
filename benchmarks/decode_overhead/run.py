"""Does our runtime cost time when nothing is approximated? One decode step against StaticCache.

    python benchmarks/decode_overhead/run.py --context 8k

Both sides run the same weights, eager, on the CPU: `full` inside our store against transformers'
own StaticCache with sdpa. Steps alternate, so that drift hits both; the figure is the
median of the ratios of neighbouring steps. The vocabulary is cut to 4,096, or the output head would
hide the attention. `hybrid` at its default budget is timed beside them.

Beside the times stand counts, which are the same on every machine: the Python functions that one
step of one layer enters (of the package, and of anybody), and the files of the package that they
are in. Stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from hybrid_kv.models.cache_state import passing

if __name__ == "__main__":  # a script: what benchmarks share is beside its own folder
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, StaticCache

import hybrid_kv as hkv
from benchmarks.common.step_cost import step_cost
from hybrid_kv.config import parse_count
from hybrid_kv.models.attach import Attachment
from hybrid_kv.models.load import resolve_dtype
from hybrid_kv.models.shapes import random_config
from hybrid_kv.report.files import compact

Step = Callable[[], float]


def random_entries(model: PreTrainedModel, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """k, v [1, Hkv, tokens, D] per layer; time does not depend on the values of a dense step."""
    config = model.config
    size = (1, config.num_key_value_heads, tokens, config.head_dim)
    generator = torch.Generator().manual_seed(0)
    return [
        tuple(torch.randn(size, generator=generator).to(model.dtype) for _ in range(2))
        for _ in range(config.num_hidden_layers)
    ]


def static_step(model: PreTrainedModel, entries: Any, tokens: int, steps: int) -> Step:
    """One decode step of transformers with its static cache."""
    cache = StaticCache(config=model.config, max_cache_len=tokens + steps + 1)
    for layer_idx, (k, v) in enumerate(entries):
        cache.update(k, v, layer_idx)
    return timed(model, cache)


def our_step(runtime: Attachment, config: hkv.HybridConfig, entries: Any, steps: int) -> Step:
    """One decode step of ours."""
    cache = runtime.cache(config)
    cache.kv.means.reserve(entries[0][0].shape[2] + steps + 1)
    for layer, (k, v) in zip(cache.layers, entries, strict=True):
        layer.fill(k, v)
    return timed(runtime.model, cache)


def timed(model: PreTrainedModel, cache: Any) -> Step:
    token = torch.ones(1, 1, dtype=torch.long)

    def step() -> float:
        position = torch.tensor([[int(cache.get_seq_length())]])
        begin = perf_counter()
        model(token, **passing(cache), position_ids=position, use_cache=True)
        return 1e3 * (perf_counter() - begin)

    return step


def compare(sides: dict[str, Step], steps: int, warmup: int) -> dict[str, Any]:
    """Milliseconds per side and the ratio of each side to the first, step by step."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(warmup + steps):
        for name, step in sides.items():
            elapsed = step()
            if turn >= warmup:
                times[name].append(elapsed)
    base = next(iter(sides))
    result: dict[str, Any] = {}
    for name, values in times.items():
        ratios = [a / b for a, b in zip(values, times[base], strict=True)]
        quartiles = statistics.quantiles(values, n=4)
        result[name] = {
            "median_ms": statistics.median(values),
            "quartiles_ms": [quartiles[0], quartiles[2]],
            "median_ratio": statistics.median(ratios),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", default="8k")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokens, steps = parse_count(options.context), options.steps + options.warmup
    config = random_config(options.shape, options.layers)
    config.vocab_size = 4096
    ours = AutoModelForCausalLM.from_config(config, dtype=resolve_dtype(options.dtype)).eval()
    theirs = AutoModelForCausalLM.from_config(ours.config, attn_implementation="sdpa")
    theirs.load_state_dict(ours.state_dict(), assign=True)  # the same weights, not a copy
    theirs.eval()
    entries = random_entries(ours, tokens)
    with torch.inference_mode(), hkv.attach(ours) as runtime:
        sides = {
            "static_cache": static_step(theirs, entries, tokens, steps),
            "full": our_step(runtime, hkv.HybridConfig(method="full"), entries, steps),
            "hybrid": our_step(runtime, hkv.HybridConfig(), entries, steps),
        }
        result = compare(sides, options.steps, options.warmup)
    for method in ("full", "hybrid"):
        cost = step_cost(hkv.HybridConfig(method=method))
        result[method] |= {
            "calls": cost.own_calls,
            "all_calls": cost.calls,
            "files": len(cost.files),
        }
        print(
            f"{method:<13} {cost.own_calls} Python calls in {len(cost.files)} files for one step "
            f"of one layer, {cost.calls} with generated and foreign ones",
            file=sys.stderr,
        )
    for name, row in result.items():
        low, high = row["quartiles_ms"]
        print(
            f"{name:<13} median {row['median_ms']:7.2f} ms  quartiles {low:.2f}..{high:.2f}  "
            f"ratio to static_cache {row['median_ratio']:.3f}",
            file=sys.stderr,
        )
    settings = {**vars(options), "torch": torch.__version__, "cores": torch.get_num_threads()}
    print(compact({"benchmark": "decode_overhead", "settings": settings, "rows": result}), end="")


if __name__ == "__main__":
    main()
