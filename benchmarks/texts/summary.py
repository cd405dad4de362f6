"""Tables of `rows.csv`, in Markdown: medians over texts with intervals, worst texts, kinds.

    python benchmarks/texts/summary.py [ROWS]
    python benchmarks/texts/summary.py --write     # into documents, between marks

An interval is of the median over texts, at 95%, by drawing texts (bootstrap), not tokens of one.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import NamedTuple

if __name__ == "__main__":  # a script: the project's root is not on the path
    sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

ROWS, ROOT = Path(__file__).with_name("rows.csv"), Path(__file__).parents[2]
_RESAMPLES, _WIDTH = 4000, 140
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

    def shared(self) -> set[str]:
        """Texts that all methods have read."""
        return set.intersection(*(set(found) for found in self.of.values()))

    def texts(self) -> int:
        """How many texts all methods have read."""
        return len(self.shared())

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
    """The widest table: median KL with its interval and bytes, and the worst text."""
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
    told = "attended + estimate | MB a token | nats | KL: median, worst | same token"
    yield f"| method, {budget} | {told} |"
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
        gains = _gains(results, budget)
        if not gains:
            continue
        worse = [name for name, gain in gains.items() if gain <= 1]
        least, most = min(gains, key=gains.__getitem__), max(gains, key=gains.__getitem__)
        kinds = ", ".join(f"{kind} {gain:.1f}" for gain, kind in _kinds(results, gains))
        yield (
            f"At {budget} the estimate divides the KL of `{_EXACT}` by "
            f"{median(gains.values()):.1f} (median over texts; {gains[least]:.1f} on {least}, "
            f"{gains[most]:.1f} on {most}; by kind: {kinds}); it does not help on {len(worse)} of "
            f"{len(gains)} texts{': ' * bool(worse)}{', '.join(worse)}."
        )
    yield from _ahead(results)


def _ahead(results: Results) -> Iterator[str]:
    """On how many texts the least budget with the estimate beats larger ones without."""
    ours = results.shares[0]
    told = []
    for theirs in [*results.shares[1:], *results.counts]:
        if pairs := _pairs(results, ours, theirs):
            ahead = sum(kl < other for _, kl, other in pairs)
            told.append(f"{_tokens(theirs)} on {ahead} of {len(pairs)}")
    if told:
        yield (
            f"`{_ESTIMATED}` at {ours} is nearer to full attention than `{_EXACT}` at "
            f"{', at '.join(told)} texts."
        )


def _tokens(budget: str) -> str:
    return budget if budget.endswith("%") else f"{budget} tokens"


def _gains(results: Results, budget: str) -> dict[str, float]:
    """By text: the KL without the estimate over that with it."""
    return {
        name: theirs / max(ours, 1e-9) for name, ours, theirs in _pairs(results, budget, budget)
    }


def _kinds(results: Results, gains: Mapping[str, float]) -> list[tuple[float, str]]:
    """Median gain and kind, the least first."""
    kinds = {row.text: row.kind for found in results.of.values() for row in found.values()}
    of: dict[str, list[float]] = {}
    for name, gain in gains.items():
        of.setdefault(kinds[name], []).append(gain)
    return sorted((median(values), kind) for kind, values in of.items())


def _pairs(results: Results, ours: str, theirs: str) -> list[tuple[str, float, float]]:
    mine = results.of.get((_ESTIMATED, ours), {})
    other = results.of.get((_EXACT, theirs), {})
    return [(name, row.kl, other[name].kl) for name, row in mine.items() if name in other]


EXCERPT = (_ESTIMATED, _EXACT, "quest", "snapkv", "streaming_llm")
"""Methods of README's table: ours, the same without the estimate, and three that readers know."""


