"""Time to the first token of one layer of Llama-3-8B's shape in vLLM: alone, and with hybrid_kv.

    python benchmarks/vllm_step/first_token.py --tokens 4k --repeats 3   # where vLLM is installed

Both engines are in one process and compute the same prompts by turns. `attention` is the writing
of keys and their attention, and with hybrid_kv learning the index and making codes: all else is the
same. Times are CPU time of the thread.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.vllm_step.run import SHAPE, start, timed, watch
from hybrid_kv.config import parse_count
from hybrid_kv.report.files import compact


def first_token(one: Any, ids: list[int]) -> None:
    """Compute a prompt up to its first token."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True)
    one.add_request("0", {"prompt_token_ids": ids}, params)
    while one.has_unfinished_requests():
        one.step()


def forget(one: Any) -> None:
    """Begin without an index, as after a start."""
    runner = one.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    for layer in runner.compilation_config.static_forward_context.values():
        if getattr(layer.impl, "hybrid", None) is not None:
            layer.impl.hybrid._address = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", default="4k")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    tokens = parse_count(options.tokens)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    torch.set_num_threads(1)
    from transformers import LlamaConfig
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from hybrid_kv.vllm.plugin import register

    register()
    from hybrid_kv.vllm.backend import HybridImpl

    folder = tempfile.mkdtemp()
    config = LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    engines = [start(folder, tokens + 64, options.chunk, settings) for settings in (None, {})]
    spent = {"attention": 0.0}
    for owner in (CPUAttentionBackendImpl, HybridImpl):
        watch("forward", owner, spent)
        watch("do_kv_cache_update", owner, spent)
    for one in engines:
        first_token(one, [1] * 64)
    rows = []
    for number in range(options.repeats):
        draw = random.Random(number)
        ids = [draw.randrange(SHAPE["vocab_size"]) for _ in range(tokens)]
        forget(engines[1])
        rows.append([timed(partial(first_token, one, ids), spent) for one in engines])
        print(rows[-1], file=sys.stderr)
    stock, ours = ([row[who] for row in rows] for who in (0, 1))
    added = [(b[1] - a[1]) / a[0] for a, b in zip(stock, ours, strict=True)]
    ratios = [b[0] / a[0] for a, b in zip(stock, ours, strict=True)]
    found = {
        "benchmark": "first_token",
        "tokens": tokens,
        "chunk": options.chunk,
        "repeats": options.repeats,
        "stock_ms": statistics.median(one[0] for one in stock),
        "hybrid_ms": statistics.median(one[0] for one in ours),
        "ratio": statistics.median(ratios),
        "attention_stock_ms": statistics.median(one[1] for one in stock),
        "attention_hybrid_ms": statistics.median(one[1] for one in ours),
        "added_by_attention": statistics.median(added),
    }
    print(compact(found))


if __name__ == "__main__":
    main()
