"""Entries that a method keeps of a row of a layer, ragged by KV head, and the attention of a decode
step over them, for methods that follow its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from hybrid_kv.errors import ShapeError
from hybrid_kv.masses import logits_of
from hybrid_kv.ragged import Ragged, SharedRows, row_bytes, writable


@dataclass(frozen=True, eq=False, kw_only=True)
class Entries(Ragged):
    """Entries of one batch row of one layer on its device; an immutable value.

    columns: `k`, `v` [capacity, D] and `positions` [capacity] int64; `bias` [capacity] float32, a
        log weight added to the logits, where some weigh otherwise than 1; and whatever else a
        method keeps by entry (scores, codes), which follows every selection.
    tables: rows that several entries share (a codec's scales), which grow by themselves.
    state: of the whole row, following nothing (scores of what is still in the window);
        `merged_end` [] int64, where others are merged, see there.

    A codec derives from this, keeps codes in the place of `k` and `v`, and overrides `read`.
    """

    tables: Mapping[str, Ragged] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        *,
        bias: Tensor | None = None,
        state: Mapping[str, Tensor] | None = None,
        **columns: Tensor,
    ) -> Self:
        """Entries of as many for every KV head.

        Args:
            k, v: [Hkv, N, D]; copied unless contiguous.
            positions: [Hkv, N] or, for all heads, [N].
            bias: [Hkv, N]; columns: [Hkv, N, ...].

        Raises:
            ShapeError: they do not fit together.
        """
        heads, count = k.shape[:2]
        given = {"k": k, "v": v, "positions": positions.expand(heads, -1), **columns}
        if bias is not None:
            given["bias"] = bias
        for name, column in given.items():
            if column.shape[:2] != (heads, count):
                raise ShapeError(
                    f"{name} must be [{heads}, {count}, ...] as the keys, got {list(column.shape)}"
                )
        starts = tuple(range(0, heads * count, count)) if count else (0,) * heads
        flat = {name: writable(column.flatten(0, 1)) for name, column in given.items()}
        ends = [start + count for start in starts]
        room = SharedRows(ends, ends)
        lengths = (count,) * heads
        return cls(columns=flat, starts=starts, lengths=lengths, state=state or {}, _room=room)

    @classmethod
    def borrowed(cls, k: Tensor, v: Tensor, positions: Tensor) -> Self:
        """A look at k, v [Hkv, N, D] where they lie, at positions [N]; see `is_borrowed`."""
        heads, count, dim = k.shape
        together = all(t.stride(1) == dim and t.stride(2) == 1 and t.stride(0) >= 0 for t in (k, v))
        if not together or k.stride() != v.stride() or k.stride(0) % dim or not count:
            return replace(cls.of(k, v, positions), _room=None)
        step = k.stride(0) // dim
        starts, rows = tuple(h * step for h in range(heads)), (heads - 1) * step + count
        flat = {
            "k": k.as_strided((rows, dim), (dim, 1)),
            "v": v.as_strided((rows, dim), (dim, 1)),
            "positions": positions.new_zeros(rows),
        }
        lengths = (count,) * heads
        look = cls(columns=flat, starts=starts, lengths=lengths)
        for own in look.split("positions"):
            own.copy_(positions)
        return look

    @classmethod
    def empty(cls, like: Entries, **state: Tensor) -> Self:
        """No entries of the shape, dtype and device of others; a place for state."""
        columns = {name: column[:0] for name, column in like.columns.items()}
        none = (0,) * like.num_heads
        columns = {name: column.clone() for name, column in columns.items()}
        return cls(
            columns=columns, starts=none, lengths=none, state=state, _room=SharedRows(none, none)
        )

    @property
    def k(self) -> Tensor:
        """[capacity, D], as stored."""
        return self.columns["k"]

    @property
    def v(self) -> Tensor:
        """[capacity, D], as stored."""
        return self.columns["v"]

    @property
    def positions(self) -> Tensor:
        """[capacity] int64 on the entries' device."""
        return self.columns["positions"]

    @property
    def bias(self) -> Tensor | None:
        """[capacity] float32, or None where every entry weighs 1."""
        return self.columns.get("bias")

    def read(self) -> tuple[Tensor, Tensor]:
        """k, v [capacity, D] of the entries' rows, in a float dtype; codecs decode here."""
        return self.k, self.v

    @property
    def read_bytes(self) -> int:
        """Bytes that attending these reads: keys, values and log weights, without room.

        Of a class with a `read` of its own: all columns but positions, its tables and its state,
        which are what it decodes.
        """
        if type(self).read is Entries.read:
            read = {name: self.columns[name] for name in ("k", "v", "bias") if name in self.columns}
            return sum(self.lengths) * row_bytes(read)
        codes = {name: column for name, column in self.columns.items() if name != "positions"}
        tables = self.tables.values()
        shared = sum(sum(table.lengths) * row_bytes(table.columns) for table in tables)
        state = sum(value.nbytes for value in self.state.values())
        return sum(self.lengths) * row_bytes(codes) + shared + state

    def seen_from(self, position: int) -> Self:
        """As queries from this position on read them; these, unless a class turns keys by it."""
        return self

    def head(self, h: int) -> tuple[Tensor, Tensor, Tensor]:
        """k, v [N_h, D] and positions [N_h] of one KV head; views where `read` is one."""
        rows = slice(self.starts[h], self.starts[h] + self.lengths[h])
        k, v = self.read()
        return k[rows], v[rows], self.positions[rows]

    def with_state(self, **state: Tensor) -> Self:
        """With further state, or other in the place of that of these names."""
        return replace(self, state={**self.state, **state})

    def with_tables(self, **tables: Ragged) -> Self:
        """With further tables, or others in the place of those of these names."""
        return replace(self, tables={**self.tables, **tables})

    def before(self, position: int) -> Self:
        """The entries of positions before this one; the same value where that is all of them."""
        kept = [at < position for at in self.split("positions")]
        return self if all(map(torch.all, kept)) else self.select(kept)

    @property
    def merged_end(self) -> int:
        """Position behind the last entry that a method merged into another one; 0 for none."""
        ends = [int(end) for name, end in self.state.items() if name.endswith("merged_end")]
        return max(ends, default=0)

    def _tensors(self) -> list[Tensor]:
        shared = [tensor for table in self.tables.values() for tensor in table._tensors()]
        return [*super()._tensors(), *shared, *self.state.values()]


@dataclass(frozen=True, slots=True)
class Attended:
    """A decode step of one layer that has been computed; its weights are computed when asked for.

    q: [B, Hq, T, D]. lse: [B, Hq, T] float32, over all that the step attended.
    kept: by row what the method kept, as the step attended it.
    lengths: by row the tokens stored, the T new ones included.
    scale, softcap: what turns a score into a logit.
    window: gives a row's resident keys [Hkv, W, D] and their positions [W], HIDDEN where a slot is
        empty.
    """

    q: Tensor
    lse: Tensor
    kept: Sequence[Entries | None]
    lengths: Sequence[int]
    scale: float
    softcap: float | None
    window: Callable[[int], tuple[Tensor, Tensor]]

    def mass(self, row: int) -> Tensor:
        """[capacity] float32, flat as the entries kept: the softmax weights that each got.

        Summed over the query heads of its KV head and the T new tokens; 0 in room for growing.
        Nothing is waited for.
        """
        kept = self.kept[row]
        if kept is None:
            return torch.zeros(0, device=self.q.device)
        masses = torch.zeros(len(kept.positions), device=kept.positions.device)
        dense = kept.dense(masses)
        weights = self.weights(row)
        if isinstance(weights, Tensor) and dense is not None:
            dense.copy_(weights.sum(1))
            return masses
        for into, head in zip(kept.split(masses), weights, strict=True):
            into.copy_(head.sum(0))
        return masses

    def weights(self, row: int) -> Tensor | Sequence[Tensor]:
        """Softmax weights that each of the M = G * T queries of a KV head gave to what is kept.

        [Hkv, M, N] float32 where heads keep equally many; by KV head [M, N_h] where they do not.
        """
        kept = self.kept[row]
        if kept is None:
            return torch.zeros(0, 0, 0, device=self.q.device)
        q, lse = self._grouped(row, kept.num_heads)
        k = kept.read()[0]
        keys = kept.dense(k)
        if keys is not None:
            return self._weights(q, lse, keys, None if kept.bias is None else kept.dense(kept.bias))
        biases = [None] * kept.num_heads if kept.bias is None else kept.split(kept.bias)
        heads = zip(q, lse, kept.split(k), biases, strict=True)
        return [self._weights(*head) for head in heads]

    def window_mass(self, row: int) -> tuple[Tensor, Tensor]:
        """Masses [Hkv, W] float32 of a row's resident entries, the new tokens included, and their
        positions [W].

        Summed as in `mass`; 0 where a slot is empty, whose position is HIDDEN.
        """
        weights, positions = self.window_weights(row)
        return weights.sum(1), positions

    def window_weights(self, row: int) -> tuple[Tensor, Tensor]:
        """As `weights`, [Hkv, M, W], of a row's resident entries, and their positions [W]."""
        keys, positions = self.window(row)
        new = self.q.shape[2]
        asked = torch.arange(self.lengths[row] - new, self.lengths[row], device=positions.device)
        weights = self._weights(*self._grouped(row, len(keys)), keys).unflatten(1, (-1, new))
        return weights.masked_fill_(positions > asked[:, None], 0.0).flatten(1, 2), positions

    def _grouped(self, row: int, num_kv_heads: int) -> tuple[Tensor, Tensor]:
        """Queries [Hkv, M, D] and their log-sum-exp [Hkv, M], M = G * T with row g * T + t."""
        dim = self.q.shape[-1]
        q, lse = self.q[row], self.lse[row]
        return q.reshape(num_kv_heads, -1, dim), lse.reshape(num_kv_heads, -1)

    def _weights(self, q: Tensor, lse: Tensor, keys: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., M, N] softmax weights of q [..., M, D] over keys [..., N, D]."""
        logits = logits_of(q, keys, scale=self.scale, softcap=self.softcap)
        if bias is not None:
            logits += bias[..., None, :]
        return logits.sub_(lse[..., None]).exp_()
