"""Tables of `rows.csv`, in Markdown: medians over texts with intervals, worst texts, kinds.

    python benchmarks/texts/summary.py [ROWS]

An interval is of the median over texts, at 95%, by drawing texts (bootstrap), not tokens of one.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

if __name__ == "__main__":  # a script: the project's root is not on the path
    sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

ROWS = Path(__file__).with_name("rows.csv")
_RESAMPLES = 4000
_ESTIMATED, _EXACT = "hybrid", "flat"
"""The default method, and the search that it is held against: all that it adds is the estimate."""


class Row(NamedTuple):
    """One text under one method and budget; see `run.py`."""

    text: str
    kind: str
    method: str
    budget: str
    attended: float
    estimate: float
    bytes: float
    nats: float
    kl: float
    top1: float


class Results:
    """All rows, by method and budget; a method at a number of tokens goes by its number."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.of: dict[tuple[str, str], dict[str, Row]] = {}
        for row in rows:
            self.of.setdefault((row.method, row.budget), {})[row.text] = row
        self.kinds = dict.fromkeys(row.kind for row in rows)
        budgets = dict.fromkeys(row.budget for row in rows if row.budget)
        self.shares = sorted((one for one in budgets if one.endswith("%")), key=_share)
        self.counts = sorted((one for one in budgets if not one.endswith("%")), key=int)
        self.methods = list(dict.fromkeys(row.method for row in rows if row.budget))

    def texts(self) -> int:
        """Texts that all methods have read."""
        return len(set.intersection(*(set(found) for found in self.of.values())))

    def values(self, method: str, budget: str, name: str) -> list[float]:
        """A column over texts; empty for what was not measured."""
        return [getattr(row, name) for row in self.of.get((method, budget), {}).values()]


def _share(budget: str) -> float:
    return float(budget.removesuffix("%"))


def read(path: Path) -> list[Row]:
    """The CSV."""
    with path.open(newline="") as file:
        return [
            Row(**{name: row[name] for name in Row._fields[:4]}, **_numbers(row))  # type: ignore[arg-type]
            for row in csv.DictReader(file)
        ]


def _numbers(row: Mapping[str, str]) -> dict[str, float]:
    return {name: float(row[name]) for name in Row._fields[4:]}


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The 95% interval of the median over texts, by drawing as many texts with replacement."""
    found = np.asarray(values)
    drawn = np.random.default_rng(seed).integers(len(found), size=(_RESAMPLES, len(found)))
    low, high = np.percentile(np.median(found[drawn], axis=1), [2.5, 97.5])
    return float(low), float(high)


def short(value: float) -> str:
    """Two figures: .0082, .24, 1.4."""
    digits = 1 if abs(value) >= 1 else 2 if abs(value) >= 0.1 else 3 if abs(value) >= 0.01 else 4
    told = f"{value:.{digits}f}"
    return told.replace("0.", ".", 1) if abs(float(told)) < 1 else told


def size(count: float) -> str:
    """Bytes in MB (10^6)."""
    return f"{count / 1e6:.1f}" if count < 1e8 else f"{count / 1e6:.0f}"


def name_of(results: Results, method: str) -> str:
    """As tables have it, with the number of texts where it has not read all."""
    read_by = {one: len(results.values(one, results.shares[0], "kl")) for one in results.methods}
    count, most = read_by[method], max(read_by.values())
    return f"`{method}`" + f" ({count} texts)" * (0 < count < most)


def headline(results: Results) -> Iterator[str]:
    """README's table: median KL with its interval and bytes; the worst text at the first budget."""
    first = results.shares[0]
    yield f"| method | {' | '.join(results.shares)} | worst text at {first} |"
    yield "|---" * (len(results.shares) + 2) + "|"
    for method in _in_order(results):
        cells = [_headline_cell(results, method, budget) for budget in results.shares]
        name = name_of(results, method)
        yield f"| {name} | {' | '.join(cells)} | {_worst(results, method, first)} |"
    if results.counts:
        cells = [_headline_cell(results, _EXACT, budget) for budget in results.counts]
        heads = f"`{_EXACT}` at {', '.join(results.counts)} tokens"
        yield f"| {heads} | {' | '.join(cells)} | {_worst(results, _EXACT, results.counts[0])} |"


def _in_order(results: Results) -> list[str]:
    """Methods by their median KL, averaged over budgets in logarithms."""

    def key(method: str) -> float:
        found = [results.values(method, budget, "kl") for budget in results.shares]
        return float(np.mean([np.log(median(values) + 1e-9) for values in found if values]))

    return sorted(results.methods, key=key)


