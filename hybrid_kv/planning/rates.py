"""Bandwidths that decide how fast a step can be, and the time that an index build will take.

Bandwidths are measured here, or known of a card; the time is told before a build begins.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from hybrid_kv.config import IndexConfig
from hybrid_kv.ops import get_ops

_HOST_BUFFER_BYTES = 2**28
_DEVICE_BUFFER_BYTES = 2**30
_GATHERED_ROWS = 2**13
_ROW_BYTES = 256
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second in 1e9; h2d, d2h are None where the model runs on the CPU.

    device: reading the memory that holds the weights. dram: reading host memory in order, all
    threads. gather: reading host memory in rows of 256 bytes at random places.
    """

    device: float
    dram: float
    gather: float
    h2d: float | None = None
    d2h: float | None = None


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU: memory as CUDA reports it, which is less than the maker's figure; bandwidths as its
    maker describes them, in 1e9 bytes per second; tflops: of dense 16-bit products with sums in 32
    bits, in 1e12 operations per second.
    """

    memory_bytes: int
    device: float
    pcie: float
    tflops: float


CARDS = {
    "rtx-3090": Card(int(23.6 * 2**30), 936, 32, 71),
    "rtx-4090": Card(int(23.6 * 2**30), 1008, 32, 165),
    "rtx-5090": Card(int(31.3 * 2**30), 1792, 64, 209),
    "a100-80gb": Card(int(79.1 * 2**30), 2039, 32, 312),
    "h100-80gb": Card(int(79.1 * 2**30), 3350, 64, 989),
    "h200": Card(int(139.7 * 2**30), 4800, 64, 989),
}
"""Public specifications; PCIe per direction."""

_ATTAINED_DEVICE, _ATTAINED_PCIE = 0.9, 0.8
"""Shares of a specification that well-made code reaches (assumptions, not measurements)."""


def rates_of_card(card: Card, host: Rates) -> Rates:
    """Rates that a machine with that card and this host would reach."""
    pcie = _ATTAINED_PCIE * card.pcie
    return Rates(_ATTAINED_DEVICE * card.device, host.dram, host.gather, h2d=pcie, d2h=pcie)


def measure_rates(device: torch.device) -> Rates:
    """Measures this machine in about a second: medians of five rounds."""
    dram, gather = _stream_gbps(), _gather_gbps()
    if device.type != "cuda":
        return Rates(dram, dram, gather)
    host = torch.ones(_HOST_BUFFER_BYTES, dtype=torch.uint8).pin_memory()
    near = torch.empty(_HOST_BUFFER_BYTES, dtype=torch.uint8, device=device)
    wide = torch.ones(_DEVICE_BUFFER_BYTES // 4, device=device)
    return Rates(
        device=_median_gbps(wide.sum, wide.nbytes, device),
        dram=dram,
        gather=gather,
        h2d=_median_gbps(lambda: near.copy_(host, non_blocking=True), host.nbytes, device),
        d2h=_median_gbps(lambda: host.copy_(near, non_blocking=True), host.nbytes, device),
    )


def _stream_gbps() -> float:
    buffer = torch.ones(_HOST_BUFFER_BYTES // 4)
    return _median_gbps(buffer.sum, buffer.nbytes)


def _gather_gbps() -> float:
    """As cold attention reads: rows of K and V that lie anywhere, several heads at a time."""
    heads, rows, dim = 8, _HOST_BUFFER_BYTES // (2 * 8 * _ROW_BYTES), _ROW_BYTES // 2
    k, v = (torch.ones(heads, rows, dim, dtype=torch.bfloat16) for _ in range(2))
    ids = torch.randint(
        rows, (heads, 1, _GATHERED_ROWS), generator=torch.Generator().manual_seed(0)
    )
    q, ops = torch.ones(heads, 1, dim, dtype=torch.bfloat16), get_ops("auto")
    size = 2 * heads * _GATHERED_ROWS * _ROW_BYTES
    return _median_gbps(lambda: ops.attend_retrieved(q, k, v, ids, scale=1.0), size)


def _median_gbps(
    work: Callable[[], object], size: int, device: torch.device | None = None
) -> float:
    return size / median_seconds(work, device) / 1e9


def median_seconds(work: Callable[[], object], device: torch.device | None = None) -> float:
    """Seconds of a call, the median of five rounds behind one that does not count."""
    work()
    seconds = []
    for _ in range(_ROUNDS):
        _wait(device)
        begin = perf_counter()
        work()
        _wait(device)
        seconds.append(perf_counter() - begin)
    return median(seconds)


def _wait(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


_PROBES = (2048, 8192)
"""Keys of the builds that are tried first."""
_GROWTH = 1.2
"""Exponent of the build time in the number of keys where only one build is known."""
_STEEPEST = 2.0


class BuildForecast:
    """Learns from builds what the next one will take.

    Builds are known by a name (of a method) and the keys of one KV head; seconds are those of all
    heads of all layers together.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[int, float]] = defaultdict(dict)

    def note(self, name: str, num_keys: int, seconds: float) -> None:
        """A build has taken so long."""
        if num_keys and seconds > 0:
            self._known[name][num_keys] = seconds

    def knows(self, name: str) -> bool:
        return bool(self._known[name])

    def seconds(self, name: str, num_keys: int) -> float | None:
        """Forecast of a build's seconds, from the two largest that are known; None from none."""
        known = sorted(self._known[name].items())
        if not known or not num_keys:
            return None
        keys, taken = known[-1]
        growth = _GROWTH
        if len(known) > 1:
            fewer, less = known[-2]
            growth = math.log(taken / less) / math.log(keys / fewer)
            growth = min(_STEEPEST, max(1.0, growth))
        return taken * math.pow(num_keys / keys, growth)

    def probe(self, name: str, index: IndexConfig, keys: Tensor, num_heads: int) -> None:
        """Builds two small indexes over the first of keys [1, N, D] for a first forecast.

        Args:
            num_heads: KV heads of all layers, which are built one after the other.
        """
        for count in _PROBES:
            if count <= keys.shape[1]:
                begin = perf_counter()
                index.build().build(keys[:, :count].contiguous(), None)
                self.note(name, count, num_heads * (perf_counter() - begin))
