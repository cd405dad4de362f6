"""Products of packed weights beside 16-bit linear layers and llama.cpp, from memory.

    python benchmarks/packed_products/run.py --kinds Q4_K,Q4_0 --tokens 1,8,512 --llama FOLDER

Sides take turns, each with copies of the weights of its own, so that no weights lie in a cache.
Stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hybrid_kv.models.packed_linear import wide_product
from hybrid_kv.ops.native import linear
from hybrid_kv.ops.native.library import Pool
from hybrid_kv.ops.native.linear import PACKED_KINDS, PackedWeight, packed_linear
from hybrid_kv.ops.native.scans import stream
from hybrid_kv.report.files import compact
from hybrid_kv.report.run import probe_environment

SCALES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Places of 16-bit floats in a block; others have one at its beginning."""
Call = Callable[[], object]


class Bench:
    """The sides of one shape, and their times."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.clock = time.thread_time if options.threads == 1 else time.perf_counter
        self.pool = Pool(options.threads) if options.threads > 1 else None
        self.ggml = options.llama and llama_cpp.Ggml(options.llama, options.threads)
        self._buffer = torch.ones(256 * 2**20, dtype=torch.uint8)

    def blocks(self, kind: str) -> Tensor:
        known = PACKED_KINDS[kind]
        shape = (self.options.rows, self.options.columns // known.values, known.bytes)
        draw = np.random.default_rng(0)
        blocks = draw.integers(0, 256, shape, dtype=np.uint8)
        for place in SCALES.get(kind, (0,)):
            scales = draw.uniform(0.001, 0.002, shape[:2]).astype(np.float16)
            blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
        return torch.from_numpy(blocks.reshape(shape[0], -1))

    def copies(self, num_bytes: int) -> int:
        return max(2, -(-self.options.working_set * 2**20 // num_bytes))

    def packed(self, kind: str, blocks: Tensor, x: Tensor, exact: bool) -> Call:
        copies = range(self.copies(blocks.numel()))
        weights = cycle([PackedWeight(kind, blocks.clone(), x.shape[1]) for _ in copies])
        return lambda: packed_linear(x, next(weights), exact=exact, pool=self.pool)

    def narrow(self, x: Tensor, with_engine: bool) -> Call | None:
        x = x.bfloat16()
        size = (self.options.rows, self.options.columns)
        weight = (torch.randn(size) * 0.02).bfloat16()
        if with_engine and not linear.multiplies(x, weight, None):
            return None
        weights = cycle([weight.clone() for _ in range(self.copies(2 * weight.numel()))])
        if with_engine:
            return lambda: linear.linear(x, next(weights), pool=self.pool)
        return lambda: functional.linear(x, next(weights))

    def sides(self, kind: str, tokens: int) -> dict[str, Call]:
        x, blocks = torch.randn(tokens, self.options.columns), self.blocks(kind)
        found: dict[str, Call | None] = {"ours": self.packed(kind, blocks, x, exact=False)}
        if self.options.exact:
            found["ours, exact"] = self.packed(kind, blocks, x, exact=True)
        if self.options.float32:
            weights = cycle([PackedWeight(kind, blocks.clone(), x.shape[1]) for _ in range(2)])
            found["ours, float32"] = lambda: wide_product(x, next(weights))
        if self.options.narrow:
            found["bf16 engine"] = self.narrow(x, with_engine=True)
            found["bf16 torch"] = self.narrow(x, with_engine=False)
        if self.ggml:
            wanted = packed_linear(x, PackedWeight(kind, blocks, x.shape[1]), exact=True).numpy()
            for name, repacked in (("llama.cpp", False), ("llama.cpp, repacked", True)):
                found[name] = side = self.ggml.products(
                    *(PACKED_KINDS[kind].number, blocks.numpy(), x.numpy()),
                    *(self.copies(blocks.numel()), repacked),
                )
                if side is not None:
                    error = np.linalg.norm(side.outputs() - wanted) / np.linalg.norm(wanted)
                    if not error < 0.03:
                        raise SystemExit(f"{name} has other products of {kind}: error {error}")
        return {name: side for name, side in found.items() if side is not None}

    def rows(self, kind: str, tokens: int) -> list[dict[str, Any]]:
        sides = self.sides(kind, tokens)
        times: dict[str, list[float]] = {name: [] for name in sides}
        rates = []
        for turn in range(self.options.repeats + 1):
            for name, call in sides.items():
                begin = self.clock()
                call()
                if turn > 0:
                    times[name].append(1e3 * (self.clock() - begin))
            begin = self.clock()
            stream(self._buffer)
            rates.append(self._buffer.numel() / (self.clock() - begin) / 1e9)
        num_bytes = self.options.rows * PACKED_KINDS[kind].row_bytes(self.options.columns)
        rows = []
        for name, taken in times.items():
            quarter = sorted(taken)[len(taken) // 4]
            row = {
                "kind": kind,
                "tokens": tokens,
                "side": name,
                "ms": quarter,
                "ms_least": min(taken),
            }
            if "bf16" not in name:
                row["gbps"] = num_bytes / quarter / 1e6
            row["gmacs"] = self.options.rows * self.options.columns * tokens / quarter / 1e6
            row["stream_gbps"] = statistics.median(rates)
            rows.append(row)
            print(
                "  ".join(f"{k} {_short(v)}" for k, v in row.items()), file=sys.stderr, flush=True
            )
        return rows


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kinds", default=",".join(PACKED_KINDS))
    parser.add_argument("--tokens", default="1,2,4,8,16,512")
    parser.add_argument("--rows", type=int, default=14336)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--working-set", type=int, default=512, help="MiB of copies of each side")
    parser.add_argument("--exact", action="store_true", help="also the exact mode")
    parser.add_argument("--float32", action="store_true", help="also unpacked piece by piece")
    parser.add_argument("--narrow", action="store_true", help="also 16-bit weights")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp's shared libraries")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bench = Bench(options)
    rows = [
        row
        for kind in options.kinds.split(",")
        for tokens in options.tokens.split(",")
        for row in bench.rows(kind, int(tokens))
    ]
    settings = {name: str(value) for name, value in vars(options).items()}
    document = {
        **{"benchmark": "packed_products", "settings": settings, "load": os.getloadavg()[0]},
        "llama_cpp": bench.ggml.build if bench.ggml else None,
        "rows": rows,
    }
    print(compact({**document, "environment": probe_environment().model_dump(mode="json")}), end="")


if __name__ == "__main__":
    main()
