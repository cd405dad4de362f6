"""How near the streaming kernels come to the rate at which one core reads memory.

    python benchmarks/cold_kernels/run.py --kernels flat,pages,attend --keys 4k,16k,128k

All data is read cold: a call serves the KV heads of one layer, and layers are visited in turn until
they exceed the last cache several times. The stream rate is measured between the repeats of every
row, because a shared machine changes it. Stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.config import parse_count
from hybrid_kv.ops import reference_pages
from hybrid_kv.ops.host_memory import host_array
from hybrid_kv.ops.native.attend import RetrievedAttention
from hybrid_kv.ops.native.library import Pool
from hybrid_kv.ops.native.rows import QuantisedKeys
from hybrid_kv.ops.native.scans import FlatScan, stream
from hybrid_kv.ops.native.selected import PageDigests
from hybrid_kv.report.files import compact
from hybrid_kv.report.run import probe_environment

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
CLOCKS = {"cpu": time.thread_time, "wall": time.perf_counter}
SCALE = 0.09
Row = dict[str, Any]
Calls = list[Callable[[], object]]


class Bench:
    """Times a round of calls, with the stream rate of the same moments."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.clock = options, CLOCKS[options.clock]
        self.pool = Pool(options.threads) if options.threads > 1 else None
        self._buffer = host_array([256 * 2**20], torch.uint8).fill_(1)

    def stream_gbps(self) -> float:
        begin = self.clock()
        stream(self._buffer)
        return self._buffer.numel() / (self.clock() - begin) / 1e9

    def row(self, calls: Calls, bytes_per_call: float, **what: Any) -> Row:
        """us_per_query_head, and bytes read once per KV head against the stream rate."""
        for call in calls:
            call()
        times, rates = [], []
        for _ in range(self.options.repeats):
            begin = self.clock()
            for call in calls:
                call()
            times.append((self.clock() - begin) / len(calls))
            rates.append(self.stream_gbps())
        seconds, rate = statistics.median(times), statistics.median(rates)
        result = {
            **what,
            "us_per_query_head": seconds * 1e6 / (self.options.kv_heads * what["group"]),
            "us_per_query_head_least": min(times) * 1e6 / (self.options.kv_heads * what["group"]),
            "gbps": bytes_per_call / seconds / 1e9,
            "stream_gbps": rate,
            "stream_ratio": bytes_per_call / seconds / 1e9 / rate,
        }
        print("  ".join(f"{k} {_short(v)}" for k, v in result.items()), file=sys.stderr, flush=True)
        return result

    def layers(self, layer_bytes: float) -> int:
        return max(2, int(self.options.working_set * 2**20 / layer_bytes))


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def filled(size: list[int], dtype: torch.dtype) -> Tensor:
    array = host_array(size, dtype)
    for head in array:
        head.copy_(torch.randn(head.shape))
    return array


def flat(bench: Bench, count: int, group: int) -> Iterator[Row]:
    heads, dim = bench.options.kv_heads, bench.options.head_dim
    queries, top_k = torch.randn(heads, group, dim), min(100, count)
    for name, dtype in DTYPES.items():
        layer_bytes = heads * count * dim * dtype.itemsize
        scans = [
            FlatScan(filled([heads, count, dim], dtype)) for _ in range(bench.layers(layer_bytes))
        ]
        calls: Calls = [lambda s=s: s.search(queries, top_k, pool=bench.pool) for s in scans]  # type: ignore[misc]
        yield bench.row(calls, layer_bytes, kernel="flat", keys=count, group=group, precision=name)
    for rerank in (0, 150):
        layer_bytes = heads * count * (dim + 4)
        scans = []
        for _ in range(bench.layers(layer_bytes * (1 + 2 * bool(rerank)))):
            keys = filled([heads, count, dim], torch.bfloat16)
            quantised = QuantisedKeys(heads, dim)
            quantised.build(keys)
            scans.append(FlatScan(keys, quantised))
        wanted = top_k if rerank else min(150, count)
        calls = [
            lambda s=s, w=wanted, r=rerank: s.search(queries, w, rerank=r, pool=bench.pool)  # type: ignore[misc]
            for s in scans
        ]
        what = {"kernel": "flat", "keys": count, "group": group, "precision": "int8"}
        yield bench.row(calls, layer_bytes, **what, rerank=rerank)


