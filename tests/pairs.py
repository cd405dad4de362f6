"""Tables of parameters in which any two values meet, for products too large to be run whole.

`HYBRID_KV_MATRIX=whole` runs the products.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

WHOLE = os.environ.get("HYBRID_KV_MATRIX") == "whole"


def in_pairs(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of one value of each parameter; any two values of two parameters are in one row.

    About as many rows as the two longest parameters have pairs, instead of the product of all. The
    same ones each time: of all rows that are left the first that has the most pairs not met yet.
    """
    if WHOLE:
        return list(product(*parameters))
    rows = list(product(*map(range, map(len, parameters))))
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing, chosen = set[Any]().union(*pairs.values()), []
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return [tuple(own[at] for own, at in zip(parameters, row, strict=True)) for row in chosen]
