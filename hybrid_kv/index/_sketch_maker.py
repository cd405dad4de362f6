"""What can be made of one head's keys: the maps of every plan, and the potential."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from hybrid_kv.index._sketch_head import HeadSketch, Placing
from hybrid_kv.index._sketch_plans import Layout
from hybrid_kv.index._sketch_potential import Potential
from hybrid_kv.index._sketch_space import QuerySpace, sketch_map
from hybrid_kv.ops.sketch_codes import MAX_DIMS, SketchMap, SketchPlan


class SketchMaker:
    """Makes sketches of keys [N, D] in the space that queries [Q, D] see."""

    def __init__(self, keys: Tensor, queries: Tensor) -> None:
        self.keys, self.queries = keys, queries
        self.space = QuerySpace.learn(keys, queries)
        self._maps: dict[SketchPlan, SketchMap] = {}

    def map_of(self, plan: SketchPlan) -> SketchMap:
        if plan not in self._maps:
            self._maps[plan] = sketch_map(self.space, plan, self._largest)
        return self._maps[plan]

    @cached_property
    def potential(self) -> Potential:
        return Potential.learn(self.space, self.keys, self.queries)

    def sketch(self, layout: Layout) -> HeadSketch:
        """All keys in the codes of a layout."""
        placing = None
        if not layout.is_uniform:
            potential = self.potential.of(self.keys)
            cuts = potential.sort().values[[int(cut * len(potential)) for cut in layout.cuts]]
            placing = Placing(self.potential, cuts)
        return HeadSketch.of([self.map_of(plan) for plan in layout.plans], self.keys, placing)

    @cached_property
    def _largest(self) -> Tensor:
        return self.space.largest(self.keys, min(self.keys.shape[1], MAX_DIMS // _FIRST_SHARE))


_FIRST_SHARE = 8
"""At most one dim in so many has 8 bits."""
