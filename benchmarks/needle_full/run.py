#!/usr/bin/env python3
"""Exact match of the needle model under full attention, per task and context length.

Every context is prefilled once and asked many questions. The StreamingLLM column attends to 4
sinks and the last 512 tokens only while question and answer are read. It counts the questions whose
records all lie outside that window: what is right there was guessed, so the column shows that the
others cannot be answered without the far context. Stdout is one JSON object.
"""

from __future__ import annotations

import argparse
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

from benchmarks.common.dense import DenseReader, sinks_and_window  # noqa: E402
from hybrid_kv.eval.needle import TASKS, Question, is_correct, make_sample  # noqa: E402
from hybrid_kv.eval.needle.facts import ASK, KEY, PASS  # noqa: E402
from hybrid_kv.report.files import compact  # noqa: E402

FIRST_SEED = 7_000_000
WINDOW_TOKENS = 512
RECORD_TOKENS = 8
"""The longest record; nothing of an outside record may reach into the window."""

Asked = tuple[Question, tuple[int, ...]]
"""A question and the places of the records it rests on."""


@dataclass(slots=True)
class Row:
    """One line of the table.

    exact_match is a share of `questions`, streaming_exact_match one of `outside`, the questions
    whose records all lie outside StreamingLLM's window (null where there is none).
    """

    task: str
    context_tokens: int
    num_records: int
    contexts: int
    questions: int
    exact_match: float
    exact_match_low: float
    outside: int
    streaming_exact_match: float | None
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


@dataclass(slots=True)
class Tally:
    """Counts and seconds summed over the haystacks of one row."""

    contexts: int = 0
    asked: int = 0
    full: int = 0
    outside: int = 0
    streaming: int = 0
    prefill_s: float = 0.0
    ask_s: float = 0.0

    def ask(self, reader: DenseReader, asked: list[Asked]) -> None:
        """Asks the questions of one haystack under both kinds of attention."""
        started = time.perf_counter()
        self.full += count_right(reader, [question for question, _ in asked])
        self.ask_s += time.perf_counter() - started
        first_near = reader.num_tokens - WINDOW_TOKENS
        far = [question for question, places in asked if max(places) + RECORD_TOKENS < first_near]
        visible = sinks_and_window(reader.num_tokens, window_tokens=WINDOW_TOKENS)
        self.streaming += count_right(reader, far, visible)
        self.contexts += 1
        self.asked += len(asked)
        self.outside += len(far)

    def row(self, task: str, tokens: int, records: int) -> Row:
        """The line of the table, printed as well."""
        row = Row(
            task=task,
            context_tokens=tokens,
            num_records=records,
            contexts=self.contexts,
            questions=self.asked,
            exact_match=round(self.full / self.asked, 4),
            exact_match_low=round(lower_bound(self.full, self.asked), 4),
            outside=self.outside,
            streaming_exact_match=(
                round(self.streaming / self.outside, 4) if self.outside else None
            ),
            prefill_s=round(self.prefill_s / self.contexts, 2),
            ask_s=round(self.ask_s / self.contexts, 2),
        )
        print(
            f"{task:18} {tokens:7} tokens {records:4} records  "
            f"full {row.exact_match:.3f} (>= {row.exact_match_low:.3f}, n = {row.questions})  "
            f"streaming {row.streaming_exact_match} (n = {row.outside})  "
            f"prefill {row.prefill_s:.1f} s",
            flush=True,
        )
        return row


def count_right(
    reader: DenseReader, questions: list[Question], visible: torch.Tensor | None = None
) -> int:
    answers = reader.answer(questions, visible)
    return sum(is_correct(q, a) for q, a in zip(questions, answers, strict=True))


def plain_questions(context: NDArray[np.int64], wanted: int) -> list[Asked]:
    """Questions about the plain records of a passkey context, read from the context itself."""
    starts = [at for at in np.flatnonzero(context == KEY).tolist() if context[at + 1] != PASS]
    rows = [(at, context[at : at + RECORD_TOKENS].tolist()) for at in starts[:wanted]]
    return [(Question((ASK, *ids[:3]), tuple(ids[3:])), (at,)) for at, ids in rows]


def measure_shared(model: LlamaForCausalLM, tokens: int, records: int, wanted: int) -> list[Row]:
    """Rows of passkey and key_value from one haystack, where a prefill takes minutes."""
    sample = make_sample("passkey", tokens, num_records=records, seed=FIRST_SEED)
    started = time.perf_counter()
    reader = DenseReader(model, sample.context)
    prefill_s = time.perf_counter() - started
    tallies = {"passkey": Tally(prefill_s=prefill_s), "key_value": Tally(prefill_s=prefill_s)}
    tallies["passkey"].ask(reader, list(zip(sample.questions, sample.evidence, strict=True)))
    tallies["key_value"].ask(reader, plain_questions(sample.context, wanted))
    return [tally.row(task, tokens, records) for task, tally in tallies.items()]


def measure(
    model: LlamaForCausalLM, task: str, tokens: int, records: int, contexts: int, wanted: int
) -> Row:
    """One row: `contexts` haystacks, each prefilled once."""
    tally = Tally()
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
        tally.prefill_s += time.perf_counter() - started
        tally.ask(reader, list(zip(sample.questions, sample.evidence, strict=True)))
    return tally.row(task, tokens, records)


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
        compact(
            {
                "benchmark": "needle_full",
                "environment": environment,
                "rows": [asdict(row) for row in rows],
            }
        ),
        end="",
    )


if __name__ == "__main__":
    main()
