#!/usr/bin/env python3
"""Is a context's last question answered as well as its first, and in any order?

    OMP_NUM_THREADS=1 HYBRID_KV_THREADS=1 python benchmarks/five_questions/run.py --context 32k

One prefill serves all: full attention, and `hybrid` at full budget and at `--budget`. Each
conversation is a fork of the context, which is asked some questions in turn that are kept, and
another fork the same ones in reverse. At full budget the tokens of every turn have to be those of
full attention. With `--turns 32 --records 32` a whole list is asked for, record by record. Stdout
is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

if __name__ == "__main__":  # a script: the project's root is not on its path
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import hybrid_kv as hkv
from benchmarks.common.surroundings import surroundings
from hybrid_kv.config import budget_tokens, parse_count
from hybrid_kv.contest.prompts import open_cache, prefill
from hybrid_kv.eval.needle import is_correct, make_sample
from hybrid_kv.report.files import compact

Answers: TypeAlias = list[list[tuple[list[int], bool]]]
"""By conversation and question: the tokens of the answer, and whether it is right."""


def converse(context: hkv.Context, conversations: list[list[Any]]) -> Answers:
    found = []
    for questions in conversations:
        with context.fork() as fork:
            turns = []
            for question in questions:
                count = len(question.answer)
                answer = fork.ask(list(question.ids), keep=True, max_new_tokens=count)
                turns.append((answer.token_ids, is_correct(question, answer.token_ids)))
            found.append(turns)
    return found


def backwards(conversations: list[list[Any]]) -> list[list[Any]]:
    return [turns[::-1] for turns in conversations]


def measure(llm: hkv.LLM, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    turns = options.turns
    sample = make_sample(
        options.task,
        options.context,
        num_records=options.records,
        num_questions=turns * options.conversations,
        seed=seed,
    )
    asked = [
        list(sample.questions[number * turns :][:turns]) for number in range(options.conversations)
    ]
    default = hkv.HybridConfig(method="hybrid")
    chosen = default
    if options.budget:
        total = len(sample.context) + turns * 16
        chosen = default.at_budget(str(budget_tokens(options.budget, total)), total)
    configs = {
        "full": hkv.HybridConfig(method="full"),
        "hybrid_full_budget": default.opened(),
        "hybrid": chosen,
    }
    prompt = prefill(llm.runtime, sample.context, default.build().needs)
    ids = torch.from_numpy(sample.context)[None]
    rows: dict[str, Any] = {}
    answers: dict[str, Answers] = {}
    for name, config in configs.items():
        with hkv.Context(llm, open_cache(llm.runtime, config, prompt), ids) as context:
            answers[name] = converse(context, asked)
            reverse = backwards(converse(context, backwards(asked)))
        rows[name] = {
            "right_by_turn": right_by_turn(answers[name]),
            "right_in_reverse": right_by_turn(reverse),
            "same_in_reverse": same(answers[name], reverse),
            "same_as_full": same(answers[name], answers["full"]),
        }
        print(name, rows[name], file=sys.stderr, flush=True)
    return {"seed": seed, "answers": turns * options.conversations, **rows}


def same(ours: Answers, theirs: Answers) -> int:
    """Answers of the same tokens."""
    pairs = zip(chain.from_iterable(ours), chain.from_iterable(theirs), strict=True)
    return sum(one[0] == other[0] for one, other in pairs)


def right_by_turn(conversations: Answers) -> list[int]:
    return [sum(right for _, right in turns) for turns in zip(*conversations, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="needle")
    parser.add_argument("--context", type=parse_count, default=32768)
    parser.add_argument("--conversations", type=int, default=8, help="of so many turns each")
    parser.add_argument("--turns", type=int, default=5, help="questions of a conversation")
    parser.add_argument("--budget", help="of a step, such as 2%; default: hybrid's own")
    parser.add_argument("--task", default="key_value")
    parser.add_argument("--records", type=int, default=128)
    parser.add_argument("--samples", type=int, default=1, help="contexts")
    options = parser.parse_args()
    rows = []
    with hkv.load(options.model, config="full", dtype="float32") as llm:
        for seed in range(options.samples):
            rows.append(measure(llm, options, seed))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(
        compact(
            {
                **vars(options),
                "dtype": "float32",
                **surroundings(),
                "rows": rows,
            }
        ),
        end="",
    )


if __name__ == "__main__":
    main()