def _headline_cell(results: Results, method: str, budget: str) -> str:
    values = results.values(method, budget, "kl")
    if not values:
        return "–"
    low, high = interval(values)
    read_bytes = size(median(results.values(method, budget, "bytes")))
    return f"{short(median(values))} ({short(low)} to {short(high)}) · {read_bytes}"


def _worst(results: Results, method: str, budget: str) -> str:
    found = results.of.get((method, budget))
    if not found:
        return "–"
    worst = max(found.values(), key=lambda row: row.kl)
    return f"{worst.text} {short(worst.kl)}"


def details(results: Results, budget: str) -> Iterator[str]:
    """A table for one budget: everything that was counted, as medians over texts."""
    yield "| method | attended + estimate | MB a token | nats | KL: median, worst | same token |"
    yield "|---|---|---|---|---|---|"
    for method in _in_order(results):
        if not results.values(method, budget, "kl"):
            yield f"| `{method}` | refused | | | | |"
            continue
        some = {
            name: median(results.values(method, budget, name))
            for name in ("attended", "estimate", "bytes", "nats", "kl", "top1")
        }
        estimate = f" + {some['estimate']:.0f}" * (some["estimate"] > 0)
        yield (
            f"| `{method}` | {some['attended']:.0f}{estimate} | {size(some['bytes'])} "
            f"| {'+' * (some['nats'] >= 0)}{short(some['nats'])} "
            f"| {short(some['kl'])}, {_worst(results, method, budget)} | {short(some['top1'])} |"
        )


def by_kind(results: Results, budget: str) -> Iterator[str]:
    """A table for one budget: median KL of each kind's texts."""
    yield f"| method, {budget} | {' | '.join(results.kinds)} |"
    yield "|---" * (len(results.kinds) + 1) + "|"
    for method in _in_order(results):
        found = results.of.get((method, budget), {}).values()
        cells = []
        for kind in results.kinds:
            values = [row.kl for row in found if row.kind == kind]
            cells.append(short(median(values)) if values else "–")
        yield f"| `{method}` | {' | '.join(cells)} |"


def claims(results: Results) -> Iterator[str]:
    """What may be said of the estimate, and where it is weak: `hybrid` against `flat`."""
    for budget in results.shares:
        pairs = _pairs(results, budget, budget)
        if not pairs:
            continue
        worse = [name for name, ours, theirs in pairs if ours >= theirs]
        gains = sorted(theirs / max(ours, 1e-9) for _, ours, theirs in pairs)
        weakest = min(pairs, key=lambda one: one[2] / max(one[1], 1e-9))
        yield (
            f"at {budget} the estimate divides KL by {median(gains):.1f} (median; from "
            f"{gains[0]:.1f} on {weakest[0]} to {gains[-1]:.1f}); not better on {len(worse)} of "
            f"{len(pairs)} texts{': ' + ', '.join(worse) if worse else ''}"
        )
        yield from _weak_kinds(results, budget)
    ours = results.shares[0]
    for theirs in [*results.shares[1:], *results.counts]:
        if pairs := _pairs(results, ours, theirs):
            ahead = [name for name, kl, other in pairs if kl < other]
            yield (
                f"`{_ESTIMATED}` at {ours} is nearer to full attention than `{_EXACT}` at {theirs} "
                f"on {len(ahead)} of {len(pairs)} texts"
            )


def _pairs(results: Results, ours: str, theirs: str) -> list[tuple[str, float, float]]:
    mine = results.of.get((_ESTIMATED, ours), {})
    other = results.of.get((_EXACT, theirs), {})
    return [(name, row.kl, other[name].kl) for name, row in mine.items() if name in other]


def _weak_kinds(results: Results, budget: str) -> Iterator[str]:
    kinds = {row.text: row.kind for row in results.of[_ESTIMATED, budget].values()}
    gains: dict[str, list[float]] = {}
    for name, ours, theirs in _pairs(results, budget, budget):
        gains.setdefault(kinds[name], []).append(theirs / max(ours, 1e-9))
    told = sorted((median(values), kind) for kind, values in gains.items())
    yield "  by kind: " + ", ".join(f"{kind} {gain:.1f}" for gain, kind in told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, nargs="?", default=ROWS)
    args = parser.parse_args()
    results = Results(read(args.rows))
    print(f"{results.texts()} texts that all methods have read, {len(results.kinds)} kinds\n")
    print("KL, median over texts (95% interval) · MB read per token\n")
    print("\n".join(headline(results)))
    for budget in results.shares:
        print(f"\n### {budget}\n")
        print("\n".join(details(results, budget)))
        print()
        print("\n".join(by_kind(results, budget)))
    print()
    print("\n".join(claims(results)))


if __name__ == "__main__":
    main()
