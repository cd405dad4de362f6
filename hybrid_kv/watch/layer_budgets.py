"""Budgets of a model's layers that follow their error, at as many entries of all layers together.

    looked-at step ──> half of each layer ──> its size ──> entries of its next steps

`half` of a step (see `token_errors`) says how far a layer's output moves when half of what it found
is taken away. Its square falls with the number n of entries found as n^-2.7, so that size =
half^2 n^2.7 is the layer's own, whatever it was given, and the sum of the squares is least where n
follows size^(1 / 3.7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace

from hybrid_kv.types import LayerShape, PartialAttention, Read, TokenBudget
from hybrid_kv.watch.token_errors import HalvedStep, halves_of

_FALL = 2.7
"""Measured on SmolLM2-135M from 1 to 5% of 4,096 tokens."""
_MOST = 4
"""Times the method's budget, or of it one in so many, a layer is given."""
_FIRST, _EVERY = 8, 32
"""The first tokens are looked at, and then one of so many."""
_REMEMBERED = 8
"""Looks that the mean of a size is taken over."""
_ROUNDS = 20


class LayerBudgets:
    """The cold entries that each layer of one cache attends in place of as many in all of them.

    A layer counts from its first step on. One whose steps find nothing, or all there is, keeps what
    the method asks for, and the others share theirs.

    Args:
        layers: of the model; those with more query heads count for more.
    """

    def __init__(self, layers: Sequence[LayerShape]) -> None:
        self._heads = {shape.layer_idx: shape.num_q_heads for shape in layers}
        self._asked: dict[int, Read] = {}  # by the method
        self._given: dict[int, Read] = {}
        self._sizes: dict[int, float] = {}
        self._begin: int | None = None
        self._looks = 0
        self._seen: set[int] = set()  # in the look that is under way

    def is_due(self, length: int) -> bool:
        """Whether the step is looked at by which a row becomes so long."""
        if self._begin is None:
            self._begin = length
        return 0 <= length - self._begin < _FIRST or length % _EVERY == 0

    def read(self, layer_idx: int, asked: Read) -> Read:
        """Entries that a step attends for which a method asks so."""
        if self._asked.get(layer_idx) != asked:
            self._asked[layer_idx] = asked
            self._given[layer_idx] = _plain(asked)
        return self._given[layer_idx]

    def add(self, step: HalvedStep, part: PartialAttention) -> None:
        """Takes a layer's step, with what it found; the last layer's gives all of them budgets."""
        layer_idx = step.layer.shape.layer_idx
        if not self._seen and layer_idx != next(iter(self._asked)):
            return  # the look has begun behind the first layer
        self._seen.add(layer_idx)
        found = step.found or {}
        looked = [
            (halves_of(step, part, row).square().mean().item(), budget.top_k)
            for row, (budget, _) in found.items()
        ]
        if looked:
            size = sum(square * count**_FALL for square, count in looked) / len(looked)
            before = self._sizes.get(layer_idx, size)
            self._sizes[layer_idx] = before + (size - before) / min(self._looks + 1, _REMEMBERED)
        if len(self._seen) == len(self._given):
            self._share()

    def fork(self) -> LayerBudgets:
        """The same for another cache."""
        new = copy(self)
        new._asked, new._given = dict(self._asked), dict(self._given)
        new._sizes, new._seen = dict(self._sizes), set(self._seen)
        return new

    def _share(self) -> None:
        self._looks += 1
        self._seen = set()
        asked = {idx: _counted(read) for idx, read in self._asked.items()}
        for idx, count in entries_by_size(self._sizes, asked, self._heads).items():
            plain = _plain(self._asked[idx])
            assert isinstance(plain.cold, TokenBudget)
            self._given[idx] = replace(plain, cold=replace(plain.cold, top_k=count))


def entries_by_size(
    sizes: Mapping[int, float], asked: Mapping[int, int], heads: Mapping[int, int]
) -> dict[int, int]:
    """Entries of each layer that has a size above 0: as many, times its heads, as are asked for.

    Args:
        sizes, asked, heads: by layer; the size, entries asked for, query heads.
    """
    shares = {
        idx: size ** (1 / (1 + _FALL)) for idx, size in sizes.items() if size > 0 and idx in asked
    }
    total = sum(heads[idx] * asked[idx] for idx in shares)
    scale, given = 1.0, dict[int, float]()
    for _ in range(_ROUNDS):  # bounds take from some and give to others
        given = {
            idx: min(max(scale * share, asked[idx] / _MOST), _MOST * asked[idx])
            for idx, share in shares.items()
        }
        scale *= total / max(1e-30, sum(heads[idx] * count for idx, count in given.items()))
    return {idx: max(1, round(count)) for idx, count in given.items()}


def _counted(read: Read) -> int:
    assert isinstance(read.cold, TokenBudget)
    return read.cold.top_k


def _plain(read: Read) -> Read:
    """As a step takes it, which asks nobody."""
    assert isinstance(read.cold, TokenBudget)
    return replace(read, cold=replace(read.cold, follows=False))
