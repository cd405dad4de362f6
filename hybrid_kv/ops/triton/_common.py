"""Helpers of all kernels. Imported only where Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""TRITON_INTERPRET=1 was set when the kernels were decorated: they run on the CPU, slowly."""

MIN_DOT = 16
"""Fewest rows and columns that tl.dot takes."""


def padded(size: int, least: int = 1) -> int:
    """The next power of two, which the sizes of Triton's tiles must be."""
    return max(least, 1 << (size - 1).bit_length())


def upcast(*tensors: Tensor) -> bool:
    """Whether products must be formed in float32.

    Operands of one product must have one dtype. The interpreter holds bfloat16 as bit patterns and
    multiplies those without a word (Triton 3.6 to 3.9), so there it is never multiplied as such.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    return len(dtypes) > 1 or (INTERPRETED and torch.bfloat16 in dtypes)


@triton.jit
def finite(top):
    """A maximum that may be subtracted: 0 stands for -inf, whose difference to itself is NaN."""
    return tl.where(top == -float("inf"), 0.0, top)
