"""Shared parts of the built-in indexes: templates, checks, runs of heads, the scan of all rows.

The template has checks and empty cases once, and three hooks per kind. No check reads all keys at
search time. That of indexes with a file format follows it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor

from hybrid_kv.errors import ConfigError, IntegrityError, NonFiniteError, ShapeError
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.plugins import BuildCancelled, Index
from hybrid_kv.types import SearchResult

SCRATCH_BYTES = 32 * 2**20
"""Temporary scores of one scan; a further few MiB hold a block of rows in float32."""
_BLOCK_BYTES = 2**20


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
        check_keys(keys)
        if samples is not None:
            check_samples(samples, keys)
        if nearest is not None:
            check_nearest(nearest, samples, keys)
        check_finite(keys)
        self._known = keys
        self._rebuild(samples, nearest)

    @torch.no_grad()
    def add(self, keys: Tensor) -> None:
        """See `Index.add`; raises as `build`."""
        known = self._keys if self._known is None else self._known
        check_appended(keys, known)
        check_finite(keys, known.shape[1])
        self.grow(keys)

    def grow(self, keys: Tensor) -> None:
        """Takes keys as `add`, of whoever has checked them."""
        known, self._known = 0 if self._known is None else self._known.shape[1], keys
        if keys.shape[1] > known:
            self._append(known)

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
            refuse_search(queries, keys, top_k, most, near)
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
        count = 0 if self._known is None else self._known.shape[1]
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


def check_keys(keys: Tensor) -> None:
    """Raises ShapeError unless keys are [Hkv, N, D]."""
    if keys.dim() != 3:
        raise ShapeError(f"keys must be [Hkv, N, D], got shape {list(keys.shape)}")


def check_appended(keys: Tensor, known: Tensor) -> None:
    """Raises ShapeError unless keys hold the known rows, or more, for the same heads."""
    heads, rows, dim = known.shape
    fits = keys.dim() == 3 and (keys.shape[0], keys.shape[2]) == (heads, dim)
    if not fits or keys.shape[1] < rows:
        raise ShapeError(
            f"keys must be [{heads}, N >= {rows}, {dim}], got shape {list(keys.shape)}; "
            "add takes the whole array, known rows first"
        )


def refuse_search(
    queries: Tensor, keys: Tensor, top_k: int, most: int, near: Tensor | None
) -> NoReturn:
    """Says what is wrong with a search.

    Raises:
        ShapeError: queries [Hkv, M, D] do not fit keys [Hkv, N, D], or near is not [Hkv, M, W]
            int64 for them.
        ConfigError: not 1 <= top_k <= most.
    """
    heads, _, dim = keys.shape
    if queries.dim() != 3 or (queries.shape[0], queries.shape[2]) != (heads, dim):
        raise ShapeError(
            f"queries must be [{heads}, M, {dim}] as the keys have {heads} KV heads of "
            f"head_dim {dim}, got shape {list(queries.shape)}"
        )
    if top_k < 1:
        raise ConfigError(f"top_k must be at least 1, got {top_k}; ask for at least one key")
    if most < top_k:
        raise ConfigError(f"most must be at least top_k {top_k}, got {most}; leave it out")
    got = "none" if near is None else f"{near.dtype} of shape {list(near.shape)}"
    raise ShapeError(
        f"near must be int64 {[*queries.shape[:2], 'W']} as the queries are, got {got}; leave it "
        "out for other queries"
    )


def check_samples(samples: Tensor, keys: Tensor) -> None:
    """Raises ShapeError unless samples [Hkv, G, M, D] fit keys [Hkv, N, D]."""
    heads, _, dim = keys.shape
    if samples.dim() != 4 or (samples.shape[0], samples.shape[3]) != (heads, dim):
        raise ShapeError(
            f"samples must be [{heads}, G, M, {dim}] as the keys have {heads} KV heads of "
            f"head_dim {dim}, got shape {list(samples.shape)}"
        )


def check_nearest(nearest: Tensor, samples: Tensor | None, keys: Tensor) -> None:
    """Raises ShapeError unless nearest [Hkv, G, M, K] int32 belong to samples and name keys."""
    given = None if samples is None else samples.shape[:3]
    if nearest.dim() != 4 or nearest.shape[:3] != given or nearest.dtype != torch.int32:
        expected = "absent without samples" if given is None else f"int32 {[*given, 'K']}"
        raise ShapeError(
            f"nearest must be {expected}, got {nearest.dtype} of shape {list(nearest.shape)}"
        )
    if nearest.numel() and not 0 <= int(nearest.min()) <= int(nearest.max()) < keys.shape[1]:
        raise ShapeError(
            f"nearest must name rows 0..{keys.shape[1] - 1} of the keys, got "
            f"{int(nearest.min())}..{int(nearest.max())}"
        )


def check_finite(keys: Tensor, first_row: int = 0) -> None:
    """Raises NonFiniteError naming the first KV head and row >= first_row with NaN or infinity.

    Two reductions (both carry NaN) replace a mask as large as the keys.
    """
    new = keys[:, first_row:]
    if new.numel() == 0 or bool(torch.isfinite(torch.stack([new.amin(), new.amax()])).all()):
        return
    head, row = (~torch.isfinite(new).all(-1)).nonzero()[0].tolist()
    raise NonFiniteError(
        f"keys of KV head {head}, row {row + first_row} are not finite; "
        "check the model's weights and dtype"
    )


def runs(heads: Iterable[int]) -> list[slice]:
    """Ascending heads as few slices with even steps, so that `keys[slice]` is a view."""
    found: list[list[int]] = []
    for head in heads:
        last = found[-1] if found else []
        if last and (len(last) == 1 or head - last[-1] == last[-1] - last[-2]):
            last.append(head)
        else:
            found.append([head])
    return [slice(run[0], run[-1] + 1, run[1] - run[0] if len(run) > 1 else 1) for run in found]


def joined(
    queries: Tensor, parts: Sequence[tuple[slice | list[int], SearchResult]], rows_read: int | None
) -> SearchResult:
    """Joins results of some heads each, for queries [Hkv, M, D]; narrower ones are padded."""
    width = max(found.ids.shape[2] for _, found in parts)
    ids = torch.full((*queries.shape[:2], width), -1, dtype=torch.int64)
    scores = torch.full(ids.shape, -torch.inf)
    for heads, found in parts:
        ids[heads, :, : found.ids.shape[2]] = found.ids
        scores[heads, :, : found.ids.shape[2]] = found.scores
    scored = sum(found.scored for _, found in parts)
    read = sum(found.read_bytes or 0 for _, found in parts)
    return SearchResult(ids, scores, scored, rows_read, read_bytes=read)


def scan(queries: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best rows of each query, unordered.

    Rows are read once for all queries of a head and turned to float32 block by block, so that a
    block is still in the cache when it is multiplied. The top-k runs over far wider stretches,
    because its cost per call hardly depends on their width.

    Args:
        queries: [Hkv, M, D] float32.
        rows: [Hkv, N, D], any float dtype; 1 <= count <= N.

    Returns:
        scores [Hkv, M, count] float32 and ids [Hkv, M, count] int64.
    """
    heads, num_queries, _ = queries.shape
    stretch = max(count, SCRATCH_BYTES // (4 * heads * num_queries))
    best, best_ids = queries.new_empty(heads, num_queries, 0), None
    for start in range(0, rows.shape[1], stretch):
        scores = scores_of(queries, rows[:, start : start + stretch])
        top = scores.topk(min(count, scores.shape[2]), sorted=False)
        ids = top.indices + start
        if best_ids is not None:
            both, both_ids = torch.cat([best, top.values], -1), torch.cat([best_ids, ids], -1)
            top = both.topk(count, sorted=False)
            ids = both_ids.gather(-1, top.indices)
        best, best_ids = top.values, ids
    assert best_ids is not None
    return best, best_ids


def scores_of(queries: Tensor, rows: Tensor) -> Tensor:
    """[Hkv, M, N] float32 dot products of queries [Hkv, M, D] and rows [Hkv, N, D]."""
    heads, length, dim = rows.shape
    block = max(16, _BLOCK_BYTES // (4 * heads * dim))
    scores = queries.new_empty(*queries.shape[:2], length)
    for start in range(0, length, block):
        part = rows[:, start : start + block].float()
        scores[:, :, start : start + block] = torch.matmul(queries, part.transpose(1, 2))
    return scores


def true_scores(queries: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """[Hkv, M, K] float32 dot products of queries [Hkv, M, D] with the keys [Hkv, N, D] of these
    ids [Hkv, M, K]; -inf where an id is -1.
    """
    heads = torch.arange(len(ids))[:, None, None]
    step = max(1, SCRATCH_BYTES // (4 * len(ids) * max(1, ids.shape[-1]) * keys.shape[-1]))
    parts = [
        torch.matmul(keys[heads, some.clamp_min(0)].float(), q[..., None])[..., 0]
        for q, some in zip(queries.split(step, 1), ids.split(step, 1), strict=True)
    ]
    return torch.cat(parts, 1).masked_fill(ids < 0, -torch.inf)


def rank(scores: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best entries, best first; of equal scores the lower id comes first.

    Args:
        scores, ids: [Hkv, M, C], C >= count; an entry of score -inf is no entry.

    Returns:
        scores, ids [Hkv, M, count]; ids -1 where there is no entry.
    """
    ids, order = ids.sort(-1)
    scores, order = scores.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    scores, ids = scores[..., :count], ids[..., :count]
    return scores, ids.masked_fill(scores == -torch.inf, -1)


class SavedIndex(KeyIndex):
    """An index with a file format (docs/index-file.md); keys stay with their owner.

    file_kind: what the file calls it.
    """

    file_kind: ClassVar[str]

    def over(self, keys: Tensor) -> Self:
        """This index over keys [Hkv, N, D] that differ by rounding, to be saved with them."""
        new = copy(self)
        new._known = keys
        return new

    def shortened(self, keys: Tensor) -> Self | None:
        """Index of keys [Hkv, N, D], the first of its own, to be saved with them.

        It may share memory with this index. None where those that follow cannot be taken out.
        """
        return None

    def save(self, path: str | Path) -> None:
        """Writes all but the keys.

        Raises:
            OSError: the file cannot be written.
        """
        from hybrid_kv.index._file import write_arrays

        write_arrays(Path(path), self.file_kind, *self.to_file())

    @classmethod
    def load(cls, path: str | Path, keys: Tensor) -> Self:
        """The index that `save` wrote, over the same keys [Hkv, N, D]; more may follow them.

        Raises:
            FileFormatError: the file is damaged, foreign or was made for other keys.
            OSError: it cannot be read.
        """
        from hybrid_kv.index._file import read_arrays

        path = Path(path)
        return cls.from_file(path, *read_arrays(path, cls.file_kind), keys)

    @abstractmethod
    def to_file(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Contents of a file for `save`: numbers and words, and arrays."""

    @classmethod
    @abstractmethod
    def from_file(
        cls, path: Path, meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], keys: Tensor
    ) -> Self:
        """Of what `to_file` gave; raises as `load`, where `path` is named."""


class SavedReport:
    """Conversion of a report, a dataclass, to JSON and back."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """From what `to_dict` gave.

        Raises:
            ValueError: a value is missing or of another type.
        """
        return _adapter(cls).validate_python(data)  # type: ignore[arg-type, no-any-return]


@cache
def _adapter(kind: type[SavedReport]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
