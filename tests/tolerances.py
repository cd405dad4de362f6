"""How far two ways of computing one attention output may differ, by dtype; the only such table.

Both ways accumulate in float32, so the difference is the rounding of inputs and outputs: a few
units in the last place (2**-24, 2**-8, 2**-11 relative) of outputs of order one.

    torch.testing.assert_close(got, expected, **TOLERANCES[dtype])
"""

from __future__ import annotations

from typing import TypedDict

import torch


class Tolerance(TypedDict):
    """The two tolerances of `torch.testing.assert_close`."""

    rtol: float
    atol: float


TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
}
