"""How stores take memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 64
"""Bytes; a cache line, which vector loads must not straddle."""


def allocate(
    size: Sequence[int], dtype: torch.dtype, device: torch.device, fill: float | None = None
) -> Tensor:
    """A tensor that may be written inside and outside of inference mode alike.

    What is allocated in inference mode can never be written outside of it, and a cache lives longer
    than the mode it was first filled in. On the host, memory asked for empty or as zeros is not
    committed before it is written.
    """
    with torch.inference_mode(False):
        if fill is None:
            return torch.empty(list(size), dtype=dtype, device=device)
        if fill == 0 and device.type == "cpu":
            return _uncommitted_zeros(size, dtype)
        return torch.full(list(size), fill, dtype=dtype, device=device)


def _uncommitted_zeros(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros from the system's zero pages; `torch.zeros` would write, and so commit, every byte."""
    num_bytes = math.prod(size) * dtype.itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    skip = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[skip : skip + num_bytes]).view(dtype).view(list(size))


def enlarge(tensor: Tensor, axis: int, size: int, fill: float | None = None) -> Tensor:
    """A tensor with `size` places along an axis, the old ones first."""
    shape = list(tensor.shape)
    shape[axis] = size
    new = allocate(shape, tensor.dtype, tensor.device, fill)
    new.narrow(axis, 0, tensor.shape[axis]).copy_(tensor)
    return new
