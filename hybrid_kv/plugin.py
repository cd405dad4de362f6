"""The names for authors of plug-ins: what a method or an index is made of, and where it registers.

from hybrid_kv.plugin import METHODS, Method, Params, Placement, Read
"""

from __future__ import annotations

from hybrid_kv.config import Params
from hybrid_kv.entries import Attended, Entries
from hybrid_kv.errors import MethodError
from hybrid_kv.plugins import INDEXES, METHODS, Index, Method, Placement
from hybrid_kv.ragged import Ragged
from hybrid_kv.types import (
    Demotion,
    Evidence,
    LayerShape,
    ModelInfo,
    Needs,
    Read,
    SearchResult,
    Tiers,
    TokenBudget,
)

__all__ = [
    "INDEXES",
    "METHODS",
    "Attended",
    "Demotion",
    "Entries",
    "Evidence",
    "Index",
    "LayerShape",
    "Method",
    "MethodError",
    "ModelInfo",
    "Needs",
    "Params",
    "Placement",
    "Ragged",
    "Read",
    "SearchResult",
    "Tiers",
    "TokenBudget",
]
