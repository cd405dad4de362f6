"""What a fixed number of cold entries, the whole beam and a distance `beta` attend and lose.

    python benchmarks/adaptive_budget/run.py --heads paper:5,stress:5 --n 128k
    python benchmarks/adaptive_budget/run.py --needle 32k

Heads are made up (`hybrid_kv/eval/synthetic.py`, PROFILE:SEED) and searched by the graph index of
one KV head with its group of four query heads, as a decode step does. Needle contexts are read by
the needle model, which answers questions through `retrieval_attention` with the int8 scan. The last
line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import hybrid_kv as hkv
from hybrid_kv.config import IndexConfig, parse_count
from hybrid_kv.eval import accuracy
from hybrid_kv.eval.needle import filler, make_sample
from hybrid_kv.rotary import Samples
from hybrid_kv.runtime.retrieve import retrieve
from hybrid_kv.store import ColdStore
from hybrid_kv.types import LayerShape, TokenBudget

sys.path.append(str(Path(__file__).parents[1] / "cold_search"))
from heads import Head, load

BUDGETS = {
    "top 100": TokenBudget(100),
    "top 200": TokenBudget(200),
    "top 400": TokenBudget(400),
    "whole beam of 100": TokenBudget(100, 2000),
    "100, beta 4": TokenBudget(100, None, 4.0),
    "beam of 100, beta 4": TokenBudget(100, 2000, 4.0),
    "beam of 100, beta 6": TokenBudget(100, 2000, 6.0),
    "beam of 100, beta 8": TokenBudget(100, 2000, 8.0),
    "beam of 30, beta 6": TokenBudget(30, 2000, 6.0),
}
NEEDLE = ("top 100", "whole beam of 100", "100, beta 4", "beam of 100, beta 6")
BATCH = 4096  # of sampled prompt positions
TEXT_TOKENS = 128


def cold_store(head: Head) -> ColdStore:
    """The head's keys as one row of the cold tier, with a graph."""
    num_keys, dim = head.keys.shape
    cold = ColdStore(LayerShape(0, head.test.shape[1], 1, dim), head.keys.dtype, 1)
    positions = torch.cat(
        [torch.arange(0, num_keys, max(1, num_keys // BATCH)), torch.arange(num_keys)[-BATCH:]]
    )
    samples = Samples(head.prompt(positions.unique())[None])
    keys = head.keys[None]
    make = IndexConfig(kind="graph", min_keys=1).build
    cold.append(0, keys, keys, torch.arange(num_keys), make, samples)
    return cold


def on_head(head: Head, cold: ColdStore, budget: TokenBudget) -> dict[str, float]:
    """Means over the test positions and the heads of the group."""
    scale = head.keys.shape[1] ** -0.5
    keys = cold.rows[0][0].extent.keys[0].float()
    attended, masses, scored = [], [], 0
    for queries in head.test.float():
        found = retrieve(cold, 0, queries[None], budget, scale=scale)
        ((_, ids),) = found.parts
        logits = queries @ keys.T * scale
        mine = logits.gather(1, ids[0].clamp_min(0)).masked_fill(ids[0] < 0, -torch.inf)
        masses.append((mine.logsumexp(1) - logits.logsumexp(1)).exp())
        attended.append(found.counts[0])
        scored += found.scored
    counts, mass = torch.stack(attended).float(), torch.stack(masses)
    return {
        "attended_mean": float(counts.mean()),
        "attended_p95": float(counts.quantile(0.95)),
        "attended_max": float(counts.max()),
        "mass_mean": float(mass.mean()),
        "mass_p5": float(mass.quantile(0.05)),
        "scored_ratio": scored / (counts.numel() * len(keys)),
    }


def on_needle(runtime: Any, context_tokens: int) -> dict[str, Any]:
    """Answers, entries attended, and distance from full attention on plain text."""
    sample = make_sample("key_value", context_tokens, num_records=64, num_questions=8, seed=0)
    index = {"kind": "flat", "precision": "int8"}  # what the budget costs, not the index
    near = {"sink_tokens": 16, "window_tokens": 128}
    configs = {
        name: hkv.HybridConfig(
            method="retrieval_attention",
            **near,
            cold={
                "top_k": budget.top_k,
                "max_tokens": budget.max_tokens,
                "beta": budget.beta,
                "index": index,
            },
        )
        for name, budget in ((name, BUDGETS[name]) for name in NEEDLE)
    }
    needs = next(iter(configs.values())).build().needs
    prompt = accuracy.prefill(runtime, sample.context, needs)
    text = filler(TEXT_TOKENS, 2)
    full = accuracy.text_log_probs(runtime, hkv.HybridConfig(method="full"), prompt, text)
    rows = {}
    for name, config in configs.items():
        cache = accuracy.open_cache(runtime, config, prompt)
        right = sum(
            accuracy.answer(runtime, cache, question) == list(question.answer)
            for question in sample.questions
        )
        work = cache.work
        log_probs = accuracy.text_log_probs(runtime, config, prompt, text)
        rows[name] = {
            "correct": right,
            "asked": len(sample.questions),
            "retrieved_mean": work.retrieved / work.steps,
            "retrieved_max": work.most_retrieved,
            "scored_ratio": work.scored / work.visible,
            "kl_nats_per_token": accuracy.mean_kl(full, log_probs),
        }
        print(name, rows[name], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--heads", default="", help="PROFILE:SEED,...")
    parser.add_argument("--n", type=parse_count, default=131072, help="keys of a head")
    parser.add_argument("--positions", type=int, default=100, help="test positions of a head")
    parser.add_argument("--needle", type=parse_count, default=0, help="tokens of a context")
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "budgets": {name: asdict(budget) for name, budget in BUDGETS.items()},
        "num_keys": arguments.n,
    }
    for name in filter(None, arguments.heads.split(",")):
        profile, _, seed = name.partition(":")
        head = load(profile, arguments.n, int(seed or 0), arguments.positions)
        cold = cold_store(head)
        served = cold.describe_indexes()
        print(name, served[0]["serves"], served[0]["reason"], file=sys.stderr, flush=True)
        results[name] = {"served": served, "rows": {}}
        for label, budget in BUDGETS.items():
            results[name]["rows"][label] = row = on_head(head, cold, budget)
            print(f"  {label:22s}", row, file=sys.stderr, flush=True)
    if arguments.needle:
        with hkv.load("needle") as llm:
            results["needle"] = on_needle(llm.runtime, arguments.needle)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