def readme(results: Results) -> str:
    """README's part: five methods at the least budget and at a larger one, from the same rows."""
    first, more = results.shares[0], results.shares[2]
    full = size(median(results.values("full", "", "bytes")))
    lines = [
        f"SmolLM2-135M, {results.texts()} texts of 4,096 tokens: KL from full attention, median "
        f"over texts, when a head attends {first} or {more} of the context (full attention reads "
        f"{full} MB a token; `benchmarks/texts/run.py`).",
        "",
        f"| method | KL at {first} | KL at {more} | MB read a token at {first} "
        f"| worst text at {first} |",
        "|---|---|---|---|---|",
    ]
    for method in EXCERPT:
        least, wide = (median(results.values(method, one, "kl")) for one in (first, more))
        read_bytes = size(median(results.values(method, first, "bytes")))
        lines.append(
            f"| `{method}` | {short(least)} | {short(wide)} | {read_bytes} "
            f"| {_worst(results, method, first)} |"
        )
    return wrapped("\n".join(lines))


def overview(results: Results) -> str:
    """The part of docs/results.md: what was read, the headline, and what may be said."""
    kinds, count = list(results.kinds), results.texts()
    first = results.shares[0]
    worth = round(max(results.values(_ESTIMATED, first, "estimate"), default=0))
    more = f" `{_EXACT}` at numbers of tokens has as many more as the estimate counts for." * bool(
        results.counts
    )
    gains = _kinds(results, _gains(results, first))
    weak = f" It is weakest on {gains[0][1]}, where it divides KL by {gains[0][0]:.1f} at {first}."
    full = size(median(results.values("full", "", "bytes")))
    lines = [
        f"**A real model.** SmolLM2-135M in float32 reads 4,096 tokens of each of {count} texts "
        f"exactly ({', '.join(kinds[:-1])} and {kinds[-1]}) and 128 more through each method, 16 "
        "at a time: KL from full attention, median over texts (95% interval, over texts) · MB "
        f"read per token (keys, values, codes, moments; full attention reads {full}), by share of "
        "the context that a query head attends. [Rows](../benchmarks/texts/rows.csv) of "
        "`benchmarks/texts/run.py`; [by kind, with nats and tokens](eval.md#many-texts).",
        "",
        *headline(results),
        "",
        f"`{_ESTIMATED}` attends to the keys that stand out and takes all others as 64 Gaussians "
        "per KV head ([how it works](how-it-works.md)), whose moments are read as well, bytes "
        f"worth {worth} entries here.{more} {' '.join(_ahead(results))}{weak}",
    ]
    return wrapped("\n".join(lines))


def documented(results: Results) -> str:
    """The part of docs/eval.md: tables of README's two budgets, and all that is claimed."""
    parts = []
    for budget in (results.shares[0], results.shares[2]):
        parts += ["\n".join(details(results, budget)), "\n".join(by_kind(results, budget))]
    parts.append("\n".join(f"- {claim}" for claim in claims(results)))
    return wrapped("\n\n".join(parts))


def wrapped(text: str) -> str:
    """Text of Markdown with its long lines broken, but for those of tables."""
    lines: list[str] = []
    for line in text.split("\n"):
        indent = "  " if line.startswith("- ") else ""
        broken = wrap(line, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)
        lines += [line] if line.startswith("|") else broken or [""]
    return "\n".join(lines)


def of_the_same_texts(rows: Sequence[Row]) -> Results:
    """What documents tell: every figure is over the texts that all methods have read."""
    shared = Results(rows).shared()
    return Results([row for row in rows if row.text in shared])


def put(path: Path, mark: str, content: str) -> None:
    """Replaces what stands between two marks of a file."""
    begin, end = f"<!-- {mark} -->\n", f"\n<!-- end of {mark} -->"
    text = path.read_text()
    before, middle, after = text.partition(begin)
    _, last, after = after.partition(end)
    if not middle or not last:
        raise SystemExit(f"{path} has no marks {begin.strip()} and {end.strip()}")
    path.write_text(before + begin + content + end + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, nargs="?", default=ROWS)
    parser.add_argument("--write", action="store_true", help="the documents' tables")
    args = parser.parse_args()
    rows = read(args.rows)
    results = Results(rows)
    if args.write:
        results = of_the_same_texts(rows)
        put(ROOT / "README.md", "texts", readme(results))
        put(ROOT / "docs" / "results.md", "texts", overview(results))
        put(ROOT / "docs" / "eval.md", "texts", documented(results))
        return
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
