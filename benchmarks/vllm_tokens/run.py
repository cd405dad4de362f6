"""Are the greedy tokens of vLLM with hybrid_kv those of vLLM alone, and answers those of `load`?

    python benchmarks/vllm_tokens/models.py FOLDER         # with the project's Python
    python benchmarks/vllm_tokens/run.py FOLDER            # where vLLM is installed
    python benchmarks/vllm_tokens/needle.py FOLDER         # the answers of `load`, with the former
    python benchmarks/vllm_tokens/run.py FOLDER --questions

At budget "all" all tokens are compared, of both engines in float32. At the budget of the
questions the answers of needle are compared with those of our own runtime. Stdout is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import torch  # noqa: E402

from benchmarks.vllm_tokens.models import RANDOM  # noqa: E402
from hybrid_kv.report.files import compact  # noqa: E402


def engine(folder: Path, settings: dict[str, Any] | None, longest: int, **options: Any) -> Any:
    from vllm import LLM

    extra = {} if settings is None else {"additional_config": {"hybrid_kv": settings}}
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=longest,
        max_num_batched_tokens=2048,
        max_num_seqs=32,
        block_size=128,
        **extra,
        **options,
    )


def answers(llm: Any, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    """Greedy tokens of requests that all wait at once."""
    from vllm import SamplingParams

    plain = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(max_tokens=count, **plain) for count in counts]
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(asked, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def requests(number: int, vocab: int, longest: int) -> tuple[list[list[int]], list[int]]:
    """Random prompts, most of them short, and how many tokens are asked of each."""
    draw = random.Random(number)
    lengths = [draw.randint(1, draw.choice((64, longest // 3, longest))) for _ in range(number)]
    prompts = [[draw.randrange(vocab) for _ in range(length)] for length in lengths]
    return prompts, [draw.randint(4, 24) for _ in lengths]


def compare(name: str, folder: Path, number: int, longest: int) -> dict[str, Any]:
    """One row: tokens of both engines."""
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    prompts, counts = requests(number, vocab, longest)
    found = [
        answers(engine(folder, settings, longest + 64), prompts, counts)
        for settings in (None, {"budget": "all"})
    ]
    equal = sum(stock == ours for stock, ours in zip(*found, strict=True))
    return {
        "model": name,
        "requests": number,
        "prompt_tokens": sum(map(len, prompts)),
        "tokens": sum(counts),
        "different_answers": len({tuple(one) for one in found[0]}),
        "equal_requests": equal,
    }


def ask_needle(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """One row: answers of vLLM to questions about one haystack, beside those of `needle.py`."""
    prompts, right = asked["prompts"], asked["right"]
    counts = [len(one) for one in right]
    longest = max(map(len, prompts)) + 64
    alone, beside = (
        answers(engine(folder, settings, longest), prompts, counts)
        for settings in (None, asked["settings"])
    )
    given = {"vllm": alone, "vllm_hybrid": beside, "load": asked["answers"]}
    correct = {
        f"{who}_right": sum(a == b for a, b in zip(own, right, strict=True))
        for who, own in given.items()
    }
    same = sum(a == b for a, b in zip(beside, asked["answers"], strict=True))
    named = {name: asked[name] for name in ("task", "context", "budget")}
    return {**named, "asked": len(right), **correct, "equal_answers": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where models.py has written")
    parser.add_argument("--models", default=",".join([*RANDOM, "smollm2"]))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--longest", type=int, default=1500, help="tokens of a prompt")
    parser.add_argument("--questions", action="store_true", help="those of needle.py, and no more")
    options = parser.parse_args()
    torch.set_num_threads(1)
    from hybrid_kv.vllm.plugin import register

    register()
    rows = []
    if options.questions:
        folder = options.folder / "needle"
        for asked in json.loads((folder / "questions.json").read_text()):
            rows.append(ask_needle(folder, asked))
            print(rows[-1], file=sys.stderr)
    for name in () if options.questions else options.models.split(","):
        begin = perf_counter()
        rows.append(compare(name, options.folder / name, options.requests, options.longest))
        print(rows[-1], f"{perf_counter() - begin:.0f} s", file=sys.stderr)
    print(compact({"benchmark": "vllm_tokens", "questions": options.questions, "rows": rows}))


if __name__ == "__main__":
    main()
