"""Which arithmetic sketches run on: the engine's, or its portable twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hybrid_kv.ops.native.library import engine
from hybrid_kv.ops.native.rows import DTYPES, is_readable
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.ops.native.workers import pool_here
from hybrid_kv.ops.sketch_codes import SketchMap, SketchTier
from hybrid_kv.types import SearchResult


def why_unread(keys: Tensor) -> str | None:
    """Why keys [..., N, D] cannot be sketched where they lie; None if they can."""
    if keys.dtype not in DTYPES or not is_readable(keys):
        return f"sketches do not read {keys.dtype} rows of strides {list(keys.stride())}"
    return None


def new_tier(sketch_map: SketchMap, *, with_ids: bool) -> SketchTier:
    """An empty tier."""
    tier: SketchTier = _module().SketchTier(sketch_map, with_ids=with_ids)
    return tier


def restored_tier(
    sketch_map: SketchMap, codes: Tensor, ids: Tensor | None, count: int
) -> SketchTier:
    """A tier of codes that were made before; raises as `SketchTier.restore`."""
    tier: SketchTier = _module().SketchTier.restore(sketch_map, codes, ids, count)
    return tier


def encode(tier: Any, keys: Tensor, rows: Tensor | None = None) -> None:
    """As `SketchTier.append`, on the threads of whoever calls."""
    tier.append(keys, rows, **_pool())


class TierSearcher:
    """Searches the tiers of some heads; to be made anew after these have grown.

    Args:
        keys: [N, D] of each head.
        tiers: of each head.
    """

    def __init__(self, keys: Sequence[Tensor], tiers: Sequence[Sequence[SketchTier]]) -> None:
        self._searcher = _module().SketchSearcher(keys, tiers)

    def follow(self, keys: Sequence[Tensor]) -> None:
        """As `SketchSearcher.follow`."""
        self._searcher.follow(keys)

    def search(self, queries: Tensor, top_k: int, **how: Any) -> SearchResult:
        """As `SketchSearcher.search`, on the threads of whoever calls."""
        found: SearchResult = self._searcher.search(queries, top_k, **how, **_pool())
        return found

    def plan(self, top_k: int, **how: Any) -> EngineSearch | None:
        """The same search as a part of a step that is one call; None where there is no engine."""
        if engine() is None:
            return None
        planned: EngineSearch = self._searcher.plan(top_k, **how)
        return planned


def _module() -> Any:
    if engine() is None:
        from hybrid_kv.ops.portable import sketch as portable

        return portable
    from hybrid_kv.ops.native import sketch as native

    return native


def _pool() -> dict[str, Any]:
    return {} if engine() is None else {"pool": pool_here()}
