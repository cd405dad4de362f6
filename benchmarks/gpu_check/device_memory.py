"""A cap on what a process may take of a GPU, and what it took at most.

The cap holds for torch's allocator; CUDA's context and libraries are outside of it, so their part
is subtracted beforehand. A capped large card says nothing about the speed of a small one.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu_check.plan import CONTEXT_BYTES


def cap_device(device: torch.device, cap_bytes: int | None) -> int | None:
    """Limits this process; the bytes left to the allocator, None without a cap.

    Raises:
        ValueError: the cap leaves nothing.
    """
    if cap_bytes is None or device.type != "cuda":
        return None
    limit = cap_bytes - CONTEXT_BYTES
    if limit <= 0:
        raise ValueError(f"cap must be above {CONTEXT_BYTES} bytes, got {cap_bytes}; raise it")
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    return limit


class Footprint:
    """Device memory of this process from here on; nulls on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._outside = 0
        if self._on_gpu:
            torch.zeros(1, device=device)  # makes the context
            free, total = torch.cuda.mem_get_info(device)
            self._outside = total - free - torch.cuda.memory_reserved(device)

    def restart(self) -> None:
        """Forgets peaks, as of warming up."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)

    def peaks(self) -> dict[str, Any]:
        """outside_bytes: what was in use beside the allocator at the beginning: this process's
        context, and other processes if there are any.
        """
        if not self._on_gpu:
            return dict.fromkeys(("allocated_peak_bytes", "reserved_peak_bytes", "outside_bytes"))
        return {
            "allocated_peak_bytes": torch.cuda.max_memory_allocated(self._device),
            "reserved_peak_bytes": torch.cuda.max_memory_reserved(self._device),
            "outside_bytes": self._outside,
        }
