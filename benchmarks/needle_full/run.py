#!/usr/bin/env python3
"""Exact match of the needle model under full attention, per task and context length.

Every context is prefilled once and asked many questions. The StreamingLLM column attends to 4
sinks and the last 512 tokens only while question and answer are read: it shows that the questions
cannot be answered without the far context. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hybrid_kv.eval.needle import TASKS, Question, is_correct, make_sample  # noqa: E402
from hybrid_kv.eval.needle.dense import DenseReader, sinks_and_window  # noqa: E402
from hybrid_kv.eval.needle.vocabulary import ASK, KEY, PASS  # noqa: E402

FIRST_SEED = 7_000_000


@dataclass(slots=True)
class Row:
    """One line of the table; accuracies are shares of `questions`."""

    task: str
    context_tokens: int
    num_records: int
    contexts: int
    questions: int
    exact_match: float
    exact_match_low: float
    streaming_exact_match: float
    prefill_s: float
    ask_s: float


def lower_bound(right: int, total: int) -> float:
    """Wilson's lower 95% bound of a share: what the measured share is sure to exceed."""
    z, share = 1.96, right / total
    middle = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (middle - spread) / (1 + z * z / total)


def num_questions(task: str, num_records: int, wanted: int) -> int:
    """How many of the `wanted` questions one context of `task` can surely answer."""
    possible = {"key_value": num_records, "passkey": 1, "most_frequent": max(1, num_records // 8)}
    return min(wanted, possible.get(task, max(1, num_records // 4)))


def count_right(reader: DenseReader, questions: tuple[Question, ...], streaming: bool) -> int:
    visible = sinks_and_window(reader.num_tokens) if streaming else None
    answers = reader.answer(questions, visible)
    return sum(is_correct(q, a) for q, a in zip(questions, answers, strict=True))


def plain_questions(context: NDArray[np.int64], wanted: int) -> tuple[Question, ...]:
    """Questions about the plain records of a passkey context, read from the context itself."""
    starts = np.flatnonzero(context == KEY)
    rows = [context[start : start + 8].tolist() for start in starts if context[start + 1] != PASS]
    return tuple(Question((ASK, *row[:3]), tuple(row[3:])) for row in rows[:wanted])


def measure_shared(model: LlamaForCausalLM, tokens: int, records: int, wanted: int) -> list[Row]:
    """Rows of passkey and key_value from one haystack, where a prefill takes minutes."""
    sample = make_sample("passkey", tokens, num_records=records, seed=FIRST_SEED)
    started = time.perf_counter()
    reader = DenseReader(model, sample.context)
    prefill_s = time.perf_counter() - started
    asked = {
        "passkey": sample.questions,
        "key_value": plain_questions(sample.context, wanted),
    }
    rows = []
    for task, questions in asked.items():
        started = time.perf_counter()
        full = count_right(reader, questions, streaming=False)
        ask_s = time.perf_counter() - started
        streaming = count_right(reader, questions, streaming=True)
        counts = (1, len(questions), full, streaming)
        rows.append(make_row(task, tokens, records, counts, prefill_s, ask_s))
    return rows


def make_row(
    task: str,
    tokens: int,
    records: int,
    counts: tuple[int, int, int, int],
    prefill_s: float,
    ask_s: float,
) -> Row:
    """A row from counts of (contexts, questions, right, right with streaming) and total times."""
    contexts, asked, full, streaming = counts
    row = Row(
        task=task,
        context_tokens=tokens,
        num_records=records,
        contexts=contexts,
        questions=asked,
        exact_match=round(full / asked, 4),
        exact_match_low=round(lower_bound(full, asked), 4),
        streaming_exact_match=round(streaming / asked, 4),
        prefill_s=round(prefill_s / contexts, 2),
        ask_s=round(ask_s / contexts, 2),
    )
    print(
        f"{task:18} {tokens:7} tokens {records:4} records  "
        f"full {row.exact_match:.3f} (>= {row.exact_match_low:.3f}, n = {row.questions})  "
        f"streaming {row.streaming_exact_match:.3f}  prefill {row.prefill_s:.1f} s",
        flush=True,
    )
    return row


def measure(
    model: LlamaForCausalLM, task: str, tokens: int, records: int, contexts: int, wanted: int
) -> Row:
    """One row: `contexts` haystacks, each prefilled once."""
    asked = full = streaming = 0
    prefill_s = ask_s = 0.0
    for index in range(contexts):
        sample = make_sample(
            task,
            tokens,
            num_records=records,
            num_questions=num_questions(task, records, wanted),
            seed=FIRST_SEED + index,
        )
        started = time.perf_counter()
        reader = DenseReader(model, sample.context)
        prefilled = time.perf_counter()
        full += count_right(reader, sample.questions, streaming=False)
        ask_s += time.perf_counter() - prefilled
        prefill_s += prefilled - started
        streaming += count_right(reader, sample.questions, streaming=True)
        asked += len(sample.questions)
    counts = (contexts, asked, full, streaming)
    return make_row(task, tokens, records, counts, prefill_s, ask_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "hybrid_kv" / "assets" / "needle")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--records", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--contexts", type=int, default=2, help="haystacks per row")
    parser.add_argument("--passkey-contexts", type=int, default=12)
    parser.add_argument("--questions", type=int, default=64, help="questions per haystack")
    parser.add_argument(
        "--shared", action="store_true", help="passkey and key_value from one haystack"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = LlamaForCausalLM.from_pretrained(
        arguments.model, dtype=getattr(torch, arguments.dtype)
    ).eval()
    rows: list[Row] = []
    for tokens in arguments.tokens:
        for records in arguments.records:
            if arguments.shared:
                rows += measure_shared(model, tokens, records, arguments.questions)
                continue
            for task in arguments.tasks:
                passkey = task == "passkey"
                contexts = arguments.passkey_contexts if passkey else arguments.contexts
                rows.append(measure(model, task, tokens, records, contexts, arguments.questions))
    environment = {
        "date": date.today().isoformat(),
        "cpu": platform.processor() or platform.machine(),
        "threads": arguments.threads,
        "torch": torch.__version__,
        "dtype": arguments.dtype,
    }
    print(
        json.dumps(
            {
                "benchmark": "needle_full",
                "environment": environment,
                "rows": [asdict(row) for row in rows],
            }
        )
    )


if __name__ == "__main__":
    main()
