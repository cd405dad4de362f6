"""The part of CUDA's runtime that locks host memory, without CUDA: what was asked of it, in order.

It refuses what CUDA documents as errors: ranges that are not whole system pages, empty ones, ranges
that are locked already; and to unlock what is not locked or not mapped any more.
"""

from __future__ import annotations

import gc
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from threading import Event

import pytest
import torch

from hybrid_kv.ops import pinned


class Code(IntEnum):
    """Error codes as CUDA numbers them."""

    success = 0
    invalid_value = 1
    out_of_memory = 2
    already_registered = 712
    not_registered = 713


class FakeCudart:
    """Stands in for `torch.cuda.cudart()`.

    refuses: what the next registrations return. calls: what was asked, in order; `synchronize` and
    the kernel that clears CUDA's last error included.
    """

    def __init__(self) -> None:
        self.refuses: Code | None = None
        self.locked: dict[int, int] = {}
        self.calls: list[str] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> Code:  # noqa: N802
        self.calls.append("register")
        if self.refuses is not None:
            return self.refuses
        if not num_bytes or address % mmap.PAGESIZE or num_bytes % mmap.PAGESIZE or flags:
            return Code.invalid_value
        if any(a < address + num_bytes and address < a + n for a, n in self.locked.items()):
            return Code.already_registered
        if not (is_mapped(address) and is_mapped(address + num_bytes - 1)):
            return Code.invalid_value
        self.locked[address] = num_bytes
        return Code.success

    def cudaHostUnregister(self, address: int) -> Code:  # noqa: N802
        self.calls.append("unregister" if is_mapped(address) else "unregister, unmapped")
        return Code.success if self.locked.pop(address, None) else Code.not_registered

    def cudaGetErrorString(self, code: Code) -> str:  # noqa: N802
        return code.name.replace("_", " ")


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudart]:
    """A machine where torch sees CUDA, as far as `hybrid_kv.ops.pinned` asks."""
    gc.collect()  # what others locked and left is not unlocked here
    made, empty = FakeCudart(), torch.empty
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "cudart", lambda: made)
        patch.setattr(torch.cuda, "synchronize", lambda: made.calls.append("synchronize"))
        patch.setattr(torch, "zeros", lambda *_, device: made.calls.append(f"kernel on {device}"))

        def pooled(*size: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
            if pin_memory:
                made.calls.append("pool")
                if made.refuses is not None:
                    raise RuntimeError(f"CUDA error: {made.refuses.name}\nmore lines")
            return empty(*size, **options)  # type: ignore[call-overload, no-any-return]

        patch.setattr(torch, "empty", pooled)
        patch.setattr(pinned, "_warned", Event())
        patch.setattr(pinned, "_refused", Event())
        patch.setattr(pinned, "device_address", lambda address: address)
        yield made
        join_pinning()


def join_pinning() -> None:
    """Returns when no thread locks memory any more."""
    for thread in threading.enumerate():
        if thread.name == "hybrid-kv-pin":
            thread.join()


def is_mapped(address: int) -> bool:
    """Whether an address lies in memory of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return True
    return False
