"""What a search by sketch costs beside the int8 flat scan of the same keys, cold and hot.

    HYBRID_KV_ISA=avx512 python benchmarks/cold_sketch/run.py --keys 128k --rerank 200,400

A call searches some KV heads of a layer, with a group of query heads each. Cold: copies of them are
visited in turn until they exceed the last cache; hot: one copy again and again (with one KV head it
fits into caches). Keys are random numbers and
maps random rotations: this says what a search costs and nothing of what it finds. Rows are timed in
turn, round by round, with the stream rate of the same moments; figures are medians of rounds.
Stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.config import parse_count
from hybrid_kv.ops.host_memory import host_array
from hybrid_kv.ops.native.library import engine_state
from hybrid_kv.ops.native.rows import QuantisedKeys
from hybrid_kv.ops.native.scans import FlatScan, SketchSearcher, SketchTier, stream
from hybrid_kv.ops.sketch_codes import SketchMap, SketchPlan, pack_tiers
from hybrid_kv.report.files import compact
from hybrid_kv.report.run import probe_environment

PLANS = {
    16: SketchPlan(((4, 8), (24, 4))),
    32: SketchPlan(((8, 8), (32, 4), (32, 2))),
    64: SketchPlan(((16, 8), (96, 4))),
}
SHAPES = {
    "16/32/64": ((16, 32, 64), (0.6, 0.3, 0.1)),
    "16": ((16,), ()),
    "32": ((32,), ()),
    "64": ((64,), ()),
}
STEPS = {8: 8 / 255, 4: 0.335 * 1.5, 2: 0.996 * 1.5}
TOP_K = 100


def rotation(plan: SketchPlan, dim: int) -> SketchMap:
    """A random rotation of keys whose channels have a deviation of 1."""
    basis = torch.linalg.qr(torch.randn(dim, dim))[0][: plan.num_dims]
    steps = torch.cat([torch.full((dims,), STEPS[bits]) for dims, bits in plan.groups])[:, None]
    return SketchMap(plan, basis / steps, torch.zeros(plan.num_dims), basis * steps)


def tiers_of(keys: Tensor, sizes: tuple[int, ...], shares: tuple[float, ...]) -> list[SketchTier]:
    maps = [rotation(PLANS[size], keys.shape[1]) for size in sizes]
    if not shares:
        tier = SketchTier(maps[0], with_ids=False)
        tier.append(keys)
        return [tier]
    draw = torch.rand(len(keys))
    tiers, low = [], 0.0
    for one, share in zip(maps, shares, strict=True):
        tier = SketchTier(one, with_ids=True)
        tier.append(keys, ((draw >= low) & (draw < low + share)).nonzero()[:, 0])
        tiers.append(tier)
        low += share
    return tiers


Call = Callable[[], object]


class Row:
    """One kind of search: a call per copy of the head."""

    def __init__(
        self, name: str, code_bytes: float, calls: list[Call], build_s: float = 0.0
    ) -> None:
        self.name, self.code_bytes, self.calls, self.build_s = name, code_bytes, calls, build_s
        self.cold: list[float] = []
        self.hot: list[float] = []

    def measure(self) -> None:
        for call in self.calls[-2:]:  # its own code and scratch are warm
            call()
        begin = time.thread_time()
        for call in self.calls:
            call()
        self.cold.append((time.thread_time() - begin) / len(self.calls))
        self.calls[0]()
        begin = time.thread_time()
        for _ in range(3):
            self.calls[0]()
        self.hot.append((time.thread_time() - begin) / 3)


def make_rows(options: argparse.Namespace, count: int) -> list[Row]:
    """The int8 scan, and each shape of tiers with each number of candidates."""
    dim, group, copies = options.head_dim, options.group, options.copies
    heads = options.kv_heads
    queries = torch.randn(heads, group, dim)
    keys = [host_array([heads, count, dim], torch.bfloat16) for _ in range(copies)]
    for one in keys:
        for rows in one:
            rows.copy_(torch.randn(rows.shape))
    scans: list[Call] = []
    begin = time.thread_time()
    for one in keys:
        quantised = QuantisedKeys(heads, dim)
        quantised.build(one)
        scans.append(partial(FlatScan(one, quantised).search, queries, TOP_K, rerank=150))
    rows = [Row("int8", dim + 4, scans, (time.thread_time() - begin) / copies / heads)]
    for name in options.shapes.split(","):
        sizes, shares = SHAPES[name]
        begin = time.thread_time()
        tiers = [[tiers_of(rows, sizes, shares) for rows in one] for one in keys]
        for own in tiers:
            pack_tiers(tier for head in own for tier in head)
        build_s = (time.thread_time() - begin) / copies / heads
        code_bytes = sum(tier.memory_bytes for tier in tiers[0][0]) / count
        for rerank in map(int, options.rerank.split(",")):
            calls: list[Call] = [
                partial(
                    SketchSearcher(list(one), own).search,
                    queries,
                    TOP_K,
                    num_rerank=[rerank] * heads,
                )
                for one, own in zip(keys, tiers, strict=True)
            ]
            rows.append(Row(f"sketch {name}, m = {rerank}", code_bytes, calls, build_s))
    return rows


def stream_gbps(buffer: Tensor) -> float:
    begin = time.thread_time()
    stream(buffer)
    return buffer.numel() / (time.thread_time() - begin) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--keys", default="128k")
    parser.add_argument("--kv-heads", type=int, default=4, help="searched by a call")
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rerank", default="200,400")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    count = parse_count(options.keys)
    rows = make_rows(options, count)
    buffer = host_array([256 * 2**20], torch.uint8).fill_(1)
    rates = []
    for _ in range(options.repeats):
        for row in rows:
            row.measure()
        rates.append(stream_gbps(buffer))
    rate = statistics.median(rates)
    results = []
    for row in rows:
        ratios = [flat / own for flat, own in zip(rows[0].cold, row.cold, strict=True)]
        hot_ratios = [flat / own for flat, own in zip(rows[0].hot, row.hot, strict=True)]
        cold, hot = statistics.median(row.cold), statistics.median(row.hot)
        cold, hot = cold / options.kv_heads, hot / options.kv_heads
        gbps = count * row.code_bytes / cold / 1e9
        result: dict[str, Any] = {
            "search": row.name,
            "bytes_per_key": row.code_bytes,
            "cold_us_per_query_head": cold * 1e6 / options.group,
            "cold_ratio": statistics.median(ratios),
            "hot_us_per_query_head": hot * 1e6 / options.group,
            "hot_ratio": statistics.median(hot_ratios),
            "gbps": gbps,
            "stream_ratio": gbps / rate,
            "build_s": row.build_s,
        }
        results.append(result)
        print("  ".join(_short(value) for value in result.values()), file=sys.stderr, flush=True)
    document = {
        "benchmark": "cold_sketch",
        "settings": vars(options),
        "isa": engine_state().isa,
        "stream_gbps": rate,
        "load": os.getloadavg()[0],
        "rows": results,
    }
    print(compact({**document, "environment": probe_environment().model_dump(mode="json")}), end="")


def _short(value: object) -> str:
    return f"{value:8.3g}" if isinstance(value, float) else f"{value!s:24}"


if __name__ == "__main__":
    main()
