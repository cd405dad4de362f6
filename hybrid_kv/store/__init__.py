"""Where entries live: resident pages, cold extents, and the layer that owns both."""

from hybrid_kv.store.cold import ColdExtent, ColdStore, Reservation, Span, check_finite
from hybrid_kv.store.layer import LayerKV, Overflow, StandInFor
from hybrid_kv.store.resident import ResidentStore, ResidentView

__all__ = [
    "ColdExtent",
    "ColdStore",
    "LayerKV",
    "Overflow",
    "Reservation",
    "ResidentStore",
    "ResidentView",
    "Span",
    "StandInFor",
    "check_finite",
]
