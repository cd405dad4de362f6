"""Ragged tensors: rows of several KV heads in one flat memory, as immutable values.

Head h owns the rows starts[h] : starts[h] + lengths[h] of every tensor, so that heads of different
lengths waste nothing, and memory that has room between the heads grows without moving. Values share
memory freely: a value sees nothing beyond its lengths, and only whoever is at the end of what was
written writes on; anybody else writes into a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Self, TypeAlias

import torch
from torch import Tensor

from hybrid_kv.errors import ShapeError
from hybrid_kv.ops.devices import staged

_LEAST_ROOM = 32
_ROOM_SHARE = 8  # room for an eighth more: growing copies an entry eight times in all, on average

Chosen: TypeAlias = Tensor | Sequence[Tensor]


class SharedRows:
    """Record of how far memory that several values share has been written.

    ends: by head, the row behind the last that the head may use. used: the row behind the last
    that somebody wrote.
    """

    __slots__ = ("ends", "used")

    def __init__(self, used: Iterable[int], ends: Iterable[int]) -> None:
        self.used, self.ends = list(used), tuple(ends)

    @classmethod
    def behind(cls, starts: Sequence[int], lengths: Sequence[int], room: int) -> SharedRows:
        """Of memory of one's own: so many rows are written, and `room` more fit behind them."""
        used = _ends(starts, lengths)
        return cls(used, [end + room for end in used])

    def fits(self, ends: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether nobody has written behind these ends, and so many rows may be."""
        have = all(e + n <= last for e, n, last in zip(ends, counts, self.ends, strict=True))
        return have and self.used == list(ends)


@dataclass(frozen=True, eq=False, kw_only=True)
class Ragged:
    """Named tensors of one length, flat and ragged by KV head; an immutable value.

    columns: [capacity, ...] each, on one device.
    starts, lengths: by KV head, on the host; a head may own none.
    """

    columns: Mapping[str, Tensor]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    _room: SharedRows | None = field(default=None, repr=False)

    @property
    def num_heads(self) -> int:
        return len(self.lengths)

    @property
    def is_borrowed(self) -> bool:
        """Whether the memory belongs to somebody else, who will write into it."""
        return self._room is None

    def shares_memory(self, other: Ragged) -> bool:
        """Whether some column lies in memory of the other's."""
        own = {column.untyped_storage().data_ptr() for column in self.columns.values()}
        theirs = {column.untyped_storage().data_ptr() for column in other.columns.values()}
        return not own.isdisjoint(theirs)

    def same_rows(self, other: Ragged) -> bool:
        """Whether both have the very same entries: their positions are the same memory."""
        mine, theirs = self.columns.get("positions"), other.columns.get("positions")
        return mine is theirs and (self.starts, self.lengths) == (other.starts, other.lengths)

    def split(self, column: str | Tensor) -> list[Tensor]:
        """By KV head its rows [N_h, ...] of a column, or of a tensor of the same rows; views."""
        rows = self.columns[column] if isinstance(column, str) else column
        return [rows[a : a + n] for a, n in zip(self.starts, self.lengths, strict=True)]

    def dense(self, column: str | Tensor) -> Tensor | None:
        """[Hkv, N, ...], a view; None where the heads' rows differ in number or do not lie evenly.

        With one head or with select's result, growing included, they do lie evenly.
        """
        rows = self.columns[column] if isinstance(column, str) else column
        return _evenly(rows, self.starts, self.lengths)

    def with_columns(self, **columns: Tensor) -> Self:
        """With further columns [capacity, ...], or others in the place of those of these names."""
        for name, column in columns.items():
            if column.shape[:1] != (self._capacity,):
                raise ShapeError(
                    f"column '{name}' must have {self._capacity} rows as the other columns, got "
                    f"shape {list(column.shape)}"
                )
        owned = {name: writable(column) for name, column in columns.items()}
        return replace(self, columns={**self.columns, **owned})

    def extended(self, more: Ragged) -> Self:
        """These and, behind them in every head, the rows of `more`.

        Amortised O(rows of `more`): they are written behind these where that memory has room and
        nobody else has written there. A column that only one of the two has is 0 for the other.

        Raises:
            ShapeError: another number of heads, or columns of other shapes or dtypes.
        """
        _check_alike(self, more)
        lengths = tuple(n + m for n, m in zip(self.lengths, more.lengths, strict=True))
        room = self._room
        ends = _ends(self.starts, self.lengths)
        has_columns = more.columns.keys() <= self.columns.keys()
        if room is not None and has_columns and room.fits(ends, more.lengths):
            new = self
        else:
            new, room = self._moved(lengths, more)
        ends = _ends(new.starts, self.lengths)
        for name, target in new.columns.items():
            if name in more.columns:
                _copy(more.columns[name], more.starts, target, ends, more.lengths)
            elif new is self:  # memory that somebody filled before
                for end, count in zip(ends, more.lengths, strict=True):
                    target[end : end + count] = 0
        room.used[:] = _ends(new.starts, lengths)
        return replace(new, lengths=lengths)

    def select(self, chosen: Chosen, *, room: int = 0) -> Self:
        """Some rows of every head, in the order in which they are here; everything else is freed.

        One gather into memory that fits, and that nobody shares. A device is waited for only where
        masks lie on it.

        Args:
            chosen: ids [Hkv, K] int64 within the heads, each once; or by head ids [K_h] int64 or a
                mask [N_h] bool (also one tensor [Hkv, N] bool), all of them here or on the host.
            room: for so many more rows of every head without growing.
        """
        ids, lengths = _ids(chosen, self.lengths)
        sizes = [n + room for n in lengths]
        starts = _starts(sizes)
        if isinstance(ids, Tensor):  # [Hkv, K]
            first = staged(torch.tensor(self.starts), ids.device)[:, None]
            ids = ids + first
            if room:  # filled with a finite row, for nobody reads it
                ids = torch.cat([ids, first.expand(-1, room)], 1)
            where = ids.flatten()
        else:
            parts = [i + a for i, a in zip(ids, self.starts, strict=True)]
            if room and parts:
                filling = parts[0].new_zeros(room)
                parts = [part for some in parts for part in (some, filling)]
            where = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
        where = staged(where, self._device)
        columns = {
            name: column.index_select(0, where)
            if self._capacity
            else column.new_zeros(len(where), *column.shape[1:])
            for name, column in self.columns.items()
        }
        memory = SharedRows.behind(starts, lengths, room)
        return replace(self, columns=columns, starts=starts, lengths=lengths, _room=memory)

    def without_first(self, counts: Sequence[int]) -> Self:
        """Less so many rows at the front of every head; at once, for nothing moves.

        Their memory is freed when these grow out of it. With `extended` a head that holds one row
        exchanges it: the new one behind the old, then less the old.
        """
        starts = tuple(_ends(self.starts, counts))
        lengths = tuple(n - count for n, count in zip(self.lengths, counts, strict=True))
        return replace(self, starts=starts, lengths=lengths)

    def copied(self) -> Self:
        """The same rows in memory of their own, which fits."""
        columns, starts = {}, _starts(self.lengths)
        for name, column in self.columns.items():
            columns[name] = column.new_zeros(sum(self.lengths), *column.shape[1:])
            _copy(column, self.starts, columns[name], starts, self.lengths)
        memory = SharedRows.behind(starts, self.lengths, 0)
        return replace(self, columns=columns, starts=starts, _room=memory)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that is held, room for growing and what views hide included."""
        return _held(self._tensors())

    def _tensors(self) -> list[Tensor]:
        return list(self.columns.values())

    @property
    def _capacity(self) -> int:
        return next((len(column) for column in self.columns.values()), 0)

    @property
    def _device(self) -> torch.device:
        return next((column.device for column in self.columns.values()), torch.device("cpu"))

    def _moved(self, lengths: Sequence[int], more: Ragged) -> tuple[Self, SharedRows]:
        """The same rows with the columns of `more` as well, where such lengths have room."""
        sizes = [n + max(_LEAST_ROOM, n // _ROOM_SHARE) for n in lengths]
        starts = _starts(sizes)
        columns = {}
        for name, like in {**more.columns, **self.columns}.items():
            columns[name] = like.new_zeros(sum(sizes), *like.shape[1:])
            if name in self.columns:
                _copy(like, self.starts, columns[name], starts, self.lengths)
        room = SharedRows(starts, _ends(starts, sizes))
        return replace(self, columns=columns, starts=starts, _room=room), room


def _ids(chosen: Chosen, lengths: Sequence[int]) -> tuple[Chosen, tuple[int, ...]]:
    """Chosen rows of heads of so many each as ascending ids, and how many each head has.

    Raises:
        ShapeError: a list or a mask is missing, or is of other rows.
    """
    if len(chosen) != len(lengths):
        raise ShapeError(
            f"chosen must be one list of ids or one mask for each of {len(lengths)} KV "
            f"heads, got {len(chosen)}"
        )
    if isinstance(chosen, Tensor) and chosen.dtype != torch.bool:
        return chosen.sort(-1).values, (chosen.shape[1],) * len(lengths)
    ids = []
    for head, (some, count) in enumerate(zip(chosen, lengths, strict=True)):
        if some.dtype == torch.bool:
            if some.shape != (count,):
                raise ShapeError(
                    f"the mask of KV head {head} must be [{count}] as its rows, got "
                    f"{list(some.shape)}"
                )
            ids.append(some.nonzero()[:, 0])
        else:
            ids.append(some.sort().values)
    return ids, tuple(map(len, ids))


def writable(column: Tensor) -> Tensor:
    """The same values in memory that may be extended, outside of inference mode as well."""
    return column.clone() if column.is_inference() else column.contiguous()


def _starts(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(sizes, initial=0))[:-1]


def _ends(starts: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return [start + length for start, length in zip(starts, lengths, strict=True)]


def _evenly(rows: Tensor, starts: Sequence[int], counts: Sequence[int]) -> Tensor | None:
    """A view [H, N, ...] of the rows of all heads where one can be had."""
    if len(set(counts)) != 1:
        return None
    step = starts[1] - starts[0] if len(starts) > 1 else 0
    if step < 0 or any(b - a != step for a, b in pairwise(starts)):
        return None
    row = rows.stride(0)
    size = (len(starts), counts[0], *rows.shape[1:])
    offset = rows.storage_offset() + (starts[0] * row if counts[0] else 0)
    return rows.as_strided(size, (step * row, *rows.stride()), offset)


def _copy(
    source: Tensor,
    from_: Sequence[int],
    target: Tensor,
    to: Sequence[int],
    counts: Sequence[int],
) -> None:
    """Ragged of every head from one memory to another: at once where they lie evenly in both."""
    here, there = _evenly(source, from_, counts), _evenly(target, to, counts)
    if here is not None and there is not None:
        there.copy_(here)
        return
    for a, b, count in zip(from_, to, counts, strict=True):
        target[b : b + count] = source[a : a + count]


def _check_alike(rows: Ragged, more: Ragged) -> None:
    if rows.num_heads != more.num_heads:
        raise ShapeError(
            f"rows of {rows.num_heads} KV heads must be extended by as many heads, got "
            f"{more.num_heads}"
        )
    for name, old in rows.columns.items():
        new = more.columns.get(name, old)
        if (old.shape[1:], old.dtype, old.device) != (new.shape[1:], new.dtype, new.device):
            raise ShapeError(
                f"column '{name}' must be [capacity, {', '.join(map(str, old.shape[1:]))}] "
                f"{old.dtype} on {old.device} as before, got shape {list(new.shape)} {new.dtype} "
                f"on {new.device}"
            )


def row_bytes(columns: Mapping[str, Tensor]) -> int:
    """Bytes of one row of all columns."""
    return sum(math.prod(column.shape[1:]) * column.itemsize for column in columns.values())


def _held(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
