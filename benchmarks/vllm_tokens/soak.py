"""A soak of vLLM with hybrid_kv: requests come, share prefixes, are preempted and aborted.

    python benchmarks/vllm_tokens/soak.py FOLDER --minutes 20   # where vLLM is installed
    python benchmarks/vllm_tokens/soak.py FOLDER --minutes 20 --stock   # the same, of vLLM alone

A block holds NaN from the moment it is given to a request until it is written, so that whoever
reads what was there before says so: every output must be finite. Codes of random blocks are made
again and compared; a short request that comes again and again must get the same tokens; memory is
noted. `--stock` is the control: vLLM's own memory under the same requests.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from benchmarks.vllm_tokens.models import VOCAB, save_random
from benchmarks.vllm_tokens.run import engine
from hybrid_kv.ops.native.paged_cache import PagedSketch
from hybrid_kv.report.files import compact
from hybrid_kv.vllm import layer as layer_module
from hybrid_kv.vllm import settings as settings_module
from hybrid_kv.vllm.batch import as_blocks

LEAST = 512
"""Tokens from where a context is searched here, and an index learned: all goes faster so."""
SETTINGS = {"budget": "64", "window_tokens": 64}
LONGEST, AT_ONCE, CANARY = 2500, 14, 200


class Soak:
    """Requests of one engine, and what was counted."""

    def __init__(self, llm: Any, seed: int, stock: bool) -> None:
        self.core, self.draw = llm.llm_engine, random.Random(seed)
        inner = self.core.engine_core.engine_core
        runner = inner.model_executor.driver_worker.worker.model_runner
        forward = runner.compilation_config.static_forward_context.values()
        self.caches = [one.kv_cache for one in forward]
        self.layers = [] if stock else [one.impl.hybrid for one in forward]
        self.counts: Counter[str] = Counter()
        self.live: set[str] = set()
        self.prefixes = [self.tokens(n) for n in (64, 300, 700, 1100)]
        self.canary = self.tokens(CANARY)
        self.canaries: set[tuple[int, ...]] = set()
        pool, scheduler = inner.scheduler.kv_cache_manager.block_pool, inner.scheduler
        if not stock:  # whose kernel reads past the end of a context, with a weight of 0
            self._wrap(pool, "get_new_blocks", self._poison)
        self._wrap(scheduler, "_preempt_request", lambda _: self.counts.update(preempted=1))
        for one in self.layers:
            self._wrap(one, "forward", lambda _: None, self._check_output)

    def tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(VOCAB) for _ in range(count)]

    def step(self) -> None:
        """One step of the engine, and who comes and goes before it."""
        from vllm import SamplingParams

        draw, number = self.draw, self.counts["steps"]
        plain = {"temperature": 0, "detokenize": False, "ignore_eos": True}
        if len(self.live) < AT_ONCE:
            if number % 40 == 0:
                name, ids, most = f"canary {number}", self.canary, 8
            else:
                begin = draw.choice(self.prefixes) if draw.random() < 0.3 else []
                ids = begin + self.tokens(draw.randrange(20, LONGEST - len(begin)))
                name, most = str(number), draw.randrange(4, 120)
            self.core.add_request(
                name, {"prompt_token_ids": ids}, SamplingParams(max_tokens=most, **plain)
            )
            self.live.add(name)
            self.counts.update(requests=1, prompt_tokens=len(ids))
        if draw.random() < 0.03:
            name = draw.choice(sorted(self.live))
            if not name.startswith("canary"):
                self.core.abort_request([name])
                self.live.discard(name)
                self.counts.update(aborted=1)
        for output in self.core.step():
            if output.finished and output.request_id in self.live:
                self.live.discard(output.request_id)
                self.counts.update(finished=1)
                if output.request_id.startswith("canary"):
                    self.canaries.add(tuple(output.outputs[0].token_ids))
        self.counts.update(steps=1)

    def check_codes(self) -> None:
        """Codes of some blocks are those of the keys that lie there."""
        for layer, cache in zip(self.layers, self.caches, strict=bool(self.layers)):
            if layer.index is None:
                continue
            index, blocks = layer.index, as_blocks(cache)
            fresh = PagedSketch(blocks, index.maps)
            coded = np.flatnonzero(index.coded >= 16)
            for block in self.draw.sample(coded.tolist(), min(8, len(coded))):
                count = int(index.coded[block]) // 16 * 16
                fresh.encode(np.array([block], np.int32), count)
                same = torch.equal(
                    fresh.codes[block, :, : count // 16], index.codes[block, :, : count // 16]
                )
                self.counts.update(blocks_checked=1, blocks_wrong=not same)

    def _poison(self, blocks: Any) -> None:
        with torch.inference_mode():
            for block in blocks:
                for cache in self.caches:
                    cache[block.block_id] = torch.nan
        self.counts.update(poisoned=len(blocks))

    def _check_output(self, blocks: Any, query: Any, output: Any, batch: Any, kernel: Any) -> None:
        self.counts.update(
            forwards=1,
            searched=0 if batch.searched is None else len(batch.searched.sequences),
            not_finite=not bool(output[: len(query)].isfinite().all()),
        )

    @staticmethod
    def _wrap(owner: Any, name: str, after: Any, check: Any = None) -> None:
        plain = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            after(result)
            if check is not None:
                check(*args, **kwargs)
            return result

        setattr(owner, name, wrapped)


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGESIZE") / 2**20, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where models.py has written")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stock", action="store_true", help="vLLM alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    from hybrid_kv.vllm.plugin import register

    register()
    settings_module.LEAST_SEARCHED = layer_module.LEARN_TOKENS = LEAST
    folder = options.folder / "llama"
    if not (folder / "config.json").exists():
        save_random("llama", folder)
    blocks = 4 * LONGEST // 128  # for most of the requests: the others are preempted
    settings = None if options.stock else SETTINGS
    llm = engine(folder, settings, LONGEST + 200, num_gpu_blocks_override=blocks)
    soak = Soak(llm, options.seed, options.stock)
    begin = perf_counter()
    every, memory = options.minutes * 60 / 24, [(0.0, 0, resident_mib())]
    while (now := perf_counter() - begin) < options.minutes * 60:
        soak.step()
        if soak.counts["steps"] % 50 == 0:
            soak.check_codes()
        if now > len(memory) * every:
            memory.append((round(now / 60, 1), soak.counts["requests"], resident_mib()))
            print(memory[-1], dict(soak.counts), file=sys.stderr)
    half = [mib for minute, _, mib in memory if minute > options.minutes / 2]
    found = {
        "benchmark": "vllm_soak",
        "stock": options.stock,
        "minutes": options.minutes,
        **soak.counts,
        "canary_answers": len(soak.canaries),
        "moments_kept": [len(one.moments) for one in soak.layers],
        "grown_in_second_half_mib": round(max(half) - half[0], 1) if half else None,
        "memory": [dict(zip(("minute", "requests", "mib"), one, strict=True)) for one in memory],
    }
    print(compact(found))


if __name__ == "__main__":
    main()
