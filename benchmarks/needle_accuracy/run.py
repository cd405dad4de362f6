"""Which answers survive which method: the accuracy table of the README.

    python benchmarks/needle_accuracy/run.py --contexts 4k,16k,32k --records 64,128

Every method reads the same budget, 2% of the context, except `full` (everything) and `quest` (whose
first two layers are dense, as in its paper; `quest_all_sparse` shows it without). `top100` attends
the exact best 100 cold entries, and its `recall` rows an index that misses each of them with a
fixed chance: what a bad index costs. One prefill serves all methods. Stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from functools import reduce
from operator import or_
from pathlib import Path
from time import perf_counter
from typing import Any

if __name__ == "__main__":  # a script: the other benchmarks' folder is beside its own
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from pydantic import Field

import hybrid_kv as hkv
from benchmarks.common import accuracy
from hybrid_kv.config import parse_count
from hybrid_kv.contest.prompts import prefill
from hybrid_kv.eval.needle import filler, make_sample
from hybrid_kv.index.flat import FlatIndex
from hybrid_kv.plugins import INDEXES
from hybrid_kv.report.files import compact
from hybrid_kv.types import SearchResult

PAGE = 16
BUDGET = 0.02
TEXT_TOKENS = 256


@INDEXES.register("lossy")
class LossyIndex(FlatIndex):
    """Exact search that misses every key, in every search anew, with a chance of 1 - recall."""

    class Params(FlatIndex.Params):
        """recall: the expected share of the best keys that is returned."""

        recall: float = Field(default=0.5, gt=0, le=1)

    def _find(self, queries: torch.Tensor, count: int, most: int) -> SearchResult:
        wider = min(len(self), int(2 * most / self.params.recall))
        found = super()._find(queries, wider, wider)
        missed = torch.rand(found.ids.shape) >= self.params.recall
        scores = found.scores.masked_fill(missed, -torch.inf)
        scores, order = scores.topk(most)
        ids = found.ids.gather(-1, order).masked_fill(scores == -torch.inf, -1)
        return SearchResult(ids, scores, found.scored)


def methods(context_tokens: int) -> dict[str, hkv.HybridConfig]:
    """Every method at the same budget for this context; the current page counts."""
    budget = int(BUDGET * context_tokens)
    window = max(PAGE, budget // 4 // PAGE * PAGE)
    top_k = budget - 2 * PAGE - window
    near = {"sink_tokens": PAGE, "window_tokens": window}
    common: dict[str, Any] = {"page_size": PAGE, "dense_extend_tokens": 256}
    pages = budget // PAGE - 1
    table: dict[str, dict[str, Any]] = {
        "full": {"method": "full"},
        "streaming_llm": {
            "method": "streaming_llm",
            "sink_tokens": PAGE,
            "window_tokens": (budget - 2 * PAGE) // PAGE * PAGE,
        },
        "quest": {"method": "quest", "page_budget": pages},
        "quest_all_sparse": {"method": "quest", "page_budget": pages, "dense_layers": 0},
    }
    for name in ("flat", "ivf", "hnsw", "hybrid"):
        table[name] = {"method": name, **near, "cold": {"top_k": top_k}}
    graph = {"kind": "graph", "min_keys": 1, "check_top_k": min(100, top_k)}
    table["graph"] = {
        "method": "retrieval_attention",
        **near,
        "cold": {"top_k": top_k, "index": graph},
    }
    for name, recall in (("top100", 1.0), ("top100_recall_0.9", 0.9), ("top100_recall_0.5", 0.5)):
        index = {"kind": "lossy", "recall": recall}
        cold = {"top_k": 100, "index": index}
        table[name] = {"method": "retrieval_attention", **near, "cold": cold}
    return {name: hkv.HybridConfig(**common, **settings) for name, settings in table.items()}


def measure(
    runtime: Any, context_tokens: int, records: int, questions: int, seed: int, only: list[str]
) -> list[dict[str, Any]]:
    """One row per method for one context length and number of records.

    Args:
        only: of these methods, against the first of which KL is measured; empty for all.
    """
    half = questions // 2
    sample = make_sample(
        "key_value", context_tokens, num_records=records, num_questions=half, seed=seed
    )
    other = make_sample(
        "multi_query", context_tokens, num_records=records, num_questions=half, seed=seed + 1
    )
    begin = perf_counter()
    table = {n: one for n, one in methods(context_tokens).items() if not only or n in only}
    needs = reduce(or_, (config.build().needs for config in table.values()))
    prompts = [prefill(runtime, s.context, needs) for s in (sample, other)]
    prefill_s = perf_counter() - begin
    text = filler(TEXT_TOKENS, seed + 2)
    rows, full = [], None
    for name, config in table.items():
        begin = perf_counter()
        single = accuracy.ask_all(runtime, config, prompts[0], sample.questions)
        several = accuracy.ask_all(runtime, config, prompts[1], other.questions)
        log_probs = accuracy.text_log_probs(runtime, config, prompts[0], text)
        full = log_probs if full is None else full
        rows.append(
            {
                "method": name,
                "context_tokens": context_tokens,
                "records": records,
                "correct": single.correct + several.correct,
                "asked": single.asked + several.asked,
                "attended_tokens": (single.attended_tokens + several.attended_tokens) / 2,
                "attended_ratio": (single.attended_ratio + several.attended_ratio) / 2,
                "kl_nats_per_token": accuracy.mean_kl(full, log_probs),
                "key_value": asdict(single),
                "multi_query": asdict(several),
                "prefill_s": prefill_s,
                "method_s": perf_counter() - begin,
            }
        )
        print(_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['context_tokens']:>7} {row['records']:>4} {row['method']:<17} "
        f"{row['correct']:>3}/{row['asked']:<3} {row['attended_tokens']:>8.0f} "
        f"{row['attended_ratio']:>7.2%} KL {row['kl_nats_per_token']:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="needle")
    parser.add_argument("--contexts", default="4k,16k,32k")
    parser.add_argument("--records", default="64,128")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--methods", default="", help="full and some others; all if left out")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    rows: list[dict[str, Any]] = []
    only = [name for name in options.methods.split(",") if name]
    with hkv.load(options.model, dtype=options.dtype) as llm:
        for text in options.contexts.split(","):
            for records in map(int, options.records.split(",")):
                context = parse_count(text)
                some = (records, options.questions, options.seed, only)
                rows += measure(llm.runtime, context, *some)
    settings = {**vars(options), "budget_ratio": BUDGET, "torch": torch.__version__}
    print(compact({"benchmark": "needle_accuracy", "settings": settings, "rows": rows}), end="")


if __name__ == "__main__":
    main()
