"""One row on one head: quality on the test queries, work, times, memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.cold_search.engines import Engine, Own, Setting, Work, use_threads
from benchmarks.cold_search.heads import Head
from benchmarks.cold_search.quality import Quality, Truth, by_quarter
from benchmarks.cold_search.rows import SINGLE, Knob, Row
from benchmarks.cold_search.targets import Point, Target, find_points, ladder
from benchmarks.cold_search.timing import Stopwatch, cold_us, hot_us, num_copies

CURVE_POINTS = 5
"""Settings of a swept row beside those of the targets, for curves."""


@dataclass(frozen=True)
class Plan:
    """What is measured. threads: of the cold times; cold_bytes: limit for copies, 0 for none."""

    targets: Sequence[Target]
    curve: bool
    threads: Sequence[int]
    cold_bytes: int
    watch: Stopwatch


class Bench:
    """One head with its exact answers; every row is asked the same queries."""

    def __init__(self, head: Head, plan: Plan) -> None:
        self.head, self.plan = head, plan
        self.truth = Truth(head.keys, head.test)
        self._calibration = Truth(head.keys, head.calibration)
        self._groups = list(head.test.numpy())
        self._calibration_groups = list(head.calibration.numpy())

    def run(self, row: Row) -> Iterator[dict[str, Any]]:
        """One result per mode and setting of the row.

        Raises:
            AbsentError: what the row needs is not installed.
        """
        engine, clock = row.make(), self.plan.watch.clock
        begin = clock()
        engine.build(self.head.keys, self.head.prompt)
        build_s = clock() - begin
        modes = row.modes if self.head.group > 1 else SINGLE
        about = {"row": row.name, "build_s": build_s, **self._memory(engine)}
        found = [
            about | {"mode": mode} | self._point(engine, mode == "group", setting, points)
            for mode in modes
            for setting, points in self._settings(engine, mode == "group", row.knob)
        ]
        if self.plan.cold_bytes:
            self._add_cold(engine, found)
        yield from found

    def _settings(
        self, engine: Engine, grouped: bool, knob: Knob | None
    ) -> list[tuple[Setting, list[Point]]]:
        """Settings to measure, with the goals that each one serves."""
        if knob is None:
            return [({}, [])]

        def evaluate(value: int) -> Quality:
            engine.use({knob.name: value})
            return self._calibration.judge(ask(engine, self._calibration_groups, grouped))

        points = find_points(evaluate, ladder(knob.low, knob.high), self.plan.targets)
        values = {point.value for point in points}
        if self.plan.curve:
            values |= set(np.geomspace(knob.low, knob.high, CURVE_POINTS).round().astype(int))
        return [
            ({knob.name: int(value)}, [point for point in points if point.value == value])
            for value in sorted(values)
        ]

    def _point(
        self, engine: Engine, grouped: bool, setting: Setting, points: Sequence[Point]
    ) -> dict[str, Any]:
        head, watch = self.head, self.plan.watch
        engine.use(setting)
        engine.work()
        ids = ask(engine, self._groups, grouped)
        work = engine.work()
        recalls = self.truth.recalls(ids)
        return {
            "setting": dict(setting),
            "targets": [told(point) for point in points],
            **asdict(self.truth.judge(ids)),
            "recall_by_quarter": by_quarter(recalls, head.steps, head.num_steps, head.group),
            "oracle_mass": self.truth.oracle_mass,
            **amounts(engine, work, grouped, self.head),
            "hot_us": hot_us(engine, self._groups, grouped, watch),
        }

    def _memory(self, engine: Engine) -> dict[str, Any]:
        notes = engine.notes()
        seconds = {
            name: sum(note[name] for note in notes)
            for name in ("lists_s", "project_s")
            if notes and all(name in note for note in notes)
        }
        held = {"bytes_per_key": engine.held_bytes / len(self.head.keys)}
        return held | seconds | {"notes": notes}

    def _add_cold(self, engine: Engine, results: list[dict[str, Any]]) -> None:
        """Cold times of all results, over one set of copies per number of threads."""
        plan, watch = self.plan, self.plan.watch
        count = num_copies(engine.held_bytes, watch.memory.l3_bytes, plan.cold_bytes)
        for result in results:
            result.update(cold_us={}, cold_copies=count, cold_bytes=count * engine.held_bytes)
        threads = plan.threads if isinstance(engine, Own) else plan.threads[:1]
        for number in threads if count else ():
            use_threads(number)
            copies = engine.copies(count)
            for result in results:
                copies.use(result["setting"])
                grouped = result["mode"] == "group"
                taken = cold_us(copies, count, self._groups, grouped, watch)
                result["cold_us"][str(number)] = taken
            del copies
            gc.collect()
        use_threads(plan.threads[0])


def ask(engine: Engine, groups: Sequence[np.ndarray], grouped: bool) -> np.ndarray:
    """The ids [P * G, K] that an engine finds."""
    return np.concatenate([engine.answer(group, grouped) for group in groups])


def told(point: Point) -> dict[str, Any]:
    """A goal and whether the calibration queries reached it, JSON-ready."""
    return asdict(point.target) | {"calibrated": point.calibrated, "reached": point.reached}


def amounts(engine: Engine, work: Work, grouped: bool, head: Head) -> dict[str, Any]:
    """Work per search and bytes of key rows per query head, from what was counted."""
    size, queries = len(head.keys), head.test.shape[0] * head.group
    calls = head.test.shape[0] if grouped else queries
    rows = calls * size if engine.exact else work.rows
    dots = queries * size if engine.exact else work.dots
    if rows is None or dots is None:
        return {"scanned_ratio": None, "dots_per_query": None, "bytes_read": None}
    read = rows * engine.row_bytes
    if isinstance(engine, Own) and engine.code_bytes:  # of all keys; rows are those ranked exactly
        read, rows = read + calls * engine.code_bytes, calls * size
    elif isinstance(engine, Own) and not engine.exact:  # candidates are ranked by their own keys
        read += max(0, dots - rows * queries // calls) * engine.exact_row_bytes
    return {
        "scanned_ratio": rows / (calls * size),
        "dots_per_query": dots / queries,
        "bytes_read": read / queries,
    }
