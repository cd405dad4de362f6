"""What serves while a graph or a sketch is being built."""

from __future__ import annotations

from typing import Any

from hybrid_kv.index._trial import HeadReport
from hybrid_kv.index.flat import FlatIndex


class StandIn(FlatIndex):
    """Scans all keys in 8 bits, as heads without either are served, and says why."""

    def __init__(self) -> None:
        super().__init__(FlatIndex.Params(precision="int8"))

    def describe(self) -> list[dict[str, Any]]:
        return [
            HeadReport("flat", "scanned while the index is built").to_dict() for _ in self._keys
        ]
