"""What times depend on: caches, memory bandwidth, and how to empty the caches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import torch

from hybrid_kv.report.run import installed_version, probe_environment

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNKNOWN_L3 = 32 * 2**20


def cache_bytes() -> dict[str, int]:
    """Bytes of the L2 and L3 that the first core sees; empty where the system does not tell."""
    found = {}
    for folder in sorted(CACHES.glob("index*")):
        level = int((folder / "level").read_text())
        size = re.match(r"(\d+)([KM]?)", (folder / "size").read_text())
        if level >= 2 and size:
            found[f"l{level}"] = int(size[1]) * {"": 1, "K": 2**10, "M": 2**20}[size[2]]
    return found


class Memory:
    """A buffer beyond the last cache: reading it empties the caches and tells the bandwidth."""

    def __init__(self) -> None:
        self.l3_bytes = cache_bytes().get("l3", UNKNOWN_L3)
        self._buffer = torch.ones(max(2 * self.l3_bytes, 2**26) // 4)

    def flush(self) -> None:
        self._buffer.sum()

    def stream_gbps(self) -> float:
        """GB/s of a sum over the buffer, the best of some."""
        best = 0.0
        for _ in range(7):
            begin = perf_counter()
            self._buffer.sum()
            best = max(best, self._buffer.nbytes / (perf_counter() - begin) / 1e9)
        return best


ROW_BYTES = 1024
"""The largest index here, per key: usearch and HNSW at 128 channels, with room."""


def refuse_what_does_not_fit(num_keys: int, head_dim: int, available: int | None = None) -> None:
    """Checks a head's size before it is made.

    Args:
        available: bytes; None for what the system can give now.

    Raises:
        MemoryError: keys, what makes them, one more copy and the largest index exceed it.
    """
    free = psutil.virtual_memory().available if available is None else available
    per_key = 3 * 4 * head_dim + ROW_BYTES
    needed = num_keys * per_key
    if needed > free:
        raise MemoryError(
            f"{num_keys:,} keys of {head_dim} channels take {needed / 2**30:.1f} GiB ({per_key:,} "
            f"bytes a key: float32 keys, what they are made of, a copy for a library, and up to "
            f"{ROW_BYTES:,} of index), {free / 2**30:.1f} GiB are available; choose a smaller --n"
        )


def environment(threads: Sequence[int]) -> dict[str, Any]:
    versions = {name: installed_version(name) for name in ("hnswlib", "usearch", "numpy")}
    return {
        **probe_environment().model_dump(mode="json"),
        "cache_bytes": cache_bytes(),
        "threads": list(threads),
        "rivals": versions,
    }
