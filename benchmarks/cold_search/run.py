"""Which way of finding the best keys of a head costs what? Indexes and scans, on the same queries.

    python benchmarks/cold_search/run.py --n 16k,128k --data paper,stress --seeds 0,1

Every row answers the same queries, taken at random among the 2,048 positions after the prompt, for
the four query heads of a group at the same position. One thread. A hot time asks one head again and
again; a cold one visits copies of it in turn, one group each, after the caches were emptied, as
decoding goes from layer to layer. The last line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

_parser_threads = argparse.ArgumentParser(add_help=False)
_parser_threads.add_argument("--threads", type=int, default=1)
THREADS = _parser_threads.parse_known_args()[0].threads
for _name in ("OMP_NUM_THREADS", "HYBRID_KV_THREADS"):
    os.environ[_name] = str(THREADS)  # libraries read it when they are imported

import numpy as np  # noqa: E402
import torch  # noqa: E402
from engines import AbsentError, Engine, K, Row, default_rows, parse_rows  # noqa: E402
from heads import MINILM_HEADS, Head, load  # noqa: E402
from machine import Memory, environment  # noqa: E402

from hybrid_kv.config import parse_count  # noqa: E402
from hybrid_kv.errors import HybridKVError  # noqa: E402
from hybrid_kv.eval.attention_stats import head_stats  # noqa: E402
from hybrid_kv.eval.synthetic import PROFILES  # noqa: E402

SCORES = 2**25
"""Scores held at once while the exact answer is found."""
WORKING_SET_L3 = 4
COLD_CAP = 4 * 2**30
"""Copies are made up to four times the L3, at most this much."""
MIN_COPIES = 4
TARGET_RECALL = 0.95
STATS_STEP = 8
"""One in so many prompt queries enters the statistics of a head."""


class Truth:
    """The exact answer: the best K keys of each query [P, G, D], and attention masses."""

    def __init__(self, head: Head) -> None:
        self._head = head
        queries = head.test.flatten(0, 1)
        self._scale = head.keys.shape[1] ** -0.5
        ids, masses, logs = [], [], []
        for part in queries.split(max(1, SCORES // len(head.keys))):
            scores = part @ head.keys.T
            top = scores.topk(K)
            logs.append(scores.mul_(self._scale).logsumexp(1))
            ids.append(top.indices)
            masses.append((top.values * self._scale - logs[-1][:, None]).exp().sum(1))
        self.ids = torch.cat(ids).numpy()
        self._masses, self._log_sums = torch.cat(masses), torch.cat(logs)
        self.oracle_mass = float(self._masses.mean())

    def judge(self, found: np.ndarray) -> dict[str, float]:
        """Quality of ids [P * G, K]."""
        recalls = [
            np.isin(best, ids, assume_unique=True).mean()
            for best, ids in zip(self.ids, found, strict=True)
        ]
        ids = torch.from_numpy(found)
        rows = self._head.keys[ids.clamp_min(0)]
        scores = torch.einsum("mkd,md->mk", rows, self._head.test.flatten(0, 1)) * self._scale
        weights = (scores - self._log_sums[:, None]).exp().masked_fill_(ids < 0, 0)
        mass = weights.sum(1)
        return {
            "recall": float(np.mean(recalls)),
            "recall_p5": float(np.quantile(recalls, 0.05)),
            "mass_over_oracle": float((mass / self._masses).mean()),
            "mass": float(mass.mean()),
        }


CLOCKS = {"wall": perf_counter, "cpu": process_time}


def hot_us(
    engine: Engine, groups: Sequence[np.ndarray], repeats: int, clock: Callable[[], float]
) -> float:
    """Microseconds per query head: the median over repeats of the mean over queries."""
    times = []
    for _ in range(repeats):
        begin = clock()
        for group in groups:
            engine.answer(group)
        times.append(clock() - begin)
    return 1e6 * statistics.median(times) / sum(map(len, groups))


def cold_us(
    engine: Engine,
    groups: Sequence[np.ndarray],
    memory: Memory,
    limit: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Microseconds per query head with cold caches, and how many bytes were rotated."""
    repeats, clock = options.repeats, CLOCKS[options.clock]
    held = engine.held_bytes
    wanted = -(-min(WORKING_SET_L3 * memory.l3_bytes, COLD_CAP) // held)
    copies = min(max(MIN_COPIES, wanted), limit // held, len(groups))
    if copies < 2:
        return {"cold_us": None, "cold_copies": 0, "cold_bytes": 0}
    visit = engine.rotation(copies)
    visit(groups[:copies])
    times = []
    for turn in range(max(repeats, 3 * repeats * MIN_COPIES // copies)):
        chosen = [groups[(turn * copies + copy) % len(groups)] for copy in range(copies)]
        memory.flush()
        begin = clock()
        visit(chosen)
        times.append((clock() - begin) / sum(map(len, chosen)))
    return {
        "cold_us": 1e6 * statistics.median(times),
        "cold_copies": copies,
        "cold_bytes": copies * held,
    }


def measure(
    row: Row, head: Head, truth: Truth, memory: Memory, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """One result per setting of the row."""
    groups = list(head.test.numpy())
    size, heads = len(head.keys), head.test.shape[1]
    engine, clock = row.make(), CLOCKS[options.clock]
    begin = clock()
    engine.build(head.keys, head.prompt)
    build_s = clock() - begin
    for setting in row.settings:
        engine.use(setting)
        engine.reset_count()
        found = np.concatenate([engine.answer(group) for group in groups])
        count = engine.count()
        # A row that is scored for the whole group counts once.
        scanned = count / (len(groups) * heads * size) if count is not None else None
        scanned = 1.0 if engine.exact else scanned
        shared = heads if engine.grouped else 1
        read = None if scanned is None else scanned * size * engine.row_bytes / shared
        result = {
            "row": row.name,
            "setting": dict(setting),
            **truth.judge(found),
            "oracle_mass": truth.oracle_mass,
            "scanned_ratio": scanned,
            "key_bytes_read": read,
            "hot_us": hot_us(engine, groups, options.repeats, clock),
            "build_s": build_s,
            "bytes_per_key": engine.held_bytes / size,
            "notes": engine.notes(),
        }
        if options.cold:
            limit = options.memory - engine.held_bytes - head.keys.nbytes
            result.update(cold_us(engine, groups, memory, limit, options))
            gc.collect()
        yield result


def run_head(
    head: Head, rows: Sequence[Row], memory: Memory, options: argparse.Namespace
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    where = {"data": head.data, "n": len(head.keys), "seed": head.seed}
    every = torch.arange(0, len(head.keys), STATS_STEP)
    stats = head_stats(head.keys, head.prompt(every)[0], head.test[:, 0])
    about = {
        **where,
        "source": head.source,
        "distance_ratio": stats.distance_ratio,
        **asdict(stats),
    }
    say(f"{where['data']}, N {where['n']}, seed {where['seed']}: " + describe(about))
    truth = Truth(head)
    results: list[dict[str, Any]] = []
    for row in rows:
        if row.name.endswith("group") and head.test.shape[1] == 1:
            continue
        try:
            for result in measure(row, head, truth, memory, options):
                results.append({**where, **result})
                say(line(result))
                for note in result["notes"]:
                    say(f"  {note}")
        except (AbsentError, HybridKVError) as error:
            state = "absent" if isinstance(error, AbsentError) else "failed"
            results.append({**where, "row": row.name, state: str(error)})
            say(f"{row.name:<42} {state}: {error}")
        gc.collect()
    return about, results


def describe(about: dict[str, Any]) -> str:
    return (
        f"distance ratio {about['distance_ratio']:.1f}, top-100 mass {about['top100_mass']:.2f}, "
        f"top-1000 mass {about['top1000_mass']:.2f}, hub share {about['hub_share']:.2f}, "
        f"effective dim {about['effective_dim']:.1f}\n{HEADER}"
    )


HEADER = f"{'row':<42} recall   p5  m/orac  mass" + "".join(
    f"{name:>9}" for name in ("scanned", "KB/q", "hot us", "cold us", "cold MB", "build s", "B/key")
)


def line(result: dict[str, Any]) -> str:
    def cell(name: str, form: str, scale: float = 1) -> str:
        value = result.get(name)
        return format("-" if value is None else format(value * scale, form), ">9")

    name = " ".join([result["row"], *(f"{k}={v}" for k, v in result["setting"].items())])
    return (
        f"{name:<42} {result['recall']:.3f} {result['recall_p5']:.2f}  "
        f"{result['mass_over_oracle']:.3f}  {result['mass']:.3f}{cell('scanned_ratio', '.2%')}"
        f"{cell('key_bytes_read', '.0f', 1 / 1024)}{cell('hot_us', '.1f')}{cell('cold_us', '.1f')}"
        f"{cell('cold_bytes', '.0f', 2**-20)}{cell('build_s', '.2f')}{cell('bytes_per_key', '.0f')}"
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def wanted_heads(options: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """Names, sizes and seeds."""
    for data in options.data.split(","):
        names = [f"minilm:{name}" for name in MINILM_HEADS] if data == "minilm" else [data]
        for name in names:
            for size in options.n.split(","):
                for seed in options.seeds.split(","):
                    yield name, int(parse_count(size)), int(seed)


def chosen_rows(wanted: Sequence[str]) -> list[Row]:
    """Default rows whose names match a pattern, and rows written out with a colon."""
    if not wanted:
        return default_rows()
    rows = []
    for text in wanted:
        if ":" in text:
            rows += parse_rows(text)
            continue
        found = [row for row in default_rows() if fnmatch.fnmatch(row.name, text)]
        if not found:
            names = ", ".join(row.name for row in default_rows())
            raise SystemExit(f"error: no row is called '{text}'; there are: {names}")
        rows += found
    return rows


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Recall against time at the largest N, and time against N at the target recall."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = [row for row in rows if "recall" in row]
    time = "cold_us" if any(row.get("cold_us") for row in done) else "hot_us"
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.5))
    largest = max(row["n"] for row in done)
    for name in dict.fromkeys(row["row"] for row in done):
        own = [row for row in done if row["row"] == name and row.get(time)]
        curve = averages([row for row in own if row["n"] == largest], time)
        left.plot([x for x, _ in curve], [y for _, y in curve], "o-", label=name)
        sizes = {}
        for size in sorted({row["n"] for row in own}):
            good = [
                x
                for x, y in averages([r for r in own if r["n"] == size], time)
                if y >= TARGET_RECALL
            ]
            if good:
                sizes[size] = min(good)
        right.plot(list(sizes), list(sizes.values()), "o-", label=name)
    left.set(
        xscale="log", xlabel=f"{time} per query head", ylabel=f"recall@{K}", title=f"N = {largest}"
    )
    right.set(xscale="log", yscale="log", xlabel="N", ylabel=f"{time} per query head")
    right.set_title(f"recall >= {TARGET_RECALL}")
    left.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def averages(rows: Sequence[dict[str, Any]], time: str) -> list[tuple[float, float]]:
    """(time, recall) per setting, over data and seeds."""
    by_setting: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_setting.setdefault(json.dumps(row["setting"]), []).append(row)
    return [
        (statistics.mean(r[time] for r in group), statistics.mean(r["recall"] for r in group))
        for group in by_setting.values()
    ]


def parse() -> argparse.Namespace:
    data = [*PROFILES, "minilm", "minilm:L4H8"]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], parents=[_parser_threads])
    parser.add_argument("--n", default="16k", help="keys, e.g. 16k,128k,1m")
    parser.add_argument("--data", default="paper,stress", help="of " + ", ".join(data))
    parser.add_argument("--seeds", default="0", help="of weights and text alike")
    parser.add_argument(
        "--rows", nargs="*", default=[], help="names with * and ?, or KIND:key=value,key=a|b"
    )
    parser.add_argument("--queries", type=int, default=100, help="positions, of 2048")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--memory", type=parse_count, default="5g", help="limit for copies of a head"
    )
    parser.add_argument("--plot", type=Path, help="a .png; needs matplotlib")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: of the process, on a busy machine"
    )
    parser.add_argument("--list-rows", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    rows = chosen_rows(options.rows)
    if options.list_rows:
        print("\n".join(row.name for row in rows))
        return
    torch.set_num_threads(options.threads)
    memory = Memory()
    stream = [memory.stream_gbps()]
    heads: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for name, size, seed in wanted_heads(options):
        try:
            head = load(name, size, seed, options.queries)
        except LookupError as error:
            heads.append({"data": name, "n": size, "seed": seed, "absent": str(error)})
            say(f"{name}, N {size}, seed {seed}: absent: {error}")
            continue
        about, found = run_head(head, rows, memory, options)
        heads.append(about)
        results += found
    stream.append(memory.stream_gbps())
    if options.plot and any("recall" in row for row in results):
        plot(results, options.plot)
    settings = {key: str(v) if isinstance(v, Path) else v for key, v in vars(options).items()}
    surroundings = {**environment(options.threads), "stream_gbps": stream}
    document = {
        "benchmark": "cold_search",
        "settings": settings,
        "environment": surroundings,
        "heads": heads,
        "rows": results,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
