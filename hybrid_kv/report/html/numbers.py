"""Numbers as people read them: three digits, units, and a dash for what was not measured."""

from __future__ import annotations

import math

NOTHING = "–"
"""Stands for a value that was not measured."""


def short(value: float | None) -> str:
    """Three significant digits without an exponent: 0.0123, 1.23, 12.3, 123, 1,234."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(places, 6)}f}"


def count(value: float | None) -> str:
    """3 -> '3', 1234 -> '1,234', a mean of 12.345 -> '12.3'."""
    return f"{value:,}" if isinstance(value, int) else short(value)


def tick(value: float) -> str:
    """A round value without zeros that say nothing: 0.05, 2.5, 70, 1,000."""
    return f"{value:,.6f}".rstrip("0").rstrip(".")


def milliseconds(value: float | None) -> str:
    """12.3 -> '12.3 ms'."""
    return NOTHING if value is None else f"{short(value)} ms"


def seconds(value: float | None) -> str:
    """0.0123 -> '12.3 ms', 12.3 -> '12.3 s'."""
    if value is None:
        return NOTHING
    return f"{short(1e3 * value)} ms" if value < 1 else f"{short(value)} s"


def percent(ratio: float | None) -> str:
    """0.123 -> '12.3%', 0.00123 -> '0.12%'; what rounding put below zero is zero."""
    if ratio is None:
        return NOTHING
    if ratio < -1e-4:
        return f"−{percent(-ratio)}"
    value = 100 * max(0.0, ratio)
    if 0 < value < 0.01:
        return "<0.01%"
    return f"{value:.1f}%" if value >= 1 or value == 0 else f"{value:.2f}%"


def size(count: float | None) -> str:
    """1536 -> '1.5 KiB'."""
    if count is None:
        return NOTHING
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, int(math.log(count, 1024))) if count >= 1 else 0
    return f"{count / 1024**power:,.{1 if power else 0}f} {units[power]}"


def tokens(count: int) -> str:
    """32768 -> '32K', 1048576 -> '1M', 1000 -> '1,000'."""
    for unit, factor in (("M", 2**20), ("K", 2**10)):
        if count >= factor and count % factor == 0:
            return f"{count // factor}{unit}"
    return f"{count:,}"


def ratio(value: float) -> str:
    """1.234 -> '1.23×', 12.34 -> '12.3×', 0.0512 -> '0.051×'."""
    places = 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:,.{places}f}×"
