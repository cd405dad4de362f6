"""Where entries live: resident pages, cold extents, and the rows of a layer that own both."""

from hybrid_kv.store.cold import (
    ColdChain,
    ColdStore,
    Reservation,
    all_finite,
    best_of,
    check_finite,
)
from hybrid_kv.store.extent import ByExtent, ColdExtent, Retrieved, RetrievedPart, Span
from hybrid_kv.store.layer import LayerKV, SelectFor
from hybrid_kv.store.pool import ResidentView
from hybrid_kv.store.resident import ResidentStore
from hybrid_kv.store.row import Overflow, Row, RowMark
from hybrid_kv.store.table import PageTable

__all__ = [
    "ByExtent",
    "ColdChain",
    "ColdExtent",
    "ColdStore",
    "LayerKV",
    "Overflow",
    "PageTable",
    "Reservation",
    "ResidentStore",
    "ResidentView",
    "Retrieved",
    "RetrievedPart",
    "Row",
    "RowMark",
    "SelectFor",
    "Span",
    "all_finite",
    "best_of",
    "check_finite",
]
