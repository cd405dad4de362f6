#!/usr/bin/env python3
"""What does opening a saved context take beside computing it, and decoding from a file?

    python benchmarks/context_file/run.py --contexts 8k,16k,32k

One model, one process: each context is prefilled and asked, saved, opened and asked, and both are
asked a longer question in turn. `open_first_token` is all from `llm.open` to the first token;
`prefill_first_token` all from `llm.context`, the wait for its index included. The file lies
in the page cache. Stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # a script: the project's root is not on its path
    sys.path.insert(0, str(Path(__file__).parents[2]))


import hybrid_kv as hkv
from benchmarks.common.surroundings import surroundings
from hybrid_kv.config import parse_count
from hybrid_kv.eval.needle import make_sample
from hybrid_kv.report.files import compact
from hybrid_kv.saved import verify_context


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What work gives; seconds by the clock, and of all threads of the process."""
    begin, cpu = time.perf_counter(), time.process_time()
    made = work()
    return made, time.perf_counter() - begin, time.process_time() - cpu


def measure(llm: hkv.LLM, tokens: int, folder: Path, repeats: int) -> dict[str, Any]:
    sample = make_sample("passkey", tokens, num_records=64, num_questions=1, seed=7)
    ids, question = sample.context.tolist(), list(sample.questions[0].ids)
    root = folder / f"{tokens}.hkv"

    def first_token(context: hkv.Context) -> tuple[hkv.Context, list[int]]:
        return context, context.ask(question, max_new_tokens=1).token_ids

    (context, expected), prefill_s, prefill_cpu_s = timed(lambda: first_token(llm.context(ids)))
    _, save_s, _ = timed(lambda: context.save(root))
    opened, open_s, open_cpu_s = [], [], []
    for _ in range(repeats):
        (again, found), wall, cpu = timed(lambda: first_token(llm.open(root)))
        assert found == expected
        opened.append(again)
        open_s.append(wall)
        open_cpu_s.append(cpu)
    saved, verify_s, _ = timed(lambda: verify_context(root))
    tpot_ms: dict[str, list[float]] = {"memory": [], "file": []}
    answers = []
    for _ in range(repeats):  # in turn, because the machine is shared
        for name, one in (("memory", context), ("file", opened[-1])):
            answer = one.ask(question, max_new_tokens=32, min_new_tokens=32)
            answers.append(answer.token_ids)
            tpot_ms[name].append(answer.tpot_ms)
    kv = context._cache.kv.stores.values()
    held = answer.device_kv_bytes + answer.host_kv_bytes
    index = sum(store.cold.index_bytes for store in kv)
    total = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    row = {
        "context_tokens": tokens,
        "prefill_first_token_s": prefill_s,
        "prefill_first_token_cpu_s": prefill_cpu_s,
        "open_first_token_s": median(open_s),
        "open_first_token_cpu_s": median(open_cpu_s),
        "speedup": prefill_s / median(open_s),
        "speedup_cpu": prefill_cpu_s / median(open_cpu_s),
        "save_s": save_s,
        "verify_s": verify_s,
        "file_bytes": total,
        "kv_bytes": held,
        "index_bytes": index,
        "file_ratio": total / (held + index),
        "tpot_memory_ms": median(tpot_ms["memory"]),
        "tpot_file_ms": median(tpot_ms["file"]),
        "tpot_ratio": median(
            f / m for f, m in zip(tpot_ms["file"], tpot_ms["memory"], strict=True)
        ),
        "same_answers": all(one == answers[0] for one in answers),
        "blocks": len(saved.manifest.blocks),
    }
    shutil.rmtree(root)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="needle")
    parser.add_argument("--contexts", default="8k,16k,32k")
    parser.add_argument("--method", default="hybrid")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    config = hkv.HybridConfig(method=args.method, index_build="wait")
    folder, rows = Path(tempfile.mkdtemp()), []
    try:
        with hkv.load(args.model, config=config) as llm:
            llm.context([1] * 512).ask([1], max_new_tokens=2)  # what is made once in a process
            for text in args.contexts.split(","):
                row = measure(llm, parse_count(text), folder, args.repeats)
                rows.append(row)
                print(json.dumps(row, indent=1), file=sys.stderr)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(
        compact(
            {
                "model": args.model,
                "config": config.flat(),
                **surroundings(),
                "repeats": args.repeats,
                "rows": rows,
            }
        ),
        end="",
    )


if __name__ == "__main__":
    main()
