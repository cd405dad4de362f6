"""Maps, plans and tiers for the tests of sketches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.ops.sketch_codes import SketchMap, SketchPlan

PLANS = {
    4: SketchPlan(((8, 4),)),
    8: SketchPlan(((8, 8),)),
    16: SketchPlan(((4, 8), (24, 4))),
    24: SketchPlan(((16, 8), (32, 2))),
    32: SketchPlan(((8, 8), (32, 4), (32, 2))),
    64: SketchPlan(((16, 8), (96, 4))),
}
"""By bytes; tests use them with any D."""
_STEPS = {8: 8 / 255, 4: 0.335 * 1.5, 2: 0.996 * 1.5}


def make_map(plan: SketchPlan, head_dim: int) -> SketchMap:
    """A random rotation of keys whose channels have a deviation of 1."""
    size = max(plan.num_dims, head_dim)
    rotation = torch.linalg.qr(torch.randn(size, size))[0][: plan.num_dims, :head_dim]
    steps = torch.cat([torch.full((dims,), _STEPS[bits]) for dims, bits in plan.groups])[:, None]
    return SketchMap(plan, rotation / steps, 0.1 * torch.randn(plan.num_dims), rotation * steps)


def make_tiers(
    make: Callable[..., Any], keys: Tensor, maps: Sequence[SketchMap], shares: Sequence[float] = ()
) -> list[Any]:
    """Tiers of keys [N, D]: one of all, or one for each map of rows at random, in such shares."""
    if not shares:
        tier = make(maps[0], with_ids=False)
        tier.append(keys)
        return [tier]
    order, ends = torch.randperm(len(keys)), [0]
    for share in shares:
        ends.append(min(len(keys), ends[-1] + round(share * len(keys))))
    ends[-1] = len(keys)
    tiers = []
    for one, begin, end in zip(maps, ends[:-1], ends[1:], strict=True):
        tier = make(one, with_ids=True)
        tier.append(keys, order[begin:end].sort().values)
        tiers.append(tier)
    return tiers
