"""What times depend on: caches, memory bandwidth, and how to empty the caches."""

from __future__ import annotations

import re
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from hybrid_kv.report.environment import installed_version, probe_environment

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


def environment(threads: int) -> dict[str, Any]:
    versions = {name: installed_version(name) for name in ("hnswlib", "usearch", "numpy")}
    return {
        **probe_environment().model_dump(mode="json"),
        "cache_bytes": cache_bytes(),
        "threads": threads,
        "rivals": versions,
    }
