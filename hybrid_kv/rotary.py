"""Rotary position embeddings as a value: how a query of one position becomes that of another.

RoPE (Su et al. 2021, arXiv:2104.09864, section 3.2) turns pairs of channels by the position times a
frequency, so what a query would have been elsewhere is a further turn by the distance.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotation of one layer's queries and keys by their positions.

    frequencies: radians per position of each pair of channels; channels beyond the first
        2 * len(frequencies) are not turned. Empty where nothing can be turned: see `reason`.
    interleaved: pairs are channels (2i, 2i + 1), else (i, i + len(frequencies)).
    reason: why there are no frequencies; empty where there are some.
    still: it is known that the layer turns nothing by position.
    """

    frequencies: tuple[float, ...] = ()
    interleaved: bool = False
    reason: str = field(default="", compare=False)
    still: bool = field(default=False, compare=False)

    def turn(self, x: Tensor, by: Tensor) -> Tensor:
        """X [..., M, D] moved on by so many positions [M]; as it was where nothing is turned."""
        if not self.frequencies:
            return x
        pairs = len(self.frequencies)
        # In float64: at 1M positions float32 would be off by a tenth of a radian.
        angles = by.to(x.device, torch.float64)[:, None] * rates_on(x.device, self.frequencies)
        cos, sin = angles.cos().float(), angles.sin().float()
        if self.interleaved:
            first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        else:
            first, second = slice(pairs), slice(pairs, 2 * pairs)
        a, b = x[..., first].float(), x[..., second].float()
        turned = torch.empty_like(x)
        turned[..., first] = (a * cos).sub_(b * sin)
        turned[..., second] = (b * cos).add_(a * sin)
        turned[..., 2 * pairs :] = x[..., 2 * pairs :]
        return turned


@lru_cache(maxsize=64)
def rates_on(device: torch.device, frequencies: tuple[float, ...]) -> Tensor:
    """Frequencies [pairs] float64 on a device; kept, for to send them is to wait for the device."""
    with torch.inference_mode(False):
        return torch.tensor(frequencies, dtype=torch.float64, device=device)


UNKNOWN = Rotary(reason="the positions of these queries are not known")
"""Of queries that were made up, or of a layer whose model could not be asked."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Queries that an index learns from, where decoding will ask them.

    queries: [Hkv, G, M, D], of a prompt in its order; for later ones see `IndexRefresh.renew`.
    positions: [M] int64, for which they are turned now; None where that is not known.
    rotary: how the layer turns them.
    first, horizon: they stand for what will be asked at positions first .. first + horizon - 1;
        horizon is 0 where they are as they were asked.
    """

    queries: Tensor
    positions: Tensor | None = None
    rotary: Rotary = UNKNOWN
    first: int = 0
    horizon: int = 0

    def ahead(self, first: int, horizon: int) -> Samples:
        """As if they were asked at positions first .. first + horizon - 1, denser at the first.

        Where each stands is `horizon_shares`. Learning from queries at their own positions costs
        .03 recall on real heads at the median and .2 at worst: keys behind a query, and those just
        before it, are none that decoding will see so (docs/lab.md).
        """
        if not horizon or self.positions is None or not self.rotary.frequencies:
            return replace(self, first=first)
        places = first + (horizon_shares(len(self.positions)) * horizon).long()
        by = places - self.positions
        queries = self.rotary.turn(self.queries, by)
        return Samples(queries, places, self.rotary, first, horizon)

    def thinned(self, most: int) -> Samples:
        """At most so many of them, spread evenly."""
        count = self.queries.shape[2]
        if count <= most:
            return self
        kept = torch.arange(most) * count // most
        positions = None if self.positions is None else self.positions[kept]
        queries = self.queries[:, :, kept.to(self.queries.device)]
        return replace(self, queries=queries, positions=positions)

    def joined(self, queries: Tensor, positions: Tensor, before: int = 0) -> Samples:
        """With further queries [Hkv, G, M', D], asked at positions [M'].

        Args:
            before: so many of them go in front, the others behind.
        """
        parts = [queries[:, :, :before], self.queries, queries[:, :, before:]]
        known = self.positions
        if known is not None:
            known = torch.cat([positions[:before], known, positions[before:]])
        return replace(self, queries=torch.cat(parts, 2), positions=known)

    def describe(self) -> str:
        """Words for where they stand."""
        if self.horizon:
            return f"turned to positions {self.first} to {self.first + self.horizon - 1}"
        return f"as they were asked: {self.rotary.reason or 'no horizon was asked for'}"


def horizon_shares(count: int) -> Tensor:
    """Places of so many samples in a horizon, by their order: [count] float64 in [0, 1).

    Neighbours stand far apart, so that any run of samples covers the horizon. The beginning is
    denser: all decoding passes through it, and the prompt's last keys are the nearest there, before
    those of decoding come between.
    """
    return ((torch.arange(count, dtype=torch.float64) * _GOLDEN) % 1.0).square()


_GOLDEN = 0.6180339887498949
"""Multiples of the golden ratio, modulo one, fill an interval evenly however many there are."""
