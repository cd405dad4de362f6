"""What every index kind finds on the heads of a real language model, against what it promises.

SmolLM2-135M-Instruct (extra smollm2) reads a text; the queries of its last positions take no part
in any build. Everything else is as in the runtime: keys but sinks and window, samples turned to
where decoding will ask. A line per kind: distribution over heads of recall@100, of the softmax mass
of what was found over that of the exact best 100, of the promise less the truth; rows read, bytes
and seconds of one thread to build.

    .venv/bin/python benchmarks/real_model/heads.py --tokens 8192 --heads 30
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from time import thread_time
from typing import Any, NamedTuple

if __name__ == "__main__":  # a script: the other benchmarks' folder is beside its own
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

import hybrid_kv as hkv
from benchmarks.real_model.text import prose
from hybrid_kv.config import HybridConfig, IndexConfig
from hybrid_kv.contest import prompts
from hybrid_kv.plugins import Index
from hybrid_kv.report.files import compact
from hybrid_kv.types import Evidence, Needs

SINKS, WINDOW, ASKED, TOP_K = 16, 512, 512, 100
KINDS: dict[str, dict[str, Any]] = {
    "flat int8": {"kind": "flat", "precision": "int8"},
    "graph, as asked": {"kind": "graph", "min_keys": 1, "max_scanned": 1, "horizon_tokens": 0},
    "graph": {"kind": "graph", "min_keys": 1, "max_scanned": 1},
    "graph, 1024 samples": {
        "kind": "graph",
        "min_keys": 1,
        "max_scanned": 1,
        "sampled_queries": 1024,
        "recent_queries": 0,
    },
    "sketch, as asked": {"kind": "sketch", "min_keys": 1, "gain": 0, "horizon_tokens": 0},
    "sketch": {"kind": "sketch", "min_keys": 1, "gain": 0},
}


class Head(NamedTuple):
    """One KV head: keys [N, D], later queries [G, P, D], and what the prompt left of its own."""

    name: str
    keys: Tensor
    later: Tensor
    evidence: Evidence
    rotary: Any


def heads(tokens: int, skip: int, count: int) -> Iterator[Head]:
    """Some KV heads of the model, spread over its layers."""
    llm = hkv.load("smollm2", dtype="float32", dequantize=True, config=HybridConfig())
    with llm:
        ids = prose(llm.tokenizer, tokens, skip)
        needs = Needs(4096, ASKED + 4096)
        prompt = prompts.prefill(llm.runtime, ids.numpy(), needs)
        info = llm.runtime.info
    past = tokens - ASKED  # the prompt; what follows is asked
    names = [(layer, head) for layer in range(len(prompt.layers)) for head in range(3)]
    for layer, head in names[:: max(1, len(names) // count)][:count]:
        k, _ = prompt.layers[layer]
        seen = prompt.evidence[layer][0]
        group = slice(3 * head, 3 * head + 3)
        before = seen.sampled_positions < past
        evidence = Evidence(
            past,
            seen.sampled_queries[group, before],
            seen.last_queries[group, :-ASKED][:, -4096:],
            seen.sampled_positions[before],
        )
        keys = k[0, head, SINKS : past - WINDOW].bfloat16().contiguous()
        later = seen.last_queries[group, -ASKED:]
        yield Head(
            f"L{layer}H{head}", keys, later, evidence, info.rotary_of(info.layers[layer].layer_idx)
        )


def samples_for(head: Head, needs: Needs) -> Tensor | None:
    """What an index of these needs is given, [1, G, M, D]."""
    if not needs.sampled_queries:
        return None
    sampled, positions = head.evidence.sampled_queries, head.evidence.sampled_positions
    stride = max(1, sampled.shape[1] // needs.sampled_queries)
    last = head.evidence.last_queries
    kept = Evidence(
        head.evidence.num_tokens,
        sampled[:, ::stride],
        last[:, last.shape[1] - min(needs.last_queries, last.shape[1]) :]
        if needs.last_queries
        else None,
        positions[::stride],
    )
    samples = kept.samples(1, head.rotary)
    return samples.ahead(kept.num_tokens, needs.horizon_tokens).queries.bfloat16()


def measure(head: Head, settings: dict[str, Any]) -> dict[str, Any]:
    """One kind over one head."""
    config = IndexConfig(**settings)
    index: Index = config.build()
    samples = samples_for(head, type(index).needs(index.params))
    keys = head.keys[None]
    begin = thread_time()
    index.build(keys, samples)
    build_s = thread_time() - begin
    exact = (head.later.flatten(0, 1) @ head.keys.float().T).unflatten(0, head.later.shape[:2])
    best = exact.topk(TOP_K, -1)
    recalls, masses, rows = [], [], 0
    scale = head.keys.shape[1] ** -0.5
    for position in range(0, head.later.shape[1], 4):
        found = index.search(head.later[None, :, position], TOP_K)
        rows += found.rows_read or found.scored
        ids = found.ids[0]
        hit = (ids[:, :, None] == best.indices[:, position, None]).any(1)
        recalls.append(hit.float().mean())
        scores = exact[:, position].gather(1, ids.clamp_min(0)).masked_fill(ids < 0, -torch.inf)
        ratio = (scale * scores).logsumexp(-1) - (scale * best.values[:, position]).logsumexp(-1)
        masses.append(ratio.exp().mean())
    (report,) = index.describe() or [{}]
    recall = float(torch.stack(recalls).mean())
    return {
        "head": head.name,
        "serves": report.get("serves", "flat"),
        "recall": recall,
        "mass": float(torch.stack(masses).mean()),
        "promise": report.get("recall") or None,
        "rows_ratio": rows / len(masses) / len(head.keys),
        "bytes_per_key": index.memory_bytes / len(head.keys),
        "build_s": build_s,
    }


def spread(values: list[float], digits: int = 3) -> str:
    """Least, tenth percentile, median and most."""
    points = torch.tensor(values).quantile(torch.tensor([0, 0.1, 0.5, 1.0]))
    return " / ".join(f"{float(point):.{digits}f}" for point in points)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--heads", type=int, default=30)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    some = list(heads(options.tokens, options.skip, options.heads))
    print(f"{len(some)} heads of {len(some[0].keys)} keys; min / p10 / median / max over heads")
    print(
        "| index | recall@100 | mass | promise - truth | rows | B/key | build, s | served by it |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    results = {}
    for name, settings in KINDS.items():
        if options.only not in name:
            continue
        rows = results[name] = [measure(head, settings) for head in some]
        told = [row["promise"] - row["recall"] for row in rows if row["promise"]]
        served = sum(row["serves"] == settings["kind"] for row in rows)
        rows_ratio, size, build_s = (
            sum(row[key] for row in rows) / len(rows)
            for key in ("rows_ratio", "bytes_per_key", "build_s")
        )
        columns = (
            name,
            spread([row["recall"] for row in rows]),
            spread([row["mass"] for row in rows], 4),
            spread(told) if told else "-",
            f"{rows_ratio:.1%}",
            f"{size:.0f}",
            f"{build_s:.2f}",
            f"{served} of {len(rows)}",
        )
        print(f"| {' | '.join(columns)} |", flush=True)
    if options.json:
        options.json.write_text(compact(results))


if __name__ == "__main__":
    main()
