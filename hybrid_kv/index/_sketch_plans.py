"""Which sketches there are: uniform ones, and tiers whose keys get more bytes for mattering more.

Sizes are named for a head of 128 channels; other heads get plans in proportion.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from hybrid_kv.ops.sketch_codes import MAX_DIMS, SketchPlan, dims_per_line

_NAMED_DIM = 128
_LINES = MappingProxyType({8: (1, 0), 16: (1, 0), 24: (2, 0), 32: (2, 2), 48: (2, 0), 64: (4, 0)})
"""Lines of 4 bytes with 8-bit and with 2-bit codes, by bytes of a key; all others have 4 bits."""
_UNIFORM = MappingProxyType({16: 400, 24: 400, 32: 400, 48: 600, 64: 600})
"""Candidates of a query above which codes of so many bytes do not pay."""
_TIERS = ((16, 32, 64), (0.6, 0.3, 0.1))
"""Of the lowest tier no fewer: it holds what the prompt never asked for, and the answer may."""
_TIERS_RERANKED = 400
_LINE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """A plan for each tier of a head.

    shares: of the keys, from those of the lowest potential up; (1.0,) is a uniform sketch.
    most_reranked: candidates of a query above which it does not pay.
    """

    plans: tuple[SketchPlan, ...]
    shares: tuple[float, ...]
    most_reranked: int

    @property
    def is_uniform(self) -> bool:
        return len(self.plans) == 1

    @property
    def scanned_bytes(self) -> float:
        """Of a key, on average, that a search reads."""
        pairs = zip(self.plans, self.shares, strict=True)
        return sum(plan.code_bytes * share for plan, share in pairs)

    @property
    def cuts(self) -> list[float]:
        """Quantiles of the potential between the tiers."""
        return list(accumulate(self.shares))[:-1]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "tiers": [
                {"code_bytes": plan.code_bytes, "share": share}
                for plan, share in zip(self.plans, self.shares, strict=True)
            ]
        }


def plan_of(named_bytes: int, head_dim: int) -> SketchPlan | None:
    """The plan that has so many bytes at 128 channels, in proportion; None below 4 channels."""
    dim = min(head_dim, MAX_DIMS)
    scale = dim / _NAMED_DIM
    first, last = (round(lines * scale) for lines in _LINES[named_bytes])
    first = max(1, first)
    middle = max(0, round(named_bytes / _LINE_BYTES * scale) - first - last)
    groups = []
    for bits, lines in ((8, first), (4, middle), (2, last)):
        dims = min(lines, dim // dims_per_line(bits)) * dims_per_line(bits)
        if dims:
            groups.append((dims, bits))
        dim -= dims
    return SketchPlan(tuple(groups)) if groups else None


def layouts(head_dim: int, named: str | None = None) -> list[Layout]:
    """All that are tried for a head of so many channels; none below 4 channels.

    Args:
        named: only the one of so many bytes, or those in "tiers" that the head has channels enough
            to tell apart.
    """
    uniform = {
        str(size): Layout((plan,), (1.0,), most)
        for size, most in _UNIFORM.items()
        if (plan := plan_of(size, head_dim)) is not None
    }
    sizes, shares = _TIERS
    plans = tuple(plan for size in sizes if (plan := plan_of(size, head_dim)) is not None)
    told_apart = len(set(plans)) == len(sizes)
    tiers = [Layout(plans, shares, _TIERS_RERANKED)] if told_apart else []
    if named == "tiers":
        return tiers
    if named is not None:
        return [uniform[named]] if named in uniform else []
    return list({layout.plans: layout for layout in (*uniform.values(), *tiers)}.values())