def pages(bench: Bench, count: int, group: int) -> Iterator[Row]:
    heads, dim = bench.options.kv_heads, bench.options.head_dim
    num_pages = max(1, count // 16)
    layer_bytes = heads * num_pages * 2 * dim * 2
    queries = torch.randn(heads, group, dim)
    ends = []
    for _ in range(bench.layers(layer_bytes)):
        both = filled([heads, num_pages, 2 * dim], torch.bfloat16)
        ends.append((both[..., :dim], both[..., :dim] + both[..., dim:].abs()))
    wanted = min(64, num_pages)
    engine = [PageDigests(*pair) for pair in ends]
    rows: dict[str, Calls] = {
        "search": [lambda e=e: e.search(queries, wanted, pool=bench.pool) for e in engine],  # type: ignore[misc]
        "torch": [
            lambda p=p: reference_pages.page_scores(queries, *p).topk(wanted, -1, sorted=False)  # type: ignore[misc]
            for p in ends
        ],
    }
    for name, calls in rows.items():
        yield bench.row(calls, layer_bytes, kernel="pages", keys=count, group=group, by=name)


def attend(bench: Bench, count: int, group: int) -> Iterator[Row]:
    heads, dim, num_ids = bench.options.kv_heads, bench.options.head_dim, bench.options.ids
    if count < group * num_ids:
        return
    keys, values = (filled([heads, count, dim], torch.bfloat16) for _ in range(2))
    attention = RetrievedAttention(keys, values)
    queries = torch.randn(heads, group, dim)
    for common in (0.0, 0.9) if group > 1 else (0.0,):
        lists = [_ids(heads, group, num_ids, count, common) for _ in range(8)]
        calls: Calls = [
            lambda ids=ids: attention.attend(queries, ids, scale=SCALE, pool=bench.pool)  # type: ignore[misc]
            for ids in lists
        ]
        distinct = sum(len(head.unique()) for ids in lists for head in ids) / len(lists)
        what = {"kernel": "attend", "keys": count, "group": group, "ids": num_ids}
        yield bench.row(calls, distinct * dim * 2 * 2, **what, common=common)


def _ids(heads: int, group: int, num_ids: int, count: int, common: float) -> Tensor:
    """[heads, group, num_ids], of which a share is the same in all rows of a group."""
    shared = int(common * num_ids)
    own = num_ids - shared
    result = torch.empty(heads, group, num_ids, dtype=torch.int64)
    for head in range(heads):
        some = torch.randperm(count)
        for row in range(group):
            rest = some[shared + row * own : shared + (row + 1) * own]
            ids = torch.cat([some[:shared], rest])
            result[head, row] = ids[torch.randperm(num_ids)]
    return result


KERNELS = {"flat": flat, "pages": pages, "attend": attend}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--keys", default="4k,16k,128k")
    parser.add_argument("--groups", default="1,4")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--ids", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--working-set", type=int, default=256, help="MiB of layers in turn")
    parser.add_argument("--clock", choices=list(CLOCKS), default="cpu")
    options = parser.parse_args()
    if options.threads > 1 and options.clock == "cpu":
        parser.error("several threads are timed by the wall; add --clock wall")
    torch.set_num_threads(1)
    bench = Bench(options)
    rows = [
        row
        for kernel in options.kernels.split(",")
        for count in options.keys.split(",")
        for group in options.groups.split(",")
        for row in KERNELS[kernel](bench, parse_count(count), int(group))
    ]
    environment = probe_environment().model_dump(mode="json")
    load = os.getloadavg()[0]
    document = {"benchmark": "cold_kernels", "settings": vars(options), "load": load, "rows": rows}
    print(compact({**document, "environment": environment}), end="")


if __name__ == "__main__":
    main()
