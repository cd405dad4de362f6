"""How stores take memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_kv.ops.native.memory import host_array, host_zeros


def allocate(
    size: Sequence[int], dtype: torch.dtype, device: torch.device, fill: float | None = None
) -> Tensor:
    """A tensor that may be written inside and outside of inference mode alike.

    What is allocated in inference mode can never be written outside of it, and a cache lives longer
    than the mode it was first filled in. On the host, memory asked for empty or as zeros is not
    committed before it is written, and large arrays lie on huge pages: cold rows are read in any
    order.
    """
    with torch.inference_mode(False):
        if device.type == "cpu" and fill in (None, 0):
            return host_array(size, dtype) if fill is None else host_zeros(size, dtype)
        if fill is None:
            return torch.empty(list(size), dtype=dtype, device=device)
        return torch.full(list(size), fill, dtype=dtype, device=device)


def enlarge(tensor: Tensor, axis: int, size: int, fill: float | None = None) -> Tensor:
    """A tensor with `size` places along an axis, the old ones first."""
    shape = list(tensor.shape)
    shape[axis] = size
    new = allocate(shape, tensor.dtype, tensor.device, fill)
    new.narrow(axis, 0, tensor.shape[axis]).copy_(tensor)
    return new
