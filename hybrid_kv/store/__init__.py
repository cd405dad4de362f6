"""Where entries live: resident pages, cold extents, and the rows of a layer that own both."""

from hybrid_kv.store.cold_tier import (
    ColdChain,
    ColdStore,
    Reservation,
    all_finite,
    check_finite,
)
from hybrid_kv.store.extent import ColdExtent, ExtentView, Retrieved, RetrievedPart
from hybrid_kv.store.layer import LayerStore, ResidentStore, SelectFor
from hybrid_kv.store.pool import PageTable, ResidentView
from hybrid_kv.store.row import Overflow, Row, RowMark

__all__ = [
    "ColdChain",
    "ColdExtent",
    "ColdStore",
    "ExtentView",
    "LayerStore",
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
    "all_finite",
    "check_finite",
]
