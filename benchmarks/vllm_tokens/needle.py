"""Questions to the needle model and the answers of our own runtime, for `run.py --questions`.

    python benchmarks/vllm_tokens/needle.py FOLDER   # with the project's Python, after models.py

They go to FOLDER/needle/questions.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a script: the project's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hybrid_kv as hkv
from benchmarks.common.accuracy import answer
from hybrid_kv.config import budget_tokens
from hybrid_kv.contest import prompts
from hybrid_kv.eval.needle import make_sample

RECORDS, SINKS, WINDOW = 64, 16, 256
TASKS = ("key_value", "multi_query")


def ask(runtime: Any, task: str, context: int, budget: str, number: int) -> dict[str, Any]:
    """Questions about one haystack, and what a search by sketch at this budget answers."""
    sample = make_sample(task, context, num_records=RECORDS, num_questions=number, seed=context)
    near = {"sink_tokens": SINKS, "window_tokens": WINDOW}
    config = hkv.HybridConfig(
        method="retrieval_attention",
        dense_extend_tokens=256,
        cold={"top_k": budget_tokens(budget, context), "index": {"kind": "sketch"}},
        **near,
    )
    prompt = prompts.prefill(runtime, sample.context, config.build().needs)
    cache = prompts.open_cache(runtime, config, prompt)
    return {
        "task": task,
        "context": context,
        "budget": budget,
        "settings": {"budget": budget, **near},
        "prompts": [sample.context.tolist() + list(one.ids) for one in sample.questions],
        "right": [list(one.answer) for one in sample.questions],
        "answers": [answer(runtime, cache, question) for question in sample.questions],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where models.py has written")
    parser.add_argument("--contexts", default="6144,12288")
    parser.add_argument("--budget", default="2%")
    parser.add_argument("--questions", type=int, default=12, help="of each context and task")
    options = parser.parse_args()
    home = options.folder / "needle"
    with hkv.load(str(home), dtype="float32") as llm:
        found = [
            ask(llm.runtime, task, context, options.budget, options.questions)
            for context in map(int, options.contexts.split(","))
            for task in TASKS
        ]
    (home / "questions.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
