"""Which way of finding the best keys of a head costs what? Indexes and scans, on the same queries.

    python benchmarks/cold_search/run.py --n 16k,128k --data paper,stress --seeds 0,1

Every row answers the same queries, taken at random among the 2,048 positions after the prompt, for
the query heads of a group at the same position. Settings are found on other positions of these, so
the recall that is reported is that of queries nobody tuned on. A hot time asks one head again and
again; a cold one visits copies of it in turn, one group each, after the caches were emptied, as
decoding goes from layer to layer. Stdout is one JSON document (README.md).
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a script; tests import it and keep their own settings
    sys.path.insert(0, str(Path(__file__).parents[2]))
    os.environ["OMP_NUM_THREADS"] = "1"  # libraries read it when they are imported

import torch

from benchmarks.cold_search import plots, table
from benchmarks.cold_search.compare import compare_auto
from benchmarks.cold_search.derive import add_ratios, stream_us
from benchmarks.cold_search.engines import AbsentError, use_threads
from benchmarks.cold_search.heads import Head, load, names_of
from benchmarks.cold_search.machine import (
    Memory,
    environment,
    refuse_what_does_not_fit,
)
from benchmarks.cold_search.measure import Bench, Plan
from benchmarks.cold_search.rows import Row, chosen_rows, default_rows
from benchmarks.cold_search.targets import parse_targets
from benchmarks.cold_search.timing import CLOCKS, Stopwatch
from benchmarks.common.head_stats import head_stats
from hybrid_kv.config import parse_count
from hybrid_kv.errors import HybridKVError
from hybrid_kv.eval.synthetic import PROFILES
from hybrid_kv.report.files import compact

SCHEMA = 3
STATS_STEP = 8
"""One in so many prompt queries enters the statistics of a head."""
LARGEST_DIM = 128


def run_head(
    head: Head, rows: Sequence[Row], plan: Plan, gbps: float, with_auto: bool
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """What kind of head it is, and its results so far: after every row, and at the end."""
    about = describe(head, gbps)
    where = {name: about[name] for name in ("data", "n", "seed", "head_dim", "group")}
    say(f"\n{table.describe(about)}\n{table.HEADER}")
    bench = Bench(head, plan)
    results: list[dict[str, Any]] = []
    for row in rows:
        try:
            found = [{**where, **result} for result in bench.run(row)]
        except (AbsentError, HybridKVError) as error:
            state = "absent" if isinstance(error, AbsentError) else "failed"
            results.append({**where, "row": row.name, state: str(error)})
            say(f"{row.name:<60} {state}: {error}")
            yield about, results
            continue
        results += found
        add_ratios(results, about["stream_us"])
        for result in found:
            say(table.line(result))
        yield about, results
        gc.collect()
    add_ratios(results, about["stream_us"])  # a baseline may come after what is compared with it
    if with_auto:
        about["auto"] = compare_auto(head, plan, "f16")
        say(table.auto_lines(about["auto"]))
    yield about, results


def describe(head: Head, gbps: float) -> dict[str, Any]:
    """Where a head is from, its sizes and statistics, and a scan at the rate of memory."""
    every = torch.arange(0, len(head.keys), STATS_STEP)
    stats = head_stats(head.keys, head.prompt(every)[0], head.test[:, 0])
    size, dim = head.keys.shape
    return {
        **{"data": head.data, "n": size, "seed": head.seed, "head_dim": dim, "group": head.group},
        "source": head.source,
        "distance_ratio": stats.distance_ratio,
        **asdict(stats),
        "stream_us": stream_us(size, dim, head.group, gbps),
    }


def wanted_heads(data: str, sizes: Sequence[int], seeds: str) -> Iterator[tuple[str, int, int]]:
    """Names, sizes and seeds."""
    for word in data.split(","):
        for name in names_of(word):
            for size in sizes:
                for seed in seeds.split(","):
                    yield name, size, int(seed)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    data = [*PROFILES, "minilm", "minilm:L4H8", "needle", "needle:L2H1"]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--n", default="16k", help="keys, e.g. 16k,128k,1m")
    parser.add_argument("--data", default="paper,stress", help="of " + ", ".join(data))
    parser.add_argument("--seeds", default="0", help="of weights and text alike")
    parser.add_argument("--text", type=Path, help="a file or folder of English for minilm")
    parser.add_argument(
        "--rows", nargs="*", default=[], help="names with * and ?, or KIND:key=value,key=a|b"
    )
    parser.add_argument(
        "--targets",
        type=parse_targets,
        default="recall=.95,mass=.994,mass=.995",
        help="goals that settings are searched for; mass is over the oracle's",
    )
    parser.add_argument("--curve", action="store_true", help="settings beside those of the targets")
    parser.add_argument("--auto", action="store_true", help="auto beside what it chooses from")
    parser.add_argument("--queries", type=int, default=100, help="positions, of 2048")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", default="1", help="of our kinds when cold, e.g. 1,2")
    parser.add_argument(
        "--memory", type=parse_count, default="5g", help="limit for copies of a head"
    )
    parser.add_argument("--figures", type=Path, help="a folder; needs matplotlib")
    parser.add_argument("--out", type=Path, help="a file for the JSON, as far as it has come")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: of the process")
    parser.add_argument("--list-rows", action="store_true")
    options = parser.parse_args()
    options.threads = [int(count) for count in options.threads.split(",")]
    return options


def measure_all(options: argparse.Namespace, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The document as far as it has come: after every row, and at the end."""
    use_threads(options.threads[0])
    memory = Memory()
    stream = [memory.stream_gbps()]
    plan = Plan(
        targets=options.targets,
        curve=options.curve,
        threads=options.threads,
        cold_bytes=int(options.memory) if options.cold else 0,
        watch=Stopwatch(CLOCKS[options.clock], options.repeats, memory),
    )
    heads: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    document = {
        "benchmark": "cold_search",
        "schema": SCHEMA,
        "settings": settings_of(options),
        "environment": {**environment(options.threads), "stream_gbps": stream},
        "heads": heads,
        "rows": results,
    }
    sizes = [int(parse_count(size)) for size in options.n.split(",")]
    refuse_what_does_not_fit(max(sizes), LARGEST_DIM)
    for name, size, seed in wanted_heads(options.data, sizes, options.seeds):
        try:
            head = load(name, size, seed, options.queries, options.text)
        except LookupError as error:
            heads.append({"data": name, "n": size, "seed": seed, "absent": str(error)})
            say(f"{name}, N {size}, seed {seed}: absent: {error}")
            continue
        about, found = {}, []
        for about, found in run_head(head, rows, plan, stream[0], options.auto):
            yield {**document, "heads": [*heads, about], "rows": [*results, *found]}
        heads.append(about)
        results += found
    stream.append(memory.stream_gbps())
    yield document


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, JSON-ready and without the folders of this machine."""
    named = {
        name: value.name if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name != "out"
    }
    return {**named, "targets": [asdict(target) for target in options.targets]}


def main() -> None:
    options = parse()
    try:
        rows = chosen_rows(options.rows)
        if options.list_rows:
            print("\n".join(row.name for row in default_rows()))
            return
        for document in measure_all(options, rows):
            if options.out:
                options.out.write_text(compact(document))
    except (LookupError, MemoryError) as error:
        raise SystemExit(f"error: {error}") from None
    if options.figures and any("recall" in row for row in document["rows"]):
        for path in plots.save_figures(document, options.figures):
            say(f"wrote {path.name}")
    print(compact(document), end="")


if __name__ == "__main__":
    main()
