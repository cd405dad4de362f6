"""What serves while a graph is being built."""

from __future__ import annotations

from typing import Any

from hybrid_kv.index._trial import HeadReport
from hybrid_kv.index.flat import FlatIndex


class StandIn(FlatIndex):
    """Scans all keys in 8 bits, as heads without a graph are served, and says why it does."""

    def __init__(self) -> None:
        super().__init__(FlatIndex.Params(precision="int8"))

    def describe(self) -> list[dict[str, Any]]:
        return [
            HeadReport("flat", "scanned as long as there is no graph").to_dict() for _ in self._keys
        ]
