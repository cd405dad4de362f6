"""Indexes of layers that go together: one chooses, others read what it chose (TidalDecode)."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_kv.errors import IntegrityError
from hybrid_kv.index._base import KeyIndex, rank
from hybrid_kv.index.flat import FlatIndex
from hybrid_kv.types import SearchResult


class Choices:
    """Results of a step's searches in a layer, in their order: the same in every layer."""

    def __init__(self) -> None:
        self._found: list[Tensor] = []
        self._next = 0

    def begin(self, *, anew: bool) -> None:
        """A step of a layer, which chooses (anew) or reads what was chosen, from the first on."""
        self._next = 0
        if anew:
            self._found.clear()

    def note(self, ids: Tensor) -> None:
        """Ids [Hkv, M, K] that a search has found."""
        self._found.append(ids)

    def take(self) -> Tensor:
        """The ids of the search that corresponds to this one."""
        if self._next == len(self._found):
            raise IntegrityError(
                f"search {self._next + 1} of a step must follow one of the layer that chooses, "
                f"which made {len(self._found)}; the layers do not hold the same tokens"
            )
        self._next += 1
        return self._found[self._next - 1]


class SelectingIndex(FlatIndex):
    """Scores every key and notes the best."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(FlatIndex.Params(precision="stored"))
        self._choices = choices

    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        found = super()._find(queries, count, most)
        self._choices.note(found.ids[..., :count])
        return found


class ReusingIndex(KeyIndex):
    """Finds what another layer has chosen, by the true scores of its own keys."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(FlatIndex.Params())
        self._choices = choices

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        """Keys are looked up where they lie."""

    def _append(self, known: int) -> None:
        """As `_rebuild`."""

    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        ids = self._choices.take()
        heads, found = torch.arange(len(ids))[:, None, None], ids >= 0
        keys = self._keys[heads, ids.clamp_min(0)].float()
        scores = torch.matmul(keys, queries[..., None])[..., 0].masked_fill(~found, -torch.inf)
        scores, ids = rank(scores, ids, min(most, ids.shape[-1]))
        scored = int(found.sum())
        return SearchResult(ids, scores, scored, read_bytes=self._key_bytes(scored))
