"""Constants of the error bar of tokens, and what it is worth, from the rows of `run.py`.

    python benchmarks/error_bar/fit.py ROWS.csv > SUMMARY.json

On stderr: the constants of `hybrid_kv/watch/token_errors.py`, learned on all texts; by budget how
well signals order tokens by KL above 0.01 and by flips (AUC); and by leave-one-text-out how many
tokens stay below the bar of 90%, how wide it is beside the true KL, and the worst text; what a
limit of 0.01 verifies, and what is left then. Stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if __name__ == "__main__":  # a script: the project's root is not on the path
    sys.path.insert(0, str(Path(__file__).parents[2]))

from hybrid_kv.report.files import compact

Floats = NDArray[np.float64]

LIMIT = 0.01
"""KL in nats from which on a token is another one for the reader."""
COVERED = 0.9
_LEAST = 1e-6


class Rows(NamedTuple):
    """Tokens of all texts and budgets, one of each array's entries for each."""

    text: NDArray[Any]
    kind: NDArray[Any]
    budget: NDArray[Any]
    kl: Floats
    flip: Floats
    half: Floats
    entropy: Floats
    margin: Floats

    @classmethod
    def read(cls, path: Path) -> Rows:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        names = [[row[name] for row in rows] for name in cls._fields[:3]]
        numbers = [[float(row[name]) for row in rows] for name in cls._fields[3:]]
        return cls(*map(np.array, names), *(np.array(one) for one in numbers))

    def of(self, mask: NDArray[Any]) -> Rows:
        return Rows(*(one[mask] for one in self))

    @property
    def size(self) -> Floats:
        """What the expected KL is a multiple of."""
        return self.half**2.5 * np.maximum(self.entropy, 0) ** 0.75


SIGNALS: dict[str, Callable[[Rows], Floats]] = {
    "size": lambda rows: rows.size,
    "half^2 entropy": lambda rows: rows.half**2 * rows.entropy,
    "half": lambda rows: rows.half,
    "entropy": lambda rows: rows.entropy,
    "margin": lambda rows: -rows.margin,
    "half / margin": lambda rows: rows.half / np.maximum(rows.margin, _LEAST),
}


