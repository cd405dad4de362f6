"""`auto` beside the kinds that it chooses from, on the same copies, in turns."""

from __future__ import annotations

import gc
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cold_search.engines import Engine, Own, use_threads
from benchmarks.cold_search.heads import Head
from benchmarks.cold_search.measure import Plan
from benchmarks.cold_search.rows import own
from benchmarks.cold_search.timing import Groups, Stopwatch, cold_times, num_copies
from hybrid_kv.plugins import INDEXES

HOT_TURNS = 9
_AUTO: Any = INDEXES["auto"].params()
PROMISE = {
    "target_recall": _AUTO.target_recall,
    "target_mass": 1.0,
    "max_scanned": _AUTO.sizes.max_scanned,
}
"""What `auto` asks of a graph: the kind alone promises less by default, and is quicker for it."""


def compare_auto(head: Head, plan: Plan, keys: str) -> dict[str, Any]:
    """What serves, and times per query head by number of threads: `cold`, and `hot`.

    All promise the same recall. `auto` builds its graphs where it expects them to pay.

    Raises:
        AbsentError: this version has no such kinds.
    """
    rows = {
        "flat": own("flat", keys=keys, precision="int8"),
        "sketch": own("sketch", swept=False, keys=keys),
        "graph": own("graph", swept=False, keys=keys, **PROMISE),
        "auto": own("auto", keys=keys),
    }
    engines: dict[str, Own] = {}
    for name, row in rows.items():
        engine = row.make()
        assert isinstance(engine, Own)
        engine.build(head.keys, head.prompt)
        engines[name] = engine
    limit, largest = plan.cold_bytes // len(rows), max(one.held_bytes for one in engines.values())
    count = num_copies(largest, plan.watch.memory.l3_bytes, limit)
    if not count:
        return {"absent": "copies of the head exceed --memory"}
    groups = list(head.test.numpy())
    told: dict[str, Any] = {"copies": count, "serves": {}, "reasons": {}, "cold": {}, "hot": {}}
    for threads in plan.threads:
        use_threads(threads)
        alone = {name: engine.repeated(1) for name, engine in engines.items()}
        told["hot"][str(threads)] = _compared(_hot_times(alone, groups, plan.watch))
        [about] = alone["auto"].notes()
        told["serves"][str(threads)] = about["serves"]
        told["reasons"][str(threads)] = about["reason"]
        del alone
        copies = {name: (engine.copies(count), True) for name, engine in engines.items()}
        told["copies_serve"] = dict(Counter(one["serves"] for one in copies["auto"][0].notes()))
        taken = cold_times(copies, count, groups, plan.watch)
        told["cold"][str(threads)] = _compared({name: one["times"] for name, one in taken.items()})
        del copies
        gc.collect()
    use_threads(plan.threads[0])
    return told


def _hot_times(
    engines: Mapping[str, Engine], groups: Groups, watch: Stopwatch
) -> dict[str, list[float]]:
    """Microseconds per query head of one head that is asked again and again, turn by turn."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(HOT_TURNS):
        for name, engine in engines.items():
            engine.answer(groups[-1], True)
            begin = watch.clock()
            for group in groups:
                engine.answer(group, True)
            times[name].append(1e6 * (watch.clock() - begin) / sum(map(len, groups)))
    return times


def _compared(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Medians, and `auto` over the best of the others: of medians, and the median over turns."""
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    others = [name for name in times if name != "auto"]
    turns = zip(*(times[name] for name in (*others, "auto")), strict=True)
    return {
        **{f"{name}_us": taken for name, taken in medians.items()},
        "auto_over_better": medians["auto"] / min(medians[name] for name in others),
        "auto_over_better_by_turn": statistics.median(auto / min(rest) for *rest, auto in turns),
    }
