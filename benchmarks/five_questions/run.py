#!/usr/bin/env python3
"""Is a context's fifth question answered as well as its first?

    OMP_NUM_THREADS=1 HYBRID_KV_THREADS=1 python benchmarks/five_questions/run.py --context 32k

One prefill serves all: full attention, and `hybrid` at full and at its default budget. Each
conversation is a fork of the context, which is asked five questions in turn that are kept. At full
budget the tokens of every turn have to be those of full attention. Stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a script: the project's root is not on its path
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import hybrid_kv as hkv
from benchmarks.common.surroundings import surroundings
from hybrid_kv.config import parse_count
from hybrid_kv.eval.needle import is_correct, make_sample
from hybrid_kv.eval.prefilled import open_cache, prefill
from hybrid_kv.report.compact import compact

TURNS = 5


def converse(context: hkv.Context, sample: Any, options: argparse.Namespace) -> list[Any]:
    """By conversation and turn: the tokens of the answer, and whether it is right."""
    found = []
    for number in range(options.conversations):
        with context.fork() as fork:
            turns = []
            for question in sample.questions[number * TURNS : (number + 1) * TURNS]:
                count = len(question.answer)
                answer = fork.ask(list(question.ids), keep=True, max_new_tokens=count)
                turns.append((answer.token_ids, is_correct(question, answer.token_ids)))
            found.append(turns)
    return found


def measure(llm: hkv.LLM, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    sample = make_sample(
        options.task,
        options.context,
        num_records=options.records,
        num_questions=TURNS * options.conversations,
        seed=seed,
    )
    default = hkv.HybridConfig(method="hybrid")
    configs = {
        "full": hkv.HybridConfig(method="full"),
        "hybrid_full_budget": default.opened(),
        "hybrid": default,
    }
    prompt = prefill(llm.runtime, sample.context, default.build().needs)
    ids = torch.from_numpy(sample.context)[None]
    found: dict[str, list[Any]] = {}
    for name, config in configs.items():
        with hkv.Context(llm, open_cache(llm.runtime, config, prompt), ids) as context:
            found[name] = converse(context, sample, options)
        print(name, right_by_turn(found[name]), file=sys.stderr, flush=True)
    same = sum(
        one[0] == other[0]
        for ours, theirs in zip(found["hybrid_full_budget"], found["full"], strict=True)
        for one, other in zip(ours, theirs, strict=True)
    )
    return {
        "seed": seed,
        "answers": TURNS * options.conversations,
        "same_tokens_at_full_budget": same,
        "right_by_turn": {name: right_by_turn(answers) for name, answers in found.items()},
    }


def right_by_turn(conversations: list[Any]) -> list[int]:
    return [sum(turns[turn][1] for turns in conversations) for turn in range(TURNS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="needle")
    parser.add_argument("--context", type=parse_count, default=32768)
    parser.add_argument("--conversations", type=int, default=8, help="of five questions each")
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
