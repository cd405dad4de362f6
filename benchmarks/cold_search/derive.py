"""Ratios between rows of one head, and against the machine's rate of reading memory."""

from __future__ import annotations

from typing import Any

FAISS_FLAT = ("faiss-flat", "single")
INT8_FLAT = ("flat keys=f16 precision=int8", "group")


def add_ratios(results: list[dict[str, Any]], stream_us: float) -> None:
    """Writes into every result how many times faster it is than the baselines.

    hot_over_faiss_flat: hot, Faiss's exact f32 scan of one query head. cold_over_int8_flat: cold,
    our 8-bit scan that the group shares. cold_over_stream: cold, a scan of these 8-bit rows at the
    rate `stream_us` per query head.
    """
    hot = _time(results, FAISS_FLAT, "hot")
    cold = _time(results, INT8_FLAT, "cold")
    for result in results:
        if "recall" not in result:
            continue
        own_hot, own_cold = result["hot_us"], first_cold(result)
        result["hot_over_faiss_flat"] = hot / own_hot if hot else None
        result["cold_over_int8_flat"] = cold / own_cold if cold and own_cold else None
        result["cold_over_stream"] = stream_us / own_cold if own_cold else None


def stream_us(num_keys: int, dim: int, group: int, gbps: float) -> float:
    """Microseconds per query head to read a head's 8-bit rows once for the whole group."""
    return num_keys * dim / group / gbps / 1e3


def first_cold(result: dict[str, Any]) -> float | None:
    """The cold time with the fewest threads; None where there is none."""
    times = result.get("cold_us") or {}
    return times[min(times, key=int)] if times else None


def _time(results: list[dict[str, Any]], which: tuple[str, str], kind: str) -> float | None:
    for result in results:
        if (result["row"], result.get("mode")) == which and "recall" in result:
            return result["hot_us"] if kind == "hot" else first_cold(result)
    return None
