"""Are the greedy tokens of vLLM with hybrid_kv those of vLLM alone, and answers those of `load`?

    python benchmarks/vllm_tokens/models.py FOLDER         # with the project's Python
    python benchmarks/vllm_tokens/run.py FOLDER            # where vLLM is installed
    python benchmarks/vllm_tokens/run.py FOLDER --dtype bfloat16
    python benchmarks/vllm_tokens/needle.py FOLDER         # the answers of `load`, with the former
    python benchmarks/vllm_tokens/run.py FOLDER --questions

At budget "all" all tokens are compared. In 16 bits two orders of the same sums round to different
numbers: there the first difference of an answer comes with its margin, how much more probable
(nats) vLLM alone found its own token than the other one's; and both are compared with vLLM in
float32. At the budget of the
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
from statistics import median
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

    options = {"dtype": "float32", "max_num_batched_tokens": 2048} | options

    extra = {} if settings is None else {"additional_config": {"hybrid_kv": settings}}
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=longest,
        max_num_seqs=32,
        block_size=128,
        **extra,
        **options,
    )


def answers(llm: Any, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    """Greedy tokens of requests that all wait at once."""
    return [list(output.token_ids) for output in completions(llm, prompts, counts)]


def completions(llm: Any, prompts: list[list[int]], counts: list[int], **more: Any) -> list[Any]:
    """What vLLM says of the greedy tokens of requests that all wait at once."""
    from vllm import SamplingParams

    plain = {"temperature": 0, "ignore_eos": True, "detokenize": False} | more
    params = [SamplingParams(max_tokens=count, **plain) for count in counts]
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    return [one.outputs[0] for one in llm.generate(asked, params, use_tqdm=False)]


def margins(stock: list[Any], ours: list[list[int]]) -> list[float]:
    """Of each answer that differs, the margin at the first difference, smallest first."""
    found = []
    for one, other in zip(stock, ours, strict=True):
        pairs = enumerate(zip(one.token_ids, other, strict=True))
        at = next((place for place, (a, b) in pairs if a != b), None)
        if at is not None:
            told = one.logprobs[at]
            least = min(told.values(), key=lambda token: token.logprob)  # of a token not among them
            away = told.get(other[at], least)
            found.append(round(told[one.token_ids[at]].logprob - away.logprob, 4))
    return sorted(found)


def requests(number: int, vocab: int, longest: int) -> tuple[list[list[int]], list[int]]:
    """Random prompts, most of them short, and how many tokens are asked of each."""
    draw = random.Random(number)
    lengths = [draw.randint(1, draw.choice((64, longest // 3, longest))) for _ in range(number)]
    prompts = [[draw.randrange(vocab) for _ in range(length)] for length in lengths]
    return prompts, [draw.randint(4, 24) for _ in lengths]


def compare(name: str, folder: Path, number: int, longest: int, dtype: str) -> dict[str, Any]:
    """One row: tokens of both engines."""
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    prompts, counts = requests(number, vocab, longest)
    stock = completions(
        engine(folder, None, longest + 64, dtype=dtype), prompts, counts, logprobs=10
    )
    own = engine(folder, {"budget": "all"}, longest + 64, dtype=dtype)
    ours = answers(own, prompts, counts)
    away, control = margins(stock, ours), {}
    if dtype != "float32":
        true = answers(engine(folder, None, longest + 64), prompts, counts)
        control = {
            "float32_equals_stock": number - len(margins(stock, true)),
            "float32_equals_ours": sum(a == b for a, b in zip(true, ours, strict=True)),
        }
    return {
        "model": name,
        "requests": number,
        "prompt_tokens": sum(map(len, prompts)),
        "tokens": sum(counts),
        "different_answers": len({tuple(one.token_ids) for one in stock}),
        "equal_requests": number - len(away),
        "median_margin": median(away) if away else 0.0,
        "largest_margin": max(away, default=0.0),
        **control,
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
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
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
        how = options.requests, options.longest, options.dtype
        rows.append(compare(name, options.folder / name, *how))
        print(rows[-1], f"{perf_counter() - begin:.0f} s", file=sys.stderr)
    print(
        compact(
            {
                "benchmark": "vllm_tokens",
                "dtype": options.dtype,
                "questions": options.questions,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