def auc(signal: Floats, is_hit: NDArray[Any]) -> float:
    """Chance that a hit has a larger signal than another token (Mann-Whitney); NaN without both."""
    hits = int(is_hit.sum())
    others = len(is_hit) - hits
    if not hits or not others:
        return float("nan")
    _, place, counts = np.unique(signal, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return float((ranks[is_hit].sum() - hits * (hits + 1) / 2) / (hits * others))


def learned(rows: Rows) -> tuple[float, float]:
    """Multiples of the size: the mean KL over its mean, and the one that 90% stay below."""
    ratio = rows.kl / np.maximum(rows.size, 1e-12)
    return float(rows.kl.sum() / rows.size.sum()), float(np.quantile(ratio, COVERED))


def signals_of(rows: Rows) -> Floats:
    """[tokens, 3]: 1, log(margin), log(half)."""
    logs = [np.log(np.maximum(one, _LEAST)) for one in (rows.margin, rows.half)]
    return np.stack([np.ones_like(rows.half), *logs], 1)


def logistic(rows: Rows, ridge: float = 1e-3) -> Floats:
    """Weights of `signals_of` by which flips are likeliest (Newton's method)."""
    x, y, weights = signals_of(rows), rows.flip, np.zeros(3)
    for _ in range(50):
        p = 1 / (1 + np.exp(-x @ weights))
        curve = (x * (p * (1 - p))[:, None]).T @ x + ridge * np.eye(3)
        step = np.linalg.solve(curve, x.T @ (y - p) - ridge * weights)
        weights = weights + step
        if np.abs(step).max() < 1e-9:
            break
    return weights


def risk(rows: Rows, weights: Floats) -> Floats:
    """Of a flip, for each token."""
    odds: Floats = 1 / (1 + np.exp(-signals_of(rows) @ weights))
    return odds


def left_out(rows: Rows) -> tuple[Floats, Floats, Floats]:
    """Expected KL, bar and risk of each token by what the other texts have taught."""
    kl, bar, flip = (np.zeros(len(rows.kl)) for _ in range(3))
    for text in np.unique(rows.text):
        own = rows.text == text
        others, mine = rows.of(~own), rows.of(own)
        mean, high = learned(others)
        kl[own], bar[own] = mean * mine.size, high * mine.size
        flip[own] = risk(mine, logistic(others))
    return kl, bar, flip


def limited(rows: Rows, expected: Floats, most: float, block: int = 8) -> tuple[Floats, Floats]:
    """What `max_error` would verify of each token and budget, were each text one answer: of every
    block all tokens from the first on whose expected KL is above `most`.

    Returns:
        Whether a token is verified, and whether a pass begins at it, [tokens] each.
    """
    verified, begins = np.zeros(len(rows.kl)), np.zeros(len(rows.kl))
    for text in np.unique(rows.text):
        for budget in np.unique(rows.budget):
            (places,) = np.nonzero((rows.text == text) & (rows.budget == budget))
            for begin in range(0, len(places), block):
                some = places[begin : begin + block]
                (above,) = np.nonzero(expected[some] > most)
                if len(above):
                    verified[some[above[0] :]] = 1
                    begins[some[above[0]]] = 1
    return verified, begins


def by_budget(rows: Rows) -> dict[str, dict[str, float]]:
    """AUC of the signals, coverage and width of the bar, and calls of the risk, by budget."""
    expected, bar, flip = left_out(rows)
    verified, passes = limited(rows, expected, LIMIT)
    found: dict[str, dict[str, float]] = {}
    for budget in [*dict.fromkeys(rows.budget.tolist()), "all"]:
        own = (rows.budget == budget) | (budget == "all")
        some, covered = rows.of(own), rows.kl[own] <= bar[own]
        texts = {t: float(covered[some.text == t].mean()) for t in np.unique(some.text)}
        worst = min(texts, key=lambda text: texts[text])
        kinds = {k: float(covered[some.kind == k].mean()) for k in np.unique(some.kind)}
        line: dict[str, Any] = {
            "tokens": len(some.kl),
            "kl": float(some.kl.mean()),
            "expected_kl": float(expected[own].mean()),
            "above": float((some.kl > LIMIT).mean()),
            "flips": int(some.flip.sum()),
            "expected_flips": float(flip[own].sum()),
            "coverage": float(covered.mean()),
            "worst_text": worst,
            "worst_coverage": texts[worst],
            "worst_kind": min(kinds, key=lambda kind: kinds[kind]),
            "worst_kind_coverage": min(kinds.values()),
            "width": float(np.median(bar[own] / np.maximum(some.kl, 1e-9))),
            "bar_above": float((bar[own] > LIMIT).mean()),
            "kl_left": float(np.where(bar[own] > LIMIT, 0, some.kl).mean()),
            "verified": float(verified[own].mean()),
            "passes": float(passes[own].mean()),
            "kl_limited": float((some.kl * (1 - verified[own])).mean()),
            "flips_limited": int((some.flip * (1 - verified[own])).sum()),
            "flip_auc_risk": auc(flip[own], some.flip > 0),
        }
        for name, signal in SIGNALS.items():
            line[f"kl_auc {name}"] = auc(signal(some), some.kl > LIMIT)
            line[f"flip_auc {name}"] = auc(signal(some), some.flip > 0)
        found[str(budget)] = line
    return found


def covered_by_kind(rows: Rows) -> dict[str, dict[str, float]]:
    """Share of tokens below the bar by what the other texts have taught, by budget and kind."""
    covered = rows.kl <= left_out(rows)[1]
    return {
        str(budget): {
            str(kind): float(covered[(rows.budget == budget) & (rows.kind == kind)].mean())
            for kind in np.unique(rows.kind)
        }
        for budget in dict.fromkeys(rows.budget.tolist())
    }


def shown(found: dict[str, dict[str, float]], names: Sequence[str]) -> str:
    """Lines of the table."""
    lines = [f"{'':24}" + "".join(f"{budget:>18}" for budget in found)]
    for name in names:
        cells = [line[name] for line in found.values()]
        texts = [one if isinstance(one, str) else f"{one:.4g}" for one in cells]
        lines.append(f"{name:24}" + "".join(f"{text:>18}" for text in texts))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    args = parser.parse_args()
    rows = Rows.read(args.rows)
    kl, bar = learned(rows)
    weights = [round(one, 2) for one in logistic(rows).tolist()]
    found = by_budget(rows)
    print(f"kl={kl:.3g}, kl_bar={bar:.3g}, flip={tuple(weights)}", file=sys.stderr)
    print(shown(found, list(found["all"])), file=sys.stderr)
    constants = {"kl": kl, "kl_bar": bar, "flip": weights}
    texts = len(np.unique(rows.text))
    kept = [
        {"budget": budget, **{name: line[name] for name in SUMMED}}
        for budget, line in found.items()
    ]
    covered = covered_by_kind(rows)
    print(shown(covered, list(dict.fromkeys(rows.kind.tolist()))), file=sys.stderr)
    kinds = [
        {"kind": kind, **{budget: line[kind] for budget, line in covered.items()}}
        for kind in dict.fromkeys(rows.kind.tolist())
    ]
    document = {"benchmark": "error_bar", "texts": texts, "constants": constants, "rows": kept}
    document["covered"] = kinds
    print(compact(document), end="")


SUMMED = (
    *("kl", "flips", "coverage", "worst_coverage", "width", "bar_above", "kl_left"),
    *("verified", "passes", "kl_limited", "flips_limited"),
    *("kl_auc size", "kl_auc entropy", "kl_auc margin"),
    *("flip_auc_risk", "flip_auc margin"),
)
"""Of a line, in the document."""


if __name__ == "__main__":
    main()
