"""Bandwidths of this machine or of a card, and the time that the bytes of a decode step take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from hybrid_kv.config import HybridConfig, IndexConfig
from hybrid_kv.ops import get_ops
from hybrid_kv.planning.plan import ModelFacts
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import Work

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
    maker describes them, in 1e9 bytes per second.
    """

    memory_bytes: int
    device: float
    pcie: float


CARDS = {
    "rtx-3090": Card(int(23.6 * 2**30), 936, 32),
    "rtx-4090": Card(int(23.6 * 2**30), 1008, 32),
    "rtx-5090": Card(int(31.3 * 2**30), 1792, 64),
    "a100-80gb": Card(int(79.1 * 2**30), 2039, 32),
    "h100-80gb": Card(int(79.1 * 2**30), 3350, 64),
    "h200": Card(int(139.7 * 2**30), 4800, 64),
}
"""Public specifications; PCIe per direction."""

_ATTAINED_DEVICE, _ATTAINED_PCIE = 0.9, 0.8
"""Shares of a specification that well-made code reaches (assumptions, not measurements)."""


def rates_of_card(card: Card, host: Rates) -> Rates:
    """What a machine with that card and this host would reach."""
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
    work()
    seconds = []
    for _ in range(_ROUNDS):
        _wait(device)
        begin = perf_counter()
        work()
        _wait(device)
        seconds.append(perf_counter() - begin)
    return size / median(seconds) / 1e9


def _wait(device: torch.device | None) -> None:
    if device is not None:
        torch.cuda.synchronize(device)


_WALKED = ("graph", "hnsw")
"""Index kinds that read rows at random places; the others read them in order."""


def bytes_per_step(
    facts: ModelFacts, cache: KVCache, work: Work, *, on_device: bool
) -> dict[str, int]:
    """Bytes that one decode step reads, on average, as `Work` has counted them; {} if none was.

    Args:
        work: of decode steps alone.
        on_device: whether entries leave a device for the host.
    """
    if not work.steps:
        return {}
    steps = work.steps / sum(shape.num_q_heads for shape in facts.layers)
    is_cold = any(layer.rows[0].chain.num_tokens for layer in cache.stores.values())
    # A page leaves when as many tokens have come.
    leaving = facts.kv_bytes_per_token if on_device and is_cold else 0
    read = {
        "weights": facts.read_bytes,
        "resident_attention": work.resident_bytes / steps + facts.window_bytes,
        "select": work.select_bytes / steps,
        "search": work.search_bytes / steps,
        "cold_attention": work.cold_bytes / steps,
        "estimate": work.estimate_bytes / steps,
        "transfer": work.transfer_bytes / steps + leaving,
    }
    if facts.fixed_bytes:
        read["states"] = 2 * facts.fixed_bytes  # read and written
    return {purpose: round(count) for purpose, count in read.items()}


def limit_ms(read: Mapping[str, int], cache: KVCache, rates: Rates) -> float | None:
    """What reading takes at the measured bandwidths, one thing after the other; None for {}."""
    if not read:
        return None
    walks = _serving_kind(cache) in _WALKED
    selects = _device_selects(cache)
    speed = {
        "weights": rates.device,
        "resident_attention": rates.device,
        "states": rates.device,
        "select": rates.device,
        "search": rates.gather if walks else rates.dram,
        "cold_attention": (rates.h2d or rates.dram) if selects else rates.gather,
        "estimate": rates.device if selects else rates.dram,
        "transfer": rates.d2h or rates.dram,
    }
    return sum(count / speed[purpose] / 1e6 for purpose, count in read.items())


def _device_selects(cache: KVCache) -> bool:
    """Whether a device finds cold entries by codes, and reads the host's rows over the bus."""
    spans = (span for layer in cache.stores.values() for span in layer.cold.spans())
    indexes = (span.extent.index for span in spans)
    return any(index is not None and index.selector is not None for index in indexes)


def index_of(config: HybridConfig) -> IndexConfig | None:
    """The index that a method finds cold entries with; None where it has none."""
    return getattr(getattr(config, "cold", None), "index", None)


def _serving_kind(cache: KVCache) -> str | None:
    """The kind of the index; of kinds that choose by head "graph", "sketch" or "scan", the first of
    these that serves one.
    """
    index = index_of(cache.config)
    if index is None or index.kind not in ("graph", "auto"):
        return None if index is None else index.kind
    heads = cache.layers.describe_indexes()
    serving = {head.get("serves") for head in heads}
    return next((kind for kind in ("graph", "sketch") if kind in serving), "scan")
