"""Stateless attention: partial results over parts of the entries, and their exact merge."""

from hybrid_kv.attention.merge import apply_sink, empty_partial, merge_partials
from hybrid_kv.attention.partial import (
    attend,
    attend_causal,
    attend_ragged,
    group_queries,
)

__all__ = [
    "apply_sink",
    "attend",
    "attend_causal",
    "attend_ragged",
    "empty_partial",
    "group_queries",
    "merge_partials",
]
