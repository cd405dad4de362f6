"""Bytes that a decode step reads, by purpose, and the time that they take at the least."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid_kv.config import HybridConfig, IndexConfig
from hybrid_kv.planning.plan import ModelFacts
from hybrid_kv.planning.rates import Rates
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import Work

_LISTS = 1.5
"""Bytes that a walk through a graph reads for each byte of its rows: the neighbour lists too."""
_WALKED = ("graph", "hnsw")
"""Index kinds that read rows at random places; the others read them in order."""


def bytes_per_step(
    facts: ModelFacts, cache: KVCache, work: Work, *, selects: bool, on_device: bool
) -> dict[str, int]:
    """Bytes that one decode step reads, on average; {} if none was counted.

    Counted work times the size of what is read: keys and values of attended entries once per KV
    head (of retrieved ones once per query head, up to all there are), rows of an index in its own
    format once for the query heads that share a search, page digests as wide as a key and a value.

    Args:
        work: of decode steps alone.
        selects: whether the steps chose among pages.
        on_device: whether queries and results travel between device and host.
    """
    q_heads = sum(shape.num_q_heads for shape in facts.layers)
    kv_heads = sum(shape.num_kv_heads for shape in facts.layers)
    if not work.steps:
        return {}
    steps, group = work.steps / q_heads, q_heads / kv_heads
    row = facts.kv_bytes_per_token / kv_heads
    layers = cache.stores.values()
    stored = sum(layer.rows[0].chain.num_tokens * layer.shape.num_kv_heads for layer in layers)
    digests = sum(
        len(layer.rows[0].table) * layer.shape.num_kv_heads
        for layer in layers
        if selects and layer.placement is not None and layer.placement.digests
    )
    resident = (work.attended - work.retrieved) / steps / group
    cold = min(work.retrieved / steps, stored)
    searched = max(0.0, work.scored / steps - digests * group)
    travelling = 2 * facts.dtype_bytes * sum(s.num_q_heads * s.head_dim for s in facts.layers)
    read = {
        "weights": facts.read_bytes,
        "resident_attention": resident * row + facts.window_bytes,
        "select": digests * row,
        "search": searched * _bytes_per_score(cache, group, row / 2, facts.dtype_bytes),
        "cold_attention": cold * row,
        "transfer": travelling if on_device and stored else 0,
    }
    return {purpose: round(count) for purpose, count in read.items()}


def limit_ms(read: Mapping[str, int], cache: KVCache, rates: Rates) -> float | None:
    """What reading takes at the measured bandwidths, one thing after the other; None for {}."""
    if not read:
        return None
    walks = _serving_kind(cache) in _WALKED
    speed = {
        "weights": rates.device,
        "resident_attention": rates.device,
        "select": rates.device,
        "search": rates.gather if walks else rates.dram,
        "cold_attention": rates.gather,
        "transfer": rates.d2h or rates.dram,
    }
    return sum(count / speed[purpose] / 1e6 for purpose, count in read.items())


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
    heads = (head for layer in cache.stores.values() for head in layer.cold.describe_indexes())
    serving = {head.get("serves") for head in heads}
    return next((kind for kind in ("graph", "sketch") if kind in serving), "scan")


def _bytes_per_score(cache: KVCache, group: float, key_bytes: float, itemsize: int) -> float:
    """Bytes read for one dot product: a row, over the query heads that share it."""
    kind, width = _serving_kind(cache), key_bytes / itemsize
    if kind in ("ivf", "hnsw"):  # Faiss searches for each query head alone, in float32
        return 4 * width
    if kind == "graph":
        return _LISTS * (width + 1) / group
    if kind == "sketch":
        return _sketch_bytes(cache, key_bytes, width) / group
    if kind == "pages":
        return 2 * key_bytes / group
    index = index_of(cache.config)
    stored = kind == "flat" and getattr(index, "precision", None) != "int8"
    return (key_bytes if stored else width + 1) / group


def _sketch_bytes(cache: KVCache, key_bytes: float, width: float) -> float:
    """Bytes of a key that searches of sketches scan, on average over keys and heads.

    Codes, or where a key came after they were made its 8-bit copy, or itself where such are few.
    """
    heads = [head for layer in cache.stores.values() for head in layer.cold.describe_indexes()]
    sizes = []
    for head in heads:
        tiers = head.get("tiers") or ()
        count = sum(tier["num_keys"] for tier in tiers)
        if not count:
            sizes.append(width + 1)
            continue
        code = sum(tier["num_keys"] * tier["code_bytes"] for tier in tiers) / count
        coded, copied = head["coded_keys"], head["later_in_8_bits"]
        whole = head["later_exact"]
        read = coded * code + copied * (width + 1) + whole * key_bytes
        sizes.append(read / (coded + copied + whole))
    return sum(sizes) / len(sizes) if sizes else width + 1
