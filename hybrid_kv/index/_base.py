"""The template of the built-in indexes: checks and empty cases once, three hooks per kind."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.errors import IntegrityError
from hybrid_kv.index import _checks
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.plugins import BuildCancelled, Index
from hybrid_kv.types import SearchResult


class Cancellation:
    """Whether a build shall give up; any thread may say so."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def check(self) -> None:
        """Raises BuildCancelled once `set` was called."""
        if self._is_set:
            raise BuildCancelled


class KeyIndex(Index):
    """An index that refers to the caller's key array.

    A kind fills in `_rebuild`, `_append` and `_find`; they see checked values and at least one key.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._known: Tensor | None = None
        self._cancellation = Cancellation()

    @property
    def _keys(self) -> Tensor:
        """[Hkv, N, D], the caller's array."""
        if self._known is None:
            raise IntegrityError("the index was used before build; call build(keys, samples) first")
        return self._known

    def _key_bytes(self, rows: int | float) -> int:
        """Bytes of so many keys as they are stored."""
        return int(rows * self._keys.shape[2] * self._keys.itemsize)

    def __len__(self) -> int:
        return 0 if self._known is None else self._known.shape[1]

    @torch.no_grad()
    def build(self, keys: Tensor, samples: Tensor | None, nearest: Tensor | None = None) -> None:
        """See `Index.build`.

        Raises:
            ShapeError: keys, samples or nearest do not fit.
            NonFiniteError: a key is NaN or infinite; the index is as before.
        """
        _checks.check_keys(keys)
        if samples is not None:
            _checks.check_samples(samples, keys)
        if nearest is not None:
            _checks.check_nearest(nearest, samples, keys)
        _checks.check_finite(keys)
        self._known = keys
        self._rebuild(samples, nearest)

    @torch.no_grad()
    def add(self, keys: Tensor) -> None:
        """See `Index.add`; raises as `build`."""
        known = self._keys
        _checks.check_appended(keys, known)
        _checks.check_finite(keys, known.shape[1])
        self._known = keys
        if keys.shape[1] > known.shape[1]:
            self._append(known.shape[1])

    def search(
        self, queries: Tensor, top_k: int, most: int | None = None, near: Tensor | None = None
    ) -> SearchResult:
        """See `Index.search`.

        Raises:
            ShapeError: queries do not fit the keys, or near the queries.
            ConfigError: top_k is below 1, or most below top_k.
        """
        if torch.is_grad_enabled():  # a guard takes its time even where no gradients are on anyway
            with torch.no_grad():
                return KeyIndex.search(self, queries, top_k, most, near)
        keys = self._keys if self._known is None else self._known
        most = top_k if most is None else most
        heads, _, dim = keys.shape
        fits = queries.dim() == 3 and (queries.shape[0], queries.shape[2]) == (heads, dim)
        if fits and near is not None:
            alike = near.shape[:2] == queries.shape[:2]
            fits = near.dim() == 3 and alike and near.dtype is torch.int64
        if not fits or not 1 <= top_k <= most:
            _checks.refuse_search(queries, keys, top_k, most, near)
        size = (*queries.shape[:2], min(top_k, keys.shape[1]))
        if 0 in size:
            return SearchResult(
                torch.empty(size, dtype=torch.int64), torch.empty(size), 0, read_bytes=0
            )
        queries, most = queries.float(), min(most, keys.shape[1])
        if near is None:
            return self._find(queries, size[2], most)
        return self._find_near(queries, size[2], most, near)

    def __init_subclass__(cls, **options: Any) -> None:
        """A kind that finds in a way of its own has no plan of the kind that it derives from."""
        super().__init_subclass__(**options)
        own = vars(cls)
        if "_plan" not in own and not own.keys().isdisjoint(("_find", "_find_near", "search")):
            cls._plan = KeyIndex._plan  # type: ignore[method-assign]

    def plan(self, top_k: int, most: int) -> Sequence[EngineSearch] | None:
        """See `Index.plan`."""
        count = len(self)
        return self._plan(min(top_k, count), min(most, count)) if count else None

    def cancel(self) -> None:
        """See `Index.cancel`; a kind whose `_rebuild` takes long checks `_cancellation`."""
        self._cancellation.set()

    @abstractmethod
    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        """Indexes `self._keys` from nothing; N may be 0 here."""

    @abstractmethod
    def _append(self, known: int) -> None:
        """Indexes the rows of `self._keys` from `known` on."""

    @abstractmethod
    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        """Searches for queries [Hkv, M, D] float32; 1 <= count <= most <= N, M >= 1.

        Returns:
            As many columns as were ranked for `count`, but `most` at most.
        """

    def _find_near(self, queries: Tensor, count: int, most: int, near: Tensor) -> SearchResult:
        """As `_find`, for a kind whose searches may begin at keys [Hkv, M, W]."""
        return self._find(queries, count, most)

    def _plan(self, count: int, most: int) -> Sequence[EngineSearch] | None:
        """Searches of the engine in the place of `_find`; None where there are none."""
        return None
