#!/usr/bin/env python3
"""What becomes of a context that generates tens of thousands of tokens?

    OMP_NUM_THREADS=1 HYBRID_KV_THREADS=1 python benchmarks/endless/run.py

A context of records is prefilled up to its `--prompt` first tokens; the `--generated` tokens that
follow are then generated one by one (forced, so that there is something to ask about). Beside it
stands a fresh context of the same tokens, prefilled as a whole. Both then generate the same further
tokens in turn, which gives the ratio of their times per token, and answer the same questions, at
which an audit looks in every step. Stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # a script: the project's root is not on its path
    sys.path.insert(0, str(Path(__file__).parents[2]))

from torch import Tensor

import hybrid_kv as hkv
from benchmarks.common.surroundings import surroundings
from hybrid_kv.config import AuditParams, parse_count
from hybrid_kv.eval.needle import is_correct, make_sample
from hybrid_kv.report.files import compact
from hybrid_kv.transfer import SyncExecutor
from hybrid_kv.types import bytes_per_token
from hybrid_kv.watch.auditor import Auditor

METHODS: dict[str, dict[str, Any]] = {
    "sketch": {"method": "hybrid", "cold.index": {"kind": "sketch"}},
    "graph": {"method": "retrieval_attention", "cold.index": {"kind": "graph"}},
    "auto": {"method": "hybrid"},
    "ivf": {"method": "ivf"},
    "hnsw": {"method": "hnsw"},
}
AT_ONCE = 1024  # tokens of one call, so that there is something to see


def forced(context: hkv.Context, ids: Sequence[int]) -> list[float]:
    """Generates these tokens; milliseconds of each but the first."""
    prompt, target = context.ids.shape[1] + 1, [*context.ids[0].tolist(), *ids]
    other = next(token for token in range(512) if token not in set(ids))  # nothing ends it

    def allowed(_: int, seen: Tensor) -> list[int]:
        return [ids[min(len(ids) - 1, seen.shape[0] - prompt + 1)]]

    answer = context.ask(
        [ids[0]],
        keep=True,
        max_new_tokens=len(ids) - 1,
        eos_token_id=other,
        prefix_allowed_tokens_fn=allowed,
    )
    assert context.ids[0].tolist() == target
    times = answer.token_times_s
    return [1e3 * (b - a) for a, b in pairwise(times)]


def wait(context: hkv.Context) -> None:
    """Until no index is being built."""
    for store in context._cache.kv.stores.values():
        for span in store.cold.spans():
            index = span.extent.index
            while index is not None and index.builder.pending is not None:
                time.sleep(0.05)
                index.settle(span.extent.keys)


def bytes_of(context: hkv.Context) -> dict[str, Any]:
    stores = list(context._cache.kv.stores.values())
    served = Counter(
        str(head.get("serves")) for store in stores for head in store.cold.describe_indexes()
    )
    tokens = context.ids.shape[1]
    kv = tokens * sum(bytes_per_token(store.shape, store.cold.dtype) for store in stores)
    index = sum(store.cold.index_bytes for store in stores)
    return {
        "tokens": tokens,
        "kv_bytes": kv,
        "index_bytes": index,
        "index_bytes_per_token": index / tokens,
        "heads": dict(served),
        "extents": max(len(row.chain.spans) for store in stores for row in store.rows),
    }


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def questions(llm: hkv.LLM, context: hkv.Context, sample: Any) -> dict[str, Any]:
    """Answers to all questions; recall by an audit of every step."""
    kv, params = context._cache.kv, AuditParams(min_recall=0, max_missed_mass=None)
    kv.auditor = Auditor(1, params, kv.info.layers, SyncExecutor())
    right = []
    for question in sample.questions:
        answer = context.ask(list(question.ids), max_new_tokens=len(question.answer))
        right.append(is_correct(question, answer.token_ids))
    audit = kv.auditor.audit
    recall, missed = audit.recall(), audit.missed_by_index()
    kv.auditor = None
    return {
        "correct": sum(right),
        "questions": len(right),
        "recall": None if recall is None else recall.mean,
        "recall_half_width": None if recall is None else recall.half_width,
        "missed_by_index": None if missed is None else missed.mean,
        "looks": len(audit.findings),
        "worst_heads": sorted(f.recall for f in audit.heads() if f.recall is not None)[:3],
    }


def measure(llm: hkv.LLM, options: argparse.Namespace) -> dict[str, Any]:
    rounds, steps = options.rounds, options.steps
    total = options.prompt + options.generated + rounds * steps
    sample = make_sample(
        options.task,
        total,
        num_records=options.records,
        num_questions=options.questions,
        seed=options.seed,
    )
    ids, end = sample.context.tolist(), options.prompt + options.generated
    late = llm.context(ids[: options.prompt])
    wait(late)
    marks, rss = [bytes_of(late)], resident_bytes()
    for start in range(options.prompt, end, AT_ONCE):
        times = forced(late, ids[start : min(end, start + AT_ONCE)])
        marks.append({**bytes_of(late), "tpot_ms": median(times)})
        print(marks[-1], file=sys.stderr, flush=True)
    grown = resident_bytes() - rss
    if options.settled:
        wait(late)
    begin = time.perf_counter()
    fresh = llm.context(ids[:end])
    prefill_s = time.perf_counter() - begin
    wait(fresh)
    by_round: list[tuple[float, float]] = []
    for number in range(rounds):  # in turn, because the machine is shared
        some = ids[end + number * steps : end + (number + 1) * steps]
        by_round.append((median(forced(late, some)), median(forced(fresh, some))))
    ratios = [one / other for one, other in by_round]
    held = {"late": bytes_of(late), "fresh": bytes_of(fresh)}
    asked = {name: questions(llm, one, sample) for name, one in (("late", late), ("fresh", fresh))}
    first, last = marks[0], marks[-1]
    counted = sum(last[name] - first[name] for name in ("kv_bytes", "index_bytes"))
    row = {
        "marks": marks,
        "fresh_prefill_s": prefill_s,
        "tpot_ms_late": median(one for one, _ in by_round),
        "tpot_ms_fresh": median(other for _, other in by_round),
        "tpot_ratio": median(ratios),
        "tpot_ratios": ratios,
        "bytes": held,
        "resident_growth_bytes": grown,
        "counted_growth_bytes": counted,
        "asked": asked,
        "recall_difference": asked["late"]["recall"] - asked["fresh"]["recall"],
    }
    late.close()
    fresh.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="needle")
    parser.add_argument("--prompt", type=parse_count, default=8192)
    parser.add_argument("--generated", type=parse_count, default=32768)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--task", default="key_value")
    parser.add_argument("--records", type=int, default=512)
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--indexes", default="sketch,graph", help=",".join(METHODS))
    parser.add_argument("--settled", action="store_true", help="wait for builds before measuring")
    options = parser.parse_args()
    rows = {}
    for name in options.indexes.split(","):
        config = hkv.HybridConfig.from_settings(METHODS[name])
        with hkv.load(options.model, config=config) as llm:
            llm.context([1] * 512).ask([1], max_new_tokens=2)  # what is made once in a process
            rows[name] = measure(llm, options)
        print(name, json.dumps(rows[name], indent=1), file=sys.stderr, flush=True)
    print(
        compact(
            {
                **{key: value for key, value in vars(options).items() if key != "indexes"},
                **surroundings(),
                "rows": rows,
            }
        ),
        end="",
    )


if __name__ == "__main__":
    main()
