"""Checks of a method's answers about the entries that it keeps, before anything changes.

A method may be somebody else's. Its answers are checked on the host, which waits for nothing;
numbers that are not finite are found where they lie, and told when entries have left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hybrid_kv.entries import Attended, Entries
from hybrid_kv.errors import HybridKVError, MethodError
from hybrid_kv.plugins import Method
from hybrid_kv.store import LayerStore, Overflow, Row
from hybrid_kv.transfer import Executor, Transfer
from hybrid_kv.types import Evidence, LayerShape

T = TypeVar("T")

_OWN_TROUBLE = (HybridKVError, MemoryError, torch.OutOfMemoryError)
_MOST_BYTES = 2
"""Times the K and V of all that ever left the window: more than that no method needs of it."""
_FREE_BYTES = 2**20
"""Which count for nothing: scores and tables of a short context."""
_FOLLOWED_TOKENS = 128
"""Tokens of a long later turn that a method is told of at a time."""


@dataclass(frozen=True, slots=True)
class CheckedMethod:
    """A method as one layer asks it; its answers are checked.

    dtype, device: of the layer's K and V.
    """

    method: Method
    shape: LayerShape
    dtype: torch.dtype
    device: torch.device

    @property
    def follows(self) -> bool:
        """Whether the method wants to know what a step attended."""
        return type(self.method).after is not Method.after

    def absorb(
        self,
        row: int,
        kept: Entries | None,
        left: Entries,
        seen: Evidence | None,
        gone_tokens: int,
    ) -> Entries | None:
        """See `Method.absorb`; what comes back owns its memory.

        Args:
            gone_tokens: that have left the window since the beginning, these included.

        Raises:
            MethodError: the method raised, or answered what it must not.
        """
        who = f"{type(self.method).__name__}.absorb of layer {self.shape.layer_idx}, row {row}"
        new = _ask(who, lambda: self.method.absorb(self.shape.layer_idx, row, kept, left, seen))
        before = (0,) * left.num_heads if kept is None else kept.lengths
        most = [old + more for old, more in zip(before, left.lengths, strict=True)]
        self._check(who, new, most)
        if new is None:
            return None
        if seen is not None:
            self._check_read(who, new)
        new = new.copied() if new.is_borrowed or new.shares_memory(left) else new
        self._check_bytes(who, new, gone_tokens)
        return new

    def take(
        self, executor: Executor, row: Row, overflow: Overflow, seen: Evidence | None
    ) -> Absorbed:
        """Asks the method what it keeps of a row when these entries have left; see `absorb`."""
        count = len(overflow.positions)
        first = int(overflow.positions[0]) if count else 0
        at = torch.arange(first, first + count, device=overflow.k.device)
        left, gone = Entries.borrowed(overflow.k, overflow.v, at), row.gone_tokens + count
        entries = self.absorb(row.number, row.kept, left, seen, gone)
        flag = finite_flag(entries, row.kept)
        positions = None
        if entries is not None and row.placement is not None and row.placement.offloads:
            positions = executor.send(entries.positions)
        return Absorbed(row, entries, None if flag is None else executor.send(flag), positions)

    def after(
        self, attended: Attended, gone_tokens: Sequence[int]
    ) -> Sequence[Entries | None] | None:
        """See `Method.after`.

        Args:
            gone_tokens: by row, that have left the window since the beginning.

        Raises:
            MethodError: the method raised, or answered what it must not.
        """
        who = f"{type(self.method).__name__}.after of layer {self.shape.layer_idx}"
        answer = _ask(who, lambda: self.method.after(self.shape.layer_idx, attended))
        if answer is None:
            return None
        if len(answer) != len(attended.kept):
            raise MethodError(
                f"{who} must return entries of {len(attended.kept)} rows, or None for all, got "
                f"{len(answer)}; return one for each row of attended.kept"
            )
        for new, old, gone in zip(answer, attended.kept, gone_tokens, strict=True):
            if new is not old:
                none = (0,) * self.shape.num_kv_heads
                self._check(who, new, none if old is None else old.lengths)
                self._check_bytes(who, new, gone)
        return answer

    def follow(
        self,
        executor: Executor,
        store: LayerStore,
        q: Tensor,
        lse: Tensor,
        *,
        scale: float,
        softcap: float | None,
        ago: int = 0,
    ) -> None:
        """Tells the method what was attended; it may keep something else from now on.

        Args:
            q: [B, Hq, T, D]. lse: [B, Hq, T]. ago: so many tokens have been stored after these.
        """
        rows = store.rows
        attended = Attended(
            *(q, lse, [row.kept for row in rows], [row.length - ago for row in rows]),
            *(scale, softcap),
            lambda row: rows[row].resident_keys(),
        )
        answer = self.after(attended, [row.gone_tokens for row in rows])
        if answer is None:
            return
        for row, new in zip(rows, answer, strict=True):
            old, positions = row.kept, None
            if new is old:
                continue
            if row.placement is not None and row.placement.offloads and new is not None:
                if old is not None and new.same_rows(old):
                    row.kept = new
                    continue
                positions = executor.send(new.positions).open()
            row.keep(new, positions)

    def follow_turn(
        self,
        executor: Executor,
        store: LayerStore,
        q: Tensor,
        lse: Tensor,
        valid: Tensor | None,
        *,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Follows a long later turn, some tokens at a time: their weights take memory.

        Args:
            q: [B, Hq, T, D]. lse: [B, Hq, T]. valid: [B, T] bool, False for padding; None for none.
        """
        if valid is not None:  # padding to the front, where it weighs nothing
            order = valid.int().argsort(dim=1, stable=True)[:, None]
            q, lse = q.take_along_dim(order[..., None], 2), lse.take_along_dim(order, 2)
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        count = q.shape[2]
        for start in range(0, count, _FOLLOWED_TOKENS):
            some = slice(start, min(count, start + _FOLLOWED_TOKENS))
            part = q[:, :, some], lse[:, :, some]
            self.follow(executor, store, *part, scale=scale, softcap=softcap, ago=count - some.stop)

    def _check(self, who: str, new: object, most: Sequence[int]) -> None:
        """Raises MethodError unless `new` is None or entries, of at most so many in each head."""
        if new is None:
            return
        if not isinstance(new, Entries):
            raise MethodError(
                f"{who} must return Entries or None, got {type(new).__name__}; make them with "
                "left.select, left.extended or Entries.of"
            )
        if new.num_heads != self.shape.num_kv_heads:
            raise MethodError(
                f"{who} must return entries of {self.shape.num_kv_heads} KV heads, got "
                f"{new.num_heads}; a head that keeps nothing has length 0"
            )
        self._check_columns(who, new)
        for head, (count, limit) in enumerate(zip(new.lengths, most, strict=True)):
            if count > limit:
                raise MethodError(
                    f"{who} must not return more than the {limit} entries that it was given of KV "
                    f"head {head}, got {count}; keep each once"
                )

    def _check_bytes(self, who: str, new: Entries | None, gone_tokens: int) -> None:
        size = self.dtype.itemsize * self.shape.head_dim * self.shape.num_kv_heads
        limit = _FREE_BYTES + _MOST_BYTES * 2 * size * gone_tokens
        if new is not None and new.nbytes > limit:
            raise MethodError(
                f"{who} must hold at most {limit:,} bytes for {gone_tokens} tokens, got "
                f"{new.nbytes:,}; let go of state that it needs no more, and clone views of large "
                "tensors"
            )

    def _check_columns(self, who: str, new: Entries) -> None:
        positions = new.columns.get("positions")
        if positions is None or positions.dtype != torch.int64:
            got = "none" if positions is None else str(positions.dtype)
            raise MethodError(
                f"{who} must return entries with a column of positions in torch.int64, got {got}; "
                "keep that of left"
            )
        for name, column in new.columns.items():
            if column.device != self.device or len(column) != len(positions):
                raise MethodError(
                    f"{who} must return column '{name}' with {len(positions)} rows on "
                    f"{self.device} as the positions, got {len(column)} on {column.device}; make "
                    "it on left's device"
                )
        rows = zip(new.starts, new.lengths, strict=True)
        if any(a < 0 or n < 0 or a + n > len(positions) for a, n in rows):
            raise MethodError(
                f"{who} must return heads inside of {len(positions)} rows, got starts "
                f"{new.starts} and lengths {new.lengths}; make them by select or extended"
            )
        if type(new).read is Entries.read:
            self._check_read(who, new)

    def _check_read(self, who: str, new: Entries) -> None:
        try:
            parts = dict(zip(("keys", "values"), new.read(), strict=True))
        except KeyError as error:
            raise MethodError(
                f"{who} must return entries with a column of {error}, or of a class that overrides "
                "read; got neither"
            ) from None
        expected = len(new.positions), self.shape.head_dim
        for name, part in parts.items():
            found = tuple(part.shape), part.dtype, part.device
            if found != (expected, self.dtype, self.device):
                raise MethodError(
                    f"{who} must return {name} {list(expected)} {self.dtype} on {self.device} as "
                    f"the cache's, got {list(part.shape)} {part.dtype} on {part.device}; convert "
                    "them, or keep codes and decode them in read"
                )


