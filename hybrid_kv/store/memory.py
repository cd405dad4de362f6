"""Allocation of memory by stores."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_kv.errors import CapacityError
from hybrid_kv.ops.host_memory import HUGE_PAGE_BYTES, free_memory, host_array, host_zeros


def allocate(
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    fill: float | None = None,
    *,
    pinned: bool = False,
) -> Tensor:
    """A tensor that may be written inside and outside of inference mode alike.

    What is allocated in inference mode can never be written outside of it, and a cache lives longer
    than the mode it was first filled in. On the host, memory asked for empty or as zeros is not
    committed before it is written, and large arrays lie on huge pages: cold rows are read in any
    order.

    Args:
        pinned: on the host, page-locked for a GPU; all of it is committed at once.

    Raises:
        CapacityError: host memory does not suffice.
    """
    with torch.inference_mode(False):
        if device.type == "cpu":
            if pinned:
                from hybrid_kv.ops.pinned import pinned_array

                require_free(math.prod(size) * dtype.itemsize)
                array = pinned_array(size, dtype)
                return array if fill is None else array.fill_(fill)
            if fill is None:
                return host_array(size, dtype)
            if fill == 0:
                return host_zeros(size, dtype)
        if fill is None:
            return torch.empty(list(size), dtype=dtype, device=device)
        return torch.full(list(size), fill, dtype=dtype, device=device)


def enlarge(tensor: Tensor, axis: int, size: int, fill: float | None = None) -> Tensor:
    """A tensor with `size` places along an axis, the old ones first.

    Raises:
        CapacityError: host memory does not suffice for both at once; the old one is as it was.
    """
    shape = list(tensor.shape)
    shape[axis] = size
    if tensor.device.type == "cpu":
        require_free(tensor.nbytes)  # what the copy commits
    new = allocate(shape, tensor.dtype, tensor.device, fill)
    new.narrow(axis, 0, tensor.shape[axis]).copy_(tensor)
    return new


def require_free(num_bytes: int) -> None:
    """Raises CapacityError where memory that is about to be committed is not there.

    The system grants memory that it does not have, and kills the process that writes to it.
    """
    if num_bytes < HUGE_PAGE_BYTES:
        return
    free = free_memory()
    if num_bytes > free.num_bytes:
        raise CapacityError(
            f"host memory ran out: the cache grows by {num_bytes:,} bytes, {free}; "
            "shorten the context or free memory"
        )
