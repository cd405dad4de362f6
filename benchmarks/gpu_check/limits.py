"""How far a value may be from the one that it is held to; each difference in a row has a limit."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

ROUNDING = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of outputs of order one, by the dtype that they are computed in: a few units in the last place,
where a GPU multiplies float32 in 10 bits (TF32)."""

_MARK = "difference"


class Difference(NamedTuple):
    """What was found, and the most that it may be; in the same unit."""

    found: float
    limit: float


def largest(one: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors, in float64 on the host; not-a-number if either is."""
    return float((one.double().cpu() - other.double().cpu()).abs().max())


def checked(values: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The values as a row keeps them, and what is beyond its limit; None where nothing is.

    A value that is called a difference and is no `Difference` is beyond any limit.
    """
    kept: dict[str, Any] = {}
    beyond = []
    for name, value in values.items():
        if isinstance(value, Difference):
            kept |= {name: value.found, f"{name}_limit": value.limit}
            if not value.found <= value.limit:  # not-a-number is beyond it, too
                beyond.append(f"{name} is {value.found:.4g}, the limit is {value.limit:.4g}")
            continue
        kept[name] = value
        if _MARK in name:
            beyond.append(f"{name} is {value} and has no limit")
    return kept, "; ".join(beyond) or None