@dataclass(frozen=True, slots=True)
class Absorbed:
    """Entries that a method keeps of a row, which are checked when their flag has arrived.

    finite: [] bool; None where there is nothing to look at. positions: [capacity], where the cold
    tier has to know what it need not attend.
    """

    row: Row
    entries: Entries | None
    finite: Transfer | None
    positions: Transfer | None

    @property
    def parcels(self) -> list[Transfer]:
        """Copies, in the order in which they left."""
        return [*filter(None, (self.finite, self.positions))]

    def check(self) -> None:
        """Raises MethodError where a number of it is not finite."""
        if self.finite is not None and not self.finite.open():
            raise MethodError(
                f"what the method keeps of row {self.row.number} must be finite, got NaN or "
                "infinity; look in its absorb at divisions by sums that can be 0"
            )

    def commit(self, row: Row) -> None:
        """From now on the row has it."""
        row.keep(self.entries, None if self.positions is None else self.positions.open())


def _ask(who: str, question: Callable[[], T]) -> T:
    """A method's answer, whose tensors may be written later, outside of inference mode as well."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            return question()
    except _OWN_TROUBLE:
        raise
    except Exception as error:
        raise MethodError(
            f"{who} must return entries, got {type(error).__name__}: {error}; the cache is as it "
            "was before, so crop the tokens of this step, or restore a checkpoint"
        ) from error


def finite_flag(new: Entries | None, old: Entries | None) -> Tensor | None:
    """[] bool on their device: whether all numbers are finite that `new` has beyond `old`.

    None where there is nothing to look at. Rows that were there before, in the same memory, are
    not looked at again: absorbing a page costs a page.
    """
    if new is None or not any(new.lengths):
        return None
    flags = []
    for name, column in new.columns.items():
        if not column.is_floating_point():
            continue
        before = None if old is None else old.columns.get(name)
        same = before is not None and before.data_ptr() == column.data_ptr()
        known = _known(old, new) if same and old is not None else [0] * new.num_heads
        # -inf is a bias that hides.
        wrong = torch.isnan if name == "bias" else _is_infinite
        flags += [
            wrong(rows[count:]).any() for rows, count in zip(new.split(column), known, strict=True)
        ]
    return ~torch.stack(flags).any() if flags else None


def _known(old: Entries, new: Entries) -> list[int]:
    """By head the rows of `new` that `old` has as well, in the same memory."""
    heads = zip(old.starts, old.lengths, new.starts, strict=True)
    return [max(0, start + count - first) for start, count, first in heads]


def _is_infinite(rows: Tensor) -> Tensor:
    return ~torch.isfinite(rows)
