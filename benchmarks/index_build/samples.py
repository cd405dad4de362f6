"""How many samples of a prompt an index has to learn from, on made-up heads.

Graph and sketch learn from M spread positions and the last M, turned to where decoding will ask,
and are asked for later queries. A line each: recall@100 and softmax mass, what the self-check
promised, keys read by a group, seconds of one thread to build. `uniform` and `tiers` are sketches
whose codes are given, 32 bytes a key or tiers. Stdout is one JSON document.

    HYBRID_KV_THREADS=1 .venv/bin/python benchmarks/index_build/samples.py --keys 128k
"""

from __future__ import annotations

import argparse
import os
import sys
from time import thread_time
from typing import Any

import torch

from hybrid_kv.config import IndexConfig, parse_count
from hybrid_kv.eval.synthetic import PROFILES, SyntheticHead
from hybrid_kv.plugins import Index
from hybrid_kv.report.files import compact

TOP_K, ASKED, HORIZON = 100, 512, 4096
KINDS: dict[str, dict[str, Any]] = {
    "graph": {"kind": "graph", "min_keys": 1, "max_scanned": 1},
    "sketch": (sketch := {"kind": "sketch", "min_keys": 1, "gain": 0}),
    "uniform": {**sketch, "codes": "32"},
    "tiers": {**sketch, "codes": "tiers"},
}


def measure(made: SyntheticHead, kind: str, count: int, positions: int) -> dict[str, Any]:
    """One kind, learned from `count` spread and as many last positions."""
    num_keys = len(made.keys)
    settings = {**KINDS[kind], "sampled_queries": count, "recent_queries": count}
    index: Index = IndexConfig(**settings).build()
    spread = torch.arange(count) * num_keys // count
    rows = torch.cat([spread, torch.arange(num_keys - count, num_keys)])
    samples = made.build_samples(rows, HORIZON).queries.bfloat16()
    keys = made.keys.bfloat16()[None]
    begin = thread_time()
    index.build(keys, samples)
    build_s = thread_time() - begin
    asked = torch.arange(positions) * ASKED // positions
    later = torch.stack([made.test_queries(head, asked) for head in range(made.num_q_heads)], 1)
    recalls, masses, read = [], [], 0
    scale = keys.shape[2] ** -0.5
    for group in later:
        exact = group @ keys[0].float().T
        best = exact.topk(TOP_K)
        found = index.search(group[None], TOP_K)
        read += found.rows_read or found.scored
        ids = found.ids[0]
        recalls.append((ids[:, :, None] == best.indices[:, None]).any(1).float().mean())
        scores = exact.gather(1, ids.clamp_min(0)).masked_fill(ids < 0, -torch.inf)
        ratio = (scale * scores).logsumexp(1) - (scale * best.values).logsumexp(1)
        masses.append(ratio.exp().mean())
    (report,) = index.describe()
    return {
        "samples": count,
        "kind": kind,
        "serves": report["serves"],
        "recall": float(torch.stack(recalls).mean()),
        "mass": float(torch.stack(masses).mean()),
        "promise": report["recall"],
        "read_ratio": read / positions / num_keys,
        "bytes_per_key": index.memory_bytes / num_keys,
        "build_s": build_s,
        "reason": report["reason"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=parse_count, default=2**17)
    parser.add_argument("--data", default="paper,stress")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--samples", default="1024,2048,4096")
    parser.add_argument("--kinds", default="graph,sketch", help="of " + ", ".join(KINDS))
    parser.add_argument("--positions", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    print("| head | kind | samples | served by | recall | mass | promise | read | build, s |")
    for data in options.data.split(","):
        for seed in map(int, options.seeds.split(",")):
            made = SyntheticHead(PROFILES[data], options.keys, weight_seed=seed, text_seed=seed)
            for kind in options.kinds.split(","):
                for count in map(int, options.samples.split(",")):
                    row = measure(made, kind, count, options.positions)
                    results.append({"data": data, "seed": seed, "keys": options.keys, **row})
                    told = f"{row['recall']:.3f} | {row['mass']:.4f} | {row['promise']:.3f}"
                    print(
                        f"| {data} {seed} | {kind} | {count} | {row['serves']} | {told} | "
                        f"{row['read_ratio']:.1%} | {row['build_s']:.2f} |",
                        file=sys.stderr,
                        flush=True,
                    )
    threads = os.environ.get("HYBRID_KV_THREADS", "")
    print(compact({"threads": threads, "rows": results}), end="")


if __name__ == "__main__":
    main()
