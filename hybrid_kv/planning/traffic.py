"""Bytes that a decode step reads, by purpose, and the time that they take at the least."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid_kv.config import HybridConfig, IndexConfig
from hybrid_kv.planning.plan import ModelFacts
from hybrid_kv.planning.rates import Rates
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import Work

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
    """Milliseconds that reading takes at the measured bandwidths, one thing after the other; None
    for {}.
    """
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
