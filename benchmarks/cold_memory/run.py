"""What a cold token costs in host memory: bytes held, and pages the system really committed.

    python benchmarks/cold_memory/run.py --context 64k

Fills one layer of a shape through the store and compares two numbers with the raw KV bytes: what
the store counts and what the process grew by; then the same after 4K more tokens left the window
page by page. Stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import sys
from typing import Any

import psutil
import torch

from hybrid_kv.config import parse_count
from hybrid_kv.report.files import compact
from hybrid_kv.store import ColdStore
from hybrid_kv.types import LayerShape

PAGE = 16


def resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def measure(shape: LayerShape, tokens: int, added: int) -> list[dict[str, Any]]:
    """Bytes per raw KV byte after a prompt of `tokens` and after `added` more, in pages."""
    dtype = torch.bfloat16
    raw_per_token = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    stage = torch.ones(shape.num_kv_heads, PAGE, shape.head_dim, dtype=dtype)
    # One key, seen `tokens` times: the source itself takes no memory.
    prompt = stage[:, :1].expand(-1, tokens, -1)
    warm = ColdStore(shape, dtype, num_rows=1)
    warm.chains[0].append(prompt[:, :4096], prompt[:, :4096], torch.arange(4096), None)
    del warm
    before = resident_bytes()
    store = ColdStore(shape, dtype, num_rows=1)
    store.chains[0].append(prompt, prompt, torch.arange(tokens), None)
    rows = [_row("prompt", store, tokens * raw_per_token, before)]
    for start in range(tokens, tokens + added, PAGE):
        store.chains[0].append(stage, stage, torch.arange(start, start + PAGE), None)
    rows.append(_row("grown", store, (tokens + added) * raw_per_token, before))
    return rows


def _row(stage: str, store: ColdStore, raw: int, before: int) -> dict[str, Any]:
    counted = store.kv_bytes + store.overhead_bytes
    committed = resident_bytes() - before
    return {
        "stage": stage,
        "raw_bytes": raw,
        "counted_ratio": counted / raw,
        "committed_ratio": committed / raw,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--context", default="64k")
    parser.add_argument("--added", default="4k")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    options = parser.parse_args()
    shape = LayerShape(0, options.kv_heads, options.kv_heads, options.head_dim)
    rows = measure(shape, parse_count(options.context), parse_count(options.added))
    for row in rows:
        print(
            f"{row['stage']:<7} raw {row['raw_bytes'] / 2**20:8.1f} MiB  counted "
            f"{row['counted_ratio']:.4f}x  committed {row['committed_ratio']:.4f}x",
            file=sys.stderr,
        )
    print(compact({"benchmark": "cold_memory", "settings": vars(options), "rows": rows}), end="")


if __name__ == "__main__":
    main()
