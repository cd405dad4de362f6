"""What a user would pick instead on a CPU: llama.cpp beside hybrid_kv, some layers of an 8B model.

    pip install xllamacpp gguf
    python benchmarks/peers/run.py --context 8k,32k,128k --threads 1,2 --out peers.json

One layer of the Llama-3-8B shape with its whole FFN, or `--layers` of them, over which what a token
costs once is spread as on the whole model; bf16 weights, a vocabulary of 4,096, KV filled in:
random in llama.cpp, whose work does not depend on it, attention-like in ours. One process per run,
sides in turn, so that what else the machine does meets all of them; a figure is the median of the
medians. llama.cpp runs with flash attention and without, and its better one is what ratios are to.
`--prompt` computes the contexts instead: time to the first token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from hybrid_kv.config import parse_count
from hybrid_kv.report import probe_environment

HERE = Path(__file__).parent
LLAMA = {"llama.cpp": [], "llama.cpp, flash attention": ["--flash"]}
OURS = ("full", "hybrid", "flat int8")


def command(side: str, gguf: Path, context: int, threads: int, more: list[str]) -> list[str]:
    """The process that runs one side once."""
    which = (
        [str(HERE / "llama_cpp.py"), "--gguf", str(gguf), *LLAMA[side]]
        if side in LLAMA
        else [str(HERE / "ours.py"), "--side", side]
    )
    sizes = ["--context", str(context), "--threads", str(threads), *more]
    cpus = ["taskset", "-c", ",".join(map(str, range(threads)))]
    return [*cpus, sys.executable, *which, *sizes]


def measure(args: argparse.Namespace, gguf: Path) -> list[dict[str, Any]]:
    """A row for each side, context and number of threads."""
    runs: dict[tuple[int, int, str], list[dict[str, Any]]] = defaultdict(list)
    more = ["--prompt"] if args.prompt else ["--steps", str(args.steps)]
    more += ["--layers", str(args.layers)]
    for context in args.context:
        for threads in args.threads:
            for _ in range(args.rounds):
                for side in args.sides:
                    done = subprocess.run(
                        command(side, gguf, context, threads, more),
                        stdout=subprocess.PIPE,
                        text=True,
                        check=True,
                    )
                    runs[context, threads, side].append(json.loads(done.stdout.splitlines()[-1]))
    return [row(*key, found) for key, found in runs.items()]


def row(context: int, threads: int, side: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of wall time and CPU time of the process, and what the sides say of themselves."""
    wall = [median(time for time, _ in run["times_ms"]) for run in runs]
    cpu = [median(time for _, time in run["times_ms"]) for run in runs]
    return {
        **{"context_tokens": context, "threads": threads, "side": side},
        **{"ms": median(wall), "cpu_ms": median(cpu), "ms_of_runs": wall, "cpu_ms_of_runs": cpu},
        **{name: runs[0][name] for name in ("system", "weights") if name in runs[0]},
    }


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """To llama.cpp's better side at the same context and threads."""
    best: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for found in rows:
        if found["side"] in LLAMA:
            known = best[found["context_tokens"], found["threads"]]
            for name in ("ms", "cpu_ms"):
                known[name] = min(found[name], known.get(name, found[name]))
    for found in rows:
        for name, value in best[found["context_tokens"], found["threads"]].items():
            found[f"{name}_ratio"] = found[name] / value


def show(rows: list[dict[str, Any]]) -> None:
    """A line a row."""
    for found in rows:
        ratio = f"{found['ms_ratio']:.2f} wall, {found['cpu_ms_ratio']:.2f} CPU"
        print(
            f"{found['context_tokens']:>7,} tokens, {found['threads']} threads  "
            f"{found['side']:<28}{found['ms']:9.1f} ms{found['cpu_ms']:9.1f} CPU ms  {ratio}",
            file=sys.stderr,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    counts = {"type": lambda text: [parse_count(one) for one in text.split(",")]}
    parser.add_argument("--context", default="8k,32k,128k", **counts)
    parser.add_argument("--threads", default="1", **counts)
    parser.add_argument("--sides", nargs="+", default=[*LLAMA, *OURS], choices=[*LLAMA, *OURS])
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompt", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sys.path.insert(0, str(HERE))
    from llama_cpp import write_model

    with tempfile.TemporaryDirectory() as folder:
        gguf = Path(folder, "layers.gguf")
        write_model(gguf, args.layers)
        rows = measure(args, gguf)
    add_ratios(rows)
    show(rows)
    document = {
        "what": "time to first token" if args.prompt else "decode step",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "layers": args.layers,
        "command": " ".join(["python", "benchmarks/peers/run.py", *sys.argv[1:]]),
        "environment": json.loads(probe_environment().model_dump_json()),
        "rows": rows,
    }
    text = json.dumps(document, indent=1)
    if args.out is not None:
        args.out.write_text(text + "\n")
    print(text if args.out is None else args.out)


if __name__ == "__main__":
    main()
