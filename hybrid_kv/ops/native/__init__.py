"""The native engine (C++ in `native/`), entered through ctypes, which releases the GIL.

Here is what the dispatch needs: whether the engine serves some tensors, and its ops on tensors.
"""

from __future__ import annotations

from torch import Tensor

from hybrid_kv.ops.native.attend import (
    Visible,
    attend_ragged,
    attend_retrieved,
    attend_rows,
    merge,
    serves,
    serves_merge,
)
from hybrid_kv.ops.native.library import engine_state
from hybrid_kv.ops.native.pages import PageDigests
from hybrid_kv.ops.native.workers import pool_here

__all__ = [
    "Visible",
    "attend_ragged",
    "attend_retrieved",
    "attend_rows",
    "engine_state",
    "merge",
    "page_scores",
    "serves",
    "serves_merge",
]


def page_scores(q: Tensor, key_min: Tensor, key_max: Tensor) -> Tensor:
    """See `Ops.page_scores`."""
    return PageDigests(key_min, key_max).scores(q.float(), pool=pool_here())
