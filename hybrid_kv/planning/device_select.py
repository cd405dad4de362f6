"""Codes of all cold keys on a device: whether they fit, their size, and what a step then reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from hybrid_kv.config import HybridConfig
from hybrid_kv.index._device_keys import device_bytes, search_bytes
from hybrid_kv.ops.sketch_select import MARGIN
from hybrid_kv.planning.rates import Rates
from hybrid_kv.runtime.select import CODE_BYTES
from hybrid_kv.types import LayerShape

_RANKED = MappingProxyType({16: 1024, 24: 1024, 32: 404, 48: 205, 64: 130})
"""Keys that a query ranks exactly for its best 100, by bytes of a code: made-up heads of a paper's
kind, recall .95; 1,024 is the most that there is room for (docs/lab.md)."""
_SHARED = 0.5
"""Rows that are read over the bus, per row that a query head wants: a group shares (assumed)."""
_SAMPLED = 1 / 8
"""Codes that are read a second time, for the limit."""
_DIM = 128


@dataclass(frozen=True, slots=True)
class DeviceSelect:
    """code_bytes: of a key at 128 channels, None where the host searches. num_bytes: that codes,
    later keys and maps take of the device. search: bytes of what a search holds. why: one clause.
    """

    code_bytes: int | None
    num_bytes: int
    search: int
    why: str


def plan_select(
    layers: Sequence[LayerShape], config: HybridConfig, cold: int, itemsize: int, free: int
) -> DeviceSelect | None:
    """By the rule of `cold.select`, for `cold` tokens and `free` bytes of a device.

    None for a method that finds nothing in a cold tier.
    """
    settings = getattr(config, "cold", None)
    select = getattr(settings, "select", None)
    if settings is None or select is None:
        return None
    if select == "host":
        return DeviceSelect(None, 0, 0, "the host searches, as cold.select says")
    if settings.why_host is not None:
        return DeviceSelect(None, 0, 0, f"the host searches: the device {settings.why_host}")
    if getattr(config, "demote", None) is not None:
        return DeviceSelect(None, 0, 0, "the host searches: it has to know what is found")
    if cold < settings.index.params.min_keys and select == "auto":
        return DeviceSelect(None, 0, 0, f"the host searches: {max(0, cold):,} cold keys are few")
    needed = {size: codes_bytes(layers, size, cold, itemsize) for size in CODE_BYTES}
    search = searching_bytes(layers, cold)
    for size, count in needed.items():
        if count + search <= free:
            why = f"the device selects: codes of {size} B a key fit"
            return DeviceSelect(size, count, search, why)
    least, count = min(needed.items())
    lacking = f"{count / 2**30:.1f} GiB, {max(0, free) / 2**30:.1f} are free"
    if select == "device":
        why = f"the device selects, as cold.select says: {lacking}"
        return DeviceSelect(least, count, search, why)
    return DeviceSelect(None, 0, 0, f"the host searches: codes of {least} B a key take {lacking}")


def codes_bytes(layers: Sequence[LayerShape], size: int, cold: int, itemsize: int) -> int:
    """Bytes in all layers of codes of `size` bytes at 128 channels, and of what goes with them."""
    return sum(
        device_bytes(
            cold, one.num_kv_heads, one.head_dim, itemsize, -(-size * one.head_dim // _DIM)
        )
        for one in layers
    )


def searching_bytes(layers: Sequence[LayerShape], cold: int) -> int:
    """Bytes that the search of one layer holds; layers are searched one after another."""
    sizes = (search_bytes(cold, one.num_kv_heads, one.group_size) for one in layers)
    return max(sizes, default=0)


class SelectBytes(NamedTuple):
    """Bytes that selection on a device reads for a token, in all layers.

    coded: codes, those of the sample a second time, on the device. ranked: keys that are ranked
    exactly, over the bus; attended: values of the best, over the bus.
    """

    coded: float
    ranked: float
    attended: float


def select_bytes(
    layers: Sequence[LayerShape], size: int, cold: int, top_k: int, itemsize: int
) -> SelectBytes:
    """For codes of `size` bytes at 128 channels, with as many candidates as the runtime aims at."""
    coded = ranked = attended = 0.0
    for one in layers:
        row = one.num_kv_heads * one.head_dim * itemsize
        coded += cold * one.num_kv_heads * (-(-size * one.head_dim // _DIM)) * (1 + _SAMPLED)
        wanted = MARGIN * _RANKED[size] * max(1.0, top_k / 100)
        ranked += row * min(cold, wanted * one.group_size * _SHARED)
        attended += row * min(cold, top_k * max(1.0, one.group_size * _SHARED))
    return SelectBytes(coded, ranked, attended)


def select_ms(
    layers: Sequence[LayerShape], size: int, cold: int, top_k: int, itemsize: int, rates: Rates
) -> Mapping[str, float]:
    """Milliseconds of a token at the least: codes from the device's memory, rows over the bus."""
    bus, read = rates.h2d or rates.dram, select_bytes(layers, size, cold, top_k, itemsize)
    return {
        "search": (read.coded / rates.device + read.ranked / bus) / 1e6,
        "cold_attention": read.attended / bus / 1e6,
        "transfer": 0.0,
    }
