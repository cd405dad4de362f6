"""Arrays on their way to a device, which no thread waits for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_KEPT = 64


def staged(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor on a device; one of the host goes by way of pinned memory.

    A plain copy to a GPU is waited for until all is done that the GPU was told before.
    """
    if device.type == "cpu" or not tensor.is_cpu:
        return tensor.to(device)
    from hybrid_kv.ops.pinned import pinned_empty

    return pinned_empty(tensor.shape, tensor.dtype).copy_(tensor).to(device, non_blocking=True)


def bus_copies(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of a target with those of its source, one of which is host memory: a copy each.

    A part is contiguous on the host, since torch would copy anything else into plain memory first,
    and wait; and it lies within one locked range, since CUDA refuses what lies in several.
    """
    host = source if source.is_cpu else target
    here = _num_in_one_range(host)
    if (host.ndim > 1 and not host.is_contiguous()) or (host.ndim > 2 and here < len(host)):
        for part, from_ in zip(target, source, strict=True):
            yield from bus_copies(part, from_)
    elif host.ndim == 0 or here == len(host):
        yield target, source.contiguous() if source.is_cpu else source
    else:
        yield target[:here], source[:here]
        yield from bus_copies(target[here:], source[here:])


def _num_in_one_range(host: Tensor) -> int:
    """The number of first rows of a contiguous host tensor that lie in one locked range."""
    if not host.numel():
        return len(host)
    from hybrid_kv.ops.pinned import locked_end

    address, row_bytes = host.data_ptr(), host.nbytes // len(host) if host.ndim else host.nbytes
    end = locked_end(address)
    count = len(host) if host.ndim else 1
    return count if end is None else min(count, (end - address) // row_bytes)


class Uploads:
    """Copies index arrays to devices through pinned staging.

    What went last is kept by its content: the page tables of a model's layers are mostly alike, and
    then one upload serves them all.

    sent: copies made to devices that are not the host.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[torch.device, str, bytes], Tensor] = OrderedDict()
        self.sent = 0

    def __call__(self, array: npt.NDArray[np.int64], device: torch.device) -> Tensor:
        """A one-dimensional array on a device; not to be written."""
        if device.type == "cpu":
            return torch.from_numpy(array)
        key = device, array.dtype.str, array.tobytes()
        if (there := self._last.get(key)) is not None:
            self._last.move_to_end(key)
            return there
        self.sent += 1
        self._last[key] = there = staged(torch.from_numpy(array), device)
        if len(self._last) > _KEPT:
            self._last.popitem(last=False)
        return there
