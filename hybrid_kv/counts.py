"""Numbers as people write them: 128k, 4GiB; without imports that take time."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_COUNT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?\s*$", re.IGNORECASE)


def parse_count(value: object) -> object:
    """'128k' -> 131072, '4GiB' -> 4 * 2**30; anything else is returned as it came."""
    if isinstance(value, str) and (match := _COUNT.match(value)):
        scaled = float(match[1]) * _UNITS[match[2].lower()]
        return int(scaled) if scaled.is_integer() else value
    return value
