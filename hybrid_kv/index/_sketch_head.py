"""The sketch of one KV head: tiers of codes, and which keys go where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_kv.index._sketch_engine import encode, new_tier, restored_tier
from hybrid_kv.index._sketch_potential import Potential
from hybrid_kv.ops.sketch_codes import BLOCK_KEYS, SketchMap, SketchTier


@dataclass(frozen=True, slots=True)
class Placing:
    """Which tier a key belongs to: its potential lies between two cuts, [tiers - 1] ascending."""

    potential: Potential
    cuts: Tensor

    def of(self, keys: Tensor) -> Tensor:
        """[n] int64 tier of each key [n, D]."""
        return torch.bucketize(self.potential.of(keys), self.cuts)

    @property
    def nbytes(self) -> int:
        return self.potential.nbytes + self.cuts.nbytes


class HeadSketch:
    """Codes of the first `count` keys of a head.

    Args:
        tiers: a single one without ids holds all keys; several hold those that `placing` gives
            them.
        num_rerank: candidates that are ranked exactly, for the number of results checked.
        mean: [D] float32 of the keys, where a device has made the codes: it asks for it again.
    """

    def __init__(
        self,
        tiers: Sequence[SketchTier],
        num_rerank: int,
        placing: Placing | None = None,
        mean: Tensor | None = None,
    ) -> None:
        self.tiers, self.num_rerank, self.placing = tuple(tiers), num_rerank, placing
        self.mean = mean
        self.count = sum(tier.count for tier in tiers)

    @classmethod
    def of(cls, maps: Sequence[SketchMap], keys: Tensor, placing: Placing | None) -> HeadSketch:
        """Of all keys [N, D]."""
        tiers = [new_tier(one, with_ids=placing is not None) for one in maps]
        sketch = cls(tiers, 0, placing)
        sketch.append(keys)
        return sketch

    def append(self, keys: Tensor) -> None:
        """Encodes the rows of keys [N, D] from `count` on."""
        if self.placing is None:
            encode(self.tiers[0], keys)
        else:
            tier_of = self.placing.of(keys[self.count :])
            for number, tier in enumerate(self.tiers):
                encode(tier, keys, (tier_of == number).nonzero()[:, 0] + self.count)
        self.count = len(keys)

    def copy(self) -> HeadSketch:
        """The same in memory of its own, to be appended to by itself."""
        return self.first(self.count)

    def first(self, count: int) -> HeadSketch:
        """The codes of so many first keys, in memory of their own."""
        tiers = []
        for one in self.tiers:
            ids = one.ids
            held = min(one.count, count) if ids is None else int(torch.searchsorted(ids, count))
            codes = one.codes[: -(-held // BLOCK_KEYS)]
            tiers.append(restored_tier(one.map, codes, None if ids is None else ids[:held], held))
        return HeadSketch(tiers, self.num_rerank, self.placing, self.mean)

    @property
    def memory_bytes(self) -> int:
        parts = sum(tier.memory_bytes + tier.map.nbytes for tier in self.tiers)
        return parts + (0 if self.placing is None else self.placing.nbytes)
