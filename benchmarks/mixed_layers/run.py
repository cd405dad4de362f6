"""What a search of a layer costs when some of its heads have a graph and the others are scanned.

    python benchmarks/mixed_layers/run.py --context 128k --threads 1,2

The graph of one made-up head (hybrid_kv/eval/synthetic.py) is learned once and serves several heads
from copies in memory of their own, so that no head warms the cache for another; the other heads
have no graph. Every round asks each layer one position after the other, in turn. With one thread
the figure is the CPU time of the calling thread, else wall time. Stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.config import IndexConfig, parse_count
from hybrid_kv.eval.synthetic import PROFILES, SyntheticHead
from hybrid_kv.index._trial import HeadReport
from hybrid_kv.index.graph import GraphIndex
from hybrid_kv.ops.key_graph import KeyGraph, no_graph
from hybrid_kv.ops.native import engine_state
from hybrid_kv.ops.native import library as pools
from hybrid_kv.report.files import compact

HEADS, GROUP, TOP_K = 8, 4, 100
LEARNED_POSITIONS = 6144


def learn(args: argparse.Namespace) -> dict[str, Any]:
    """Keys [N, D] bfloat16, the graph over them with its beam, and later queries [M, G, D]."""
    head = SyntheticHead(PROFILES[args.profile], args.context, num_q_heads=GROUP)
    positions = torch.linspace(0, args.context - 1, LEARNED_POSITIONS).long()
    samples = torch.stack([head.build_queries(q, positions) for q in range(GROUP)])
    keys = head.keys.to(torch.bfloat16)
    index: GraphIndex = IndexConfig(kind="graph", max_scanned=1.0, recent_queries=1).build()
    index.build(keys[None], samples[None].to(torch.bfloat16))
    (graph,), (report,) = index._graphs, index.reports
    print(report.serves, report.reason, file=sys.stderr)
    rows = torch.arange(args.positions)
    queries = torch.stack([head.test_queries(q, rows) for q in range(GROUP)], 1)
    return {
        "keys": keys,
        "graph": (graph.keys_of, graph.lists, graph.entries, graph.num_keys, graph.degree),
        "beam": report.beam,
        "reason": report.reason,
        "queries": queries,
    }


def layer(learned: dict[str, Any], with_graph: int) -> GraphIndex:
    """A layer of which the first heads have the graph."""
    *arrays, num_keys, degree = learned["graph"]

    def copied() -> KeyGraph:
        return KeyGraph(*(array.clone() for array in arrays), num_keys=num_keys, degree=degree)

    index: GraphIndex = IndexConfig(kind="graph").build()
    index._known = learned["keys"][None].repeat(HEADS, 1, 1)
    index.reports = tuple(
        HeadReport("graph", "", learned["beam"]) if head < with_graph else HeadReport("flat", "")
        for head in range(HEADS)
    )
    index._serve(tuple(copied() if head < with_graph else no_graph() for head in range(HEADS)))
    return index


def timed(search: Callable[[], Any], clock: Callable[[], float]) -> float:
    begin = clock()
    search()
    return 1e3 * (clock() - begin)


def measure(
    layers: dict[str, GraphIndex], queries: Tensor, clock: Callable[[], float]
) -> dict[str, dict[str, Any]]:
    """Milliseconds of a search by layer: median and fastest tenth; keys read, and recall."""
    times: dict[str, list[float]] = {name: [] for name in layers}
    exact = next(reversed(layers.values()))
    found: dict[str, list[float]] = {name: [] for name in layers}
    rows: dict[str, list[int]] = {name: [] for name in layers}
    for position in queries:
        asked = position[None].repeat(HEADS, 1, 1)
        wanted = exact.search(asked, TOP_K).ids
        for name, index in layers.items():
            index.search(asked, TOP_K)  # the pool is awake, the keys of others are not at hand
            times[name].append(timed(lambda i=index, q=asked: i.search(q, TOP_K), clock))
            result = index.search(asked, TOP_K)
            rows[name].append(result.rows_read or 0)
            hits = (result.ids[..., :, None] == wanted[..., None, :]).any(-1)
            found[name].append(float(hits.float().mean()))
    return {
        name: {
            "median_ms": median(times[name]),
            "p10_ms": sorted(times[name])[len(times[name]) // 10],
            "rows": median(rows[name]),
            "agrees_with_scan": sum(found[name]) / len(found[name]),
        }
        for name in layers
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--context", type=parse_count, default=2**17)
    parser.add_argument("--profile", choices=PROFILES, default="paper")
    parser.add_argument("--graphs", default="8,7,4,0", help="heads with a graph, by layer")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--positions", type=int, default=40)
    parser.add_argument("--learned", type=Path, help="keep the graph here, and take it from here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.learned and args.learned.exists():
        learned = torch.load(args.learned)
    else:
        learned = learn(args)
        if args.learned:
            torch.save(learned, args.learned)
    counts = [int(count) for count in args.graphs.split(",")]
    layers = {f"{count}+{HEADS - count}": layer(learned, count) for count in counts}
    table = {}
    for threads in map(int, args.threads.split(",")):
        pool = pools.Pool(threads)
        pools.default_pool = lambda pool=pool: pool
        clock = thread_time if threads == 1 else perf_counter
        table[threads] = measure(layers, learned["queries"][: args.positions], clock)
        for name, row in table[threads].items():
            cells = ", ".join(f"{key} {value:.4g}" for key, value in row.items())
            print(f"{threads} threads, {name}: {cells}", file=sys.stderr)
    report = {
        "benchmark": "mixed_layers",
        "settings": {key: str(value) for key, value in vars(args).items()},
        "isa": engine_state().isa,
        "head": learned["reason"],
        "threads": table,
    }
    print(compact(report), end="")


if __name__ == "__main__":
    main()
