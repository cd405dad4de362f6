"""A decode step of one layer of Llama-3-8B's shape in vLLM on a CPU: alone, and with hybrid_kv.

    python benchmarks/vllm_step/run.py --tokens 32k --requests 1   # where vLLM is installed

Both engines are in one process and step by turns, so that what else runs on the machine meets both.
The cache holds random keys and values in blocks at random places; prompts skip the layer, whose
products would take minutes, so that the index is learned from random rows too: those are the worst
case of a search, as the queries of a group have no key in common. Times are CPU time of the thread.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import torch  # noqa: E402

from hybrid_kv.config import parse_count  # noqa: E402
from hybrid_kv.report.files import compact  # noqa: E402

CHUNK = 16384
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "vocab_size": 1024,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2**18,
}


def start(folder: str, context: int, chunk: int, settings: dict[str, Any] | None) -> Any:
    """VLLM's engine in this process, of random weights; with hybrid_kv where settings are given.

    Args:
        context: tokens of a request, at most. chunk: tokens of a step, at most.
    """
    from vllm import LLM

    extra = {} if settings is None else {"additional_config": {"hybrid_kv": settings}}
    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=context,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=False,
        **extra,
    )
    return llm.llm_engine


def engine(folder: str, tokens: int, settings: dict[str, Any] | None) -> Any:
    """An engine with random blocks in its cache, and an index of random rows."""
    started = start(folder, tokens + 512, min(CHUNK, tokens), settings)
    core = started.engine_core.engine_core
    free = core.scheduler.kv_cache_manager.block_pool.free_block_queue
    blocks = free.popleft_n(free.num_free_blocks)
    random.Random(0).shuffle(blocks)
    free.append_n(blocks)
    runner = core.model_executor.driver_worker.worker.model_runner
    (layer,) = runner.compilation_config.static_forward_context.values()
    some = torch.randn(64, *layer.kv_cache.shape[1:]).to(layer.kv_cache.dtype)
    for first in range(0, len(layer.kv_cache), len(some)):
        part = layer.kv_cache[first : first + len(some)]
        part.copy_(some[: len(part)])
    if settings is not None:
        from hybrid_kv.vllm.batch import as_blocks

        own = layer.impl.hybrid
        queries = torch.randn(512, 32, 128).to(layer.kv_cache.dtype)
        own.learn(as_blocks(layer.kv_cache), torch.randn(tokens, 8, 128), queries)
    return started


def skip_prompts(most: int) -> None:
    """Steps of more than `most` tokens pass the layer by."""
    from vllm.model_executor.models.llama import LlamaDecoderLayer

    forward = LlamaDecoderLayer.forward

    def short(self: Any, positions: Any, hidden_states: Any, residual: Any, *rest: Any) -> Any:
        if len(positions) > most:
            return hidden_states, hidden_states if residual is None else residual
        return forward(self, positions, hidden_states, residual, *rest)

    LlamaDecoderLayer.forward = short


def watch(name: str, owner: Any, spent: dict[str, float]) -> None:
    """Sum the time of a method of attention."""
    plain = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = thread_time()
        result = plain(*args, **kwargs)
        spent["attention"] += thread_time() - begin
        return result

    setattr(owner, name, timed)


def timed(step: Callable[[], Any], spent: dict[str, float]) -> tuple[float, float]:
    """Milliseconds of a step and of its attention."""
    spent["attention"] = 0.0
    begin = thread_time()
    step()
    return 1e3 * (thread_time() - begin), 1e3 * spent["attention"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", default="32k", help="context of each request")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--budget", default="128")
    options = parser.parse_args()
    tokens = parse_count(options.tokens)
    gib = -(-(tokens + 1024) * options.requests * 4096 // 2**30)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(gib)
    torch.set_num_threads(1)
    from transformers import LlamaConfig
    from vllm import SamplingParams
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from hybrid_kv.vllm.plugin import register

    register()
    from hybrid_kv.vllm.backend import HybridImpl

    folder = tempfile.mkdtemp()
    config = LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    skip_prompts(options.requests)
    engines = [engine(folder, tokens, None), engine(folder, tokens, {"budget": options.budget})]
    spent = {"attention": 0.0}
    for owner in (CPUAttentionBackendImpl, HybridImpl):
        watch("forward", owner, spent)
    params = SamplingParams(max_tokens=400, temperature=0, detokenize=False, ignore_eos=True)
    begin = perf_counter()
    for one in engines:
        for number in range(options.requests):
            draw = random.Random(number)
            ids = [draw.randrange(1024) for _ in range(tokens)]
            one.add_request(str(number), {"prompt_token_ids": ids}, params)
        for _ in range(options.requests * -(-tokens // CHUNK) + 4):
            one.step()
    print(f"prompts took {perf_counter() - begin:.0f} s", file=sys.stderr)
    rows = [[timed(one.step, spent) for one in engines] for _ in range(options.steps)]
    found: dict[str, Any] = {"tokens": tokens, "requests": options.requests}
    for place, part in enumerate(("step", "attention")):
        stock, ours = ([row[who][place] for row in rows] for who in (0, 1))
        found[part] = {
            "stock_ms": round(statistics.median(stock), 1),
            "hybrid_ms": round(statistics.median(ours), 2),
            "ratio": round(statistics.median(b / a for a, b in zip(stock, ours, strict=True)), 3),
        }
    print(compact(found))


if __name__ == "__main__":
    main()
