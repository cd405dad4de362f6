"""Python calls of one decoder layer of a decode step, by part, as a table.

    python benchmarks/decode_step/calls.py --out before.json
    python benchmarks/decode_step/calls.py --before before.json

The cheapest of 16 steps, as nearly all are, and what the 16 cost beyond it: in them a page begins
and one leaves the window, be it in the layer's own call or at the forward's end.
Calls of the package's functions, of anybody's, functions and files of the package. With `--before`
each cell has the earlier figure first. Stdout is one JSON document, which `--out`
writes too. `HYBRID_KV_ONE_CALL=0` counts the step op by op.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a script: what benchmarks share is beside its own folder
    sys.path.insert(0, str(Path(__file__).parents[2]))

import hybrid_kv as hkv
from benchmarks.common.layer_cost import MODELS, PARTS, PartCost, layer_costs
from hybrid_kv.report.files import compact, expand

_STEPS = ("a quiet step", "a page")
_COLUMNS = ("calls", "all_calls", "functions", "files")
_SUM = "whole layer"


def figures(parts: dict[str, PartCost]) -> dict[str, dict[str, int]]:
    """By part, and over all."""
    functions: Counter[str] = sum((part.functions for part in parts.values()), Counter())
    whole = PartCost(sum(part.all_calls for part in parts.values()), functions)
    return {
        name: {
            **{"calls": part.calls, "all_calls": part.all_calls},
            **{"functions": len(part.functions), "files": len(part.files)},
        }
        for name, part in {**parts, _SUM: whole}.items()
    }


def rows_of(method: str, shapes: Iterable[str]) -> dict[str, Any]:
    """Figures by shape and kind of step."""
    config = hkv.HybridConfig(method=method)
    return {
        f"{shape}, {step}": figures(parts)
        for shape in shapes
        for step, parts in zip(_STEPS, layer_costs(shape, config), strict=True)
    }


def lines(rows: dict[str, Any], before: dict[str, Any]) -> Iterable[str]:
    """A Markdown table; `before` is empty or has the rows of an earlier run."""
    yield "| shape, step | part | calls | all calls | functions | files |"
    yield "|---|---|---|---|---|---|"
    for row, part in product(rows, (*PARTS, _SUM)):
        cells = []
        for column in _COLUMNS:
            earlier = before.get(row, {}).get(part, {}).get(column)
            now = str(rows[row][part][column])
            cells.append(now if earlier is None else f"{earlier}, {now}")
        yield f"| {row} | {part} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--method", default="hybrid")
    parser.add_argument("--shapes", default=",".join(MODELS))
    parser.add_argument("--before", type=Path, help="JSON of an earlier run")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    options = parser.parse_args()
    rows = rows_of(options.method, options.shapes.split(","))
    before = expand(json.loads(options.before.read_text()))["rows"] if options.before else {}
    print("\n".join(lines(rows, before)))
    report = compact({"benchmark": "decode_calls", "method": options.method, "rows": rows})
    if options.out:
        options.out.write_text(report)
    print(report, end="")


if __name__ == "__main__":
    main()
