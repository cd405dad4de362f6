"""Entries of figures and tables: measured rows, each with a name and a look."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.canvas import Shape
from hybrid_kv.report.profile import MeasuredRun
from hybrid_kv.report.run import MemoryBytes, PhasesMs, Run

METHOD_SLOTS = {
    "full": 0,
    "hybrid": 1,
    "retrieval_attention": 2,
    "graph": 2,
    "quest": 3,
    "flat": 4,
    "ivf": 5,
    "hnsw": 6,
    "streaming_llm": 7,
}
_SHAPES: tuple[Shape, ...] = (
    *("cross", "circle", "square", "diamond", "up", "down", "circle", "square"),
)
_DASHES: tuple[tuple[float, ...], ...] = (
    *((2, 3), (), (), (7, 3), (3, 2), (9, 3, 2, 3), (1.5, 2.5), (12, 4)),
)


@dataclass(frozen=True, slots=True)
class SeriesLook:
    """Look of a method in every figure; marker and dash tell what colour does."""

    colour: str
    shape: Shape
    dash: tuple[float, ...]


def looks(methods: Iterable[str]) -> dict[str, SeriesLook]:
    """A look for each method: known ones keep theirs on every page, others take what is free."""
    slots: dict[str, int] = {}
    names = list(dict.fromkeys(methods))
    for name in names:
        slot = METHOD_SLOTS.get(name)
        if slot is not None and slot not in slots.values():
            slots[name] = slot
    for name in names:
        if name not in slots:
            free = [slot for slot in range(1, 8) if slot not in slots.values()]
            slots[name] = free[0] if free else 1 + len(slots) % 7
    ordered = ((name, slots[name]) for name in names)
    return {name: SeriesLook(f"s{slot}", _SHAPES[slot], _DASHES[slot]) for name, slot in ordered}


@dataclass(frozen=True, slots=True)
class Entry:
    """A measured row: `name` is its method, numbered where a context has the method twice.

    anchor: an identifier that only this row of a document has.
    """

    name: str
    row: MeasuredRun
    look: SeriesLook
    anchor: str

    @property
    def place(self) -> str:
        """Method and context, as people say it."""
        return f"{self.name}, {numbers.tokens(self.row.context_tokens)}"


def entries_of(rows: Sequence[MeasuredRun], names: Sequence[str] | None = None) -> list[Entry]:
    """An entry for each row; `names` stand for the methods where these do not tell rows apart."""
    seen: Counter[tuple[str, int]] = Counter()
    labels = []
    for row, name in zip(rows, names or [row.method for row in rows], strict=True):
        seen[name, row.context_tokens] += 1
        number = seen[name, row.context_tokens]
        labels.append(f"{name} ({number})" if number > 1 else name)
    look = looks(labels)
    pairs = enumerate(zip(labels, rows, strict=True))
    return [Entry(label, row, look[label], str(number)) for number, (label, row) in pairs]


def measured(entries: Sequence[Entry]) -> list[Entry]:
    """Entries with a time per token, methods in the order of all entries."""
    order = list(dict.fromkeys(entry.name for entry in entries))
    known = (entry for entry in entries if entry.row.tpot_ms is not None)
    return sorted(known, key=lambda entry: order.index(entry.name))


def cut_short(row: MeasuredRun) -> bool:
    """Whether the user ended the measurement early."""
    return row.interrupted if isinstance(row, Run) else row.status == "interrupted"


def by_context(entries: Iterable[Entry]) -> dict[int, list[Entry]]:
    """Entries by context, shortest first."""
    groups: dict[int, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.row.context_tokens, []).append(entry)
    return dict(sorted(groups.items()))


def by_name(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Entries by name in order of appearance, each with its contexts in order."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.name, []).append(entry)
    for group in groups.values():
        group.sort(key=lambda entry: entry.row.context_tokens)
    return groups


PHASES: Mapping[str, tuple[str, ...]] = {
    "retrieval": ("search", "select"),
    "attention": ("cold_attention", "resident_attention", "merge"),
    "moving": ("transfer", "wait"),
    "the rest": ("model", "python", "other"),
}
"""Phases in the order in which they are stacked, under what they are for."""

PHASE_NAMES = {
    "cold_attention": "cold attention",
    "resident_attention": "resident attention",
    "python": "Python",
}


def phases(row: MeasuredRun) -> dict[str, float]:
    """Milliseconds of a step by phase, in the order of `PHASES`; what was not measured is absent.

    other: without what model and python account for.
    """
    found = split(row.phases_ms)
    order = [phase for group in PHASES.values() for phase in group]
    return {phase: found[phase] for phase in order if phase in found}


def split(times: PhasesMs) -> dict[str, float]:
    """Phases that do not overlap, none below zero: model and python are taken out of other."""
    values = {name: max(0.0, value) for name, value in times if value is not None}
    if "other" in values:
        inside = values.get("model", 0.0) + values.get("python", 0.0)
        values["other"] = max(0.0, values["other"] - inside)
    return values


def phase_name(phase: str, known: Iterable[str]) -> str:
    """A phase as people say it; other is model and Python where nobody told these apart."""
    if phase == "other" and "model" not in known:
        return "model and Python"
    return PHASE_NAMES.get(phase, phase)


MEMORY = {
    "device_peak": ("device, peak", "p_resident_attention"),
    "host_kv": ("host KV", "p_cold_attention"),
    "host_index": ("host index", "p_search"),
}
"""Tiers that add up, with name and colour; host_peak holds the last two and more."""


def tiers(memory: MemoryBytes) -> dict[str, int]:
    """Bytes by tier; what was not measured is absent."""
    found = {name: getattr(memory, name) for name in MEMORY}
    return {name: count for name, count in found.items() if count is not None}
