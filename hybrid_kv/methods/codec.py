"""Methods that lose no entry and keep offloaded ones in fewer bytes: base classes, and codes.

Keys may be coded as they were before RoPE, where channels and heads are more alike by token. Codes
of 2 or 4 bits lie between the least and the most of their group, packed in bytes. Those of 4 bits
may lie in two planes: all entries have the upper one, some the lower one too.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor

from hybrid_kv.config import Params as BaseParams
from hybrid_kv.config import Tokens
from hybrid_kv.entries import Entries
from hybrid_kv.errors import ConfigError
from hybrid_kv.plugins import Method, Placement
from hybrid_kv.ragged import Ragged
from hybrid_kv.rotary import UNKNOWN, Rotary
from hybrid_kv.types import Demotion, Evidence, ModelInfo, Needs, Read


def encode(x: Tensor, bits: int, group_size: int, *, axis: int) -> tuple[Tensor, Tensor]:
    """Codes of x [..., N, D]; code c stands for zero + c * scale of its group.

    Args:
        axis: -2 for groups of consecutive rows, each column by itself; -1 for groups of consecutive
            columns, each row by itself. The last group may be smaller.

    Returns:
        codes [..., N, ceil(D * bits / 8)] uint8; scale and zero of every group, in the dtype of x,
        by which the codes were chosen: [..., ceil(N / group_size), 2, D] or [..., N, 2,
        ceil(D / group_size)].
    """
    rows = x if axis == -2 else x.transpose(-1, -2)
    count, most = rows.shape[-2], 2**bits - 1
    groups = -(-count // group_size)
    # Filled up with the last row, which changes neither minimum nor maximum.
    ids = torch.arange(groups * group_size, device=x.device).clamp_max(count - 1)
    members = rows.index_select(-2, ids).unflatten(-2, (groups, group_size)).float()
    zero = members.amin(-2).to(x.dtype)
    scale = ((members.amax(-2) - zero.float()) / most).to(x.dtype)
    steps = (members - zero.float()[..., None, :]) / scale.float().clamp_min(1e-30)[..., None, :]
    codes = steps.round_().clamp_(0, most).to(torch.uint8).flatten(-3, -2)[..., :count, :]
    if axis == -2:
        return pack(codes, bits), torch.stack([scale, zero], -2)
    by_row = torch.stack([scale, zero], -2).movedim(-1, -3)
    return pack(codes.transpose(-1, -2), bits), by_row.transpose(-1, -2)


def decode(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Numbers [..., D] of codes [..., ceil(D * bits / 8)], by scale and zero [..., 2, D]."""
    scale, zero = scales.float().unbind(-2)
    steps = unpack(codes, bits, scale.shape[-1]).float()
    return torch.addcmul(zero, steps, scale).to(scales.dtype)


def pack(codes: Tensor, bits: int) -> Tensor:
    """[..., ceil(D * bits / 8)] uint8 of codes [..., D], the first in a byte's lowest bits."""
    each = 8 // bits
    filled = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % each)).unflatten(-1, (-1, each))
    packed: Tensor = filled[..., 0].clone()
    for place in range(1, each):
        packed |= filled[..., place] << (place * bits)
    return packed


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The codes [..., count] uint8 that `pack` was given."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes = torch.bitwise_right_shift(packed[..., None], shifts)
    return torch.bitwise_and(codes, 2**bits - 1).flatten(-2)[..., :count]


Kept: TypeAlias = Entries | None
Seen: TypeAlias = Evidence | None


class CodecParams(BaseParams):
    """sink_tokens, window_tokens: kept as they came, at start and end; multiples of page_size."""

    sink_tokens: Tokens = 0
    window_tokens: Tokens = 128


class Codec(Method):
    """Attends everything; what leaves the window is coded once and decoded in every step.

    lossless: the parameter, and its value, that loses nothing.

    Kept: every entry: sinks and window as they came, all others as codes.
    Lost: precision; no entry.
    """

    lossless: ClassVar[tuple[str, object]]

    @abstractmethod
    def code(self, k: Tensor, v: Tensor, at: Tensor, kept: Kept, seen: Seen) -> Entries:
        """Entries that hold codes of k, v [Hkv, n, D], at positions [n].

        Args:
            kept: the earlier ones, which these shall extend; `tables` are those of both.
            seen: at the prompt's end.
        """

    def absorb(self, layer_idx: int, row: int, kept: Kept, left: Entries, seen: Seen) -> Entries:
        k, v = (torch.stack(left.split(name)) for name in ("k", "v"))
        new = self.code(k, v, left.split("positions")[0], kept, seen)
        return kept.extended(new).with_tables(**new.tables) if kept else new

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        return Placement(self.params.sink_tokens, self.params.window_tokens, rest=Demotion.ABSORB)

    def read(self, layer_idx: int, q: Tensor) -> Read:
        return Read()

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        return params.model_copy(update=dict([cls.lossless]))

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        return params


class LearnedCodec(Codec):
    """A codec that learns from the first entries that leave the window; before, it keeps none."""

    def absorb(self, layer_idx: int, row: int, kept: Kept, left: Entries, seen: Seen) -> Entries:
        if not left.lengths[0]:
            return kept or Entries.empty(left)
        old = kept if kept and kept.lengths[0] else None
        return self.absorb_some(layer_idx, old, left, seen)

    def absorb_some(self, layer_idx: int, kept: Kept, left: Entries, seen: Seen) -> Entries:
        """As `absorb`, where something leaves; `kept` is None before."""
        return super().absorb(layer_idx, 0, kept, left, seen)


@dataclass(frozen=True, eq=False, kw_only=True)
class TurnedEntries(Entries):
    """Codes of keys that were turned back to position 0; `read` turns them to their positions.

    rotary: UNKNOWN where the model's could not be asked; then keys are coded as they are.
    """

    rotary: Rotary = UNKNOWN

    def decoded(self) -> tuple[Tensor, Tensor]:
        """Keys before RoPE, float32, and values, [capacity, D]."""
        raise NotImplementedError

    def read(self) -> tuple[Tensor, Tensor]:
        k, v = self.decoded()
        return self.rotary.turn(k, self.positions).to(v.dtype), v


class TurnedCodec(LearnedCodec):
    """Hands keys to `code` as they were before RoPE, in float32.

    `code` returns TurnedEntries, or plain ones of the keys as they came where nothing is lost.
    """

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(rotary=True)

    def open(self, info: ModelInfo) -> None:
        self._rotary = {shape.layer_idx: info.rotary_of(shape.layer_idx) for shape in info.layers}

    def absorb_some(self, layer_idx: int, kept: Kept, left: Entries, seen: Seen) -> Entries:
        name, value = self.lossless
        if getattr(self.params, name) == value:
            return kept.extended(left) if kept else left.copied()
        rotary = self._rotary[layer_idx]
        k, v = (torch.stack(left.split(column)) for column in ("k", "v"))
        at = left.split("positions")[0]
        new = self.code(rotary.turn(k.float(), -at), v, at, kept, seen)
        if isinstance(new, TurnedEntries):
            new = replace(new, rotary=rotary)
        return kept.extended(new).with_tables(**new.tables) if kept else new


_BITS, _MOST = 2, 15

_MIDDLE = 1.5
"""Value of a lower plane that is not there: the mean of 0, 1, 2 and 3."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PlaneEntries(Entries):
    """k, v: upper planes. k_scale, v_scale: [2], scale and zero of a row; fine: row of table
    "fine", the lower planes, or -1. Of keys by channel group, row of table "k", [2, D], stands for
    k_scale. State: `sizes` [Hkv, 2, D], by which channels were divided; `like` [0], whose dtype the
    numbers have.
    """

    def read(self) -> tuple[Tensor, Tensor]:
        parts = [self._decoded(n, name) for n, name in enumerate("kv")]
        return parts[0], parts[1]

    def _decoded(self, number: int, name: str) -> Tensor:
        sizes, fine = self.state["sizes"][:, number], self.columns["fine"]
        dim, lower = sizes.shape[-1], self.tables["fine"].columns[name]
        codes = 4 * unpack(self.columns[name], _BITS, dim).float()
        if len(lower):
            # Rows in room for growing may be somebody else's, with numbers of his table.
            low = unpack(lower[fine.clamp(0, len(lower) - 1)], _BITS, dim).float()
            codes += torch.where(fine[:, None] < 0, _MIDDLE, low)
        else:
            codes += _MIDDLE
        scale, zero = self._scales(name)
        rows = codes * scale + zero
        for head, by in zip(self.split(rows), sizes, strict=True):
            head.mul_(by)
        whole: Tensor = rows.to(self.state["like"].dtype)
        return whole

    def _scales(self, name: str) -> tuple[Tensor, Tensor]:
        """Scale and zero, both [n, 1], or [n, D] by channel."""
        if f"{name}_scale" in self.columns:
            scale, zero = self.columns[f"{name}_scale"].float().split(1, -1)
            return scale, zero
        table = self.tables[name].columns["scales"].float()
        scale, zero = table[self.columns["group"].clamp_max(len(table) - 1)].unbind(1)
        return scale, zero

    @classmethod
    def coded(
        cls,
        k: Tensor,
        v: Tensor,
        at: Tensor,
        sizes: Tensor,
        fine: Tensor | None,
        kept: Entries | None,
        *,
        keys_by_channel: bool = False,
    ) -> Self:
        """Codes of k, v [Hkv, n, D] at [n].

        Args:
            fine: [Hkv, F] int64 ascending, which of them have a lower plane; None for all.
            keys_by_channel: a channel of these keys has one scale, not a token.
        """
        columns: dict[str, Tensor] = {}
        tables: dict[str, Ragged] = {}
        upper, lower = [], {}
        for number, (name, rows) in enumerate((("k", k), ("v", v))):
            even = rows.float() / sizes[:, None, number]
            by_channel = keys_by_channel and name == "k"
            axis = -2 if by_channel else -1
            zero = even.amin(axis, keepdim=True).to(v.dtype)
            step = ((even.amax(axis, keepdim=True) - zero.float()) / _MOST).to(v.dtype)
            codes = ((even - zero.float()) / step.float().clamp_min(1e-20)).round().clamp(0, _MOST)
            codes = codes.to(torch.uint8)
            upper.append(pack(codes // 4, _BITS))
            low = pack(codes % 4, _BITS)
            lower[name] = (low if fine is None else _rows_at(low, fine)).flatten(0, 1)
            scales = torch.cat([step, zero], axis)
            if by_channel:  # [Hkv, 2, D]
                first, tables[name] = _grown(kept, name, {"scales": scales})
                group = torch.arange(first, first + len(k), dtype=torch.int32, device=k.device)
                columns["group"] = group[:, None].expand(k.shape[:2])
            else:
                columns[f"{name}_scale"] = scales
        first, tables["fine"] = _grown(kept, "fine", lower)
        shape = k.shape[:2] if fine is None else fine.shape
        numbers = torch.arange(shape.numel(), dtype=torch.int32, device=k.device)
        numbers = numbers.view(shape) + first
        if fine is not None:
            numbers = numbers.new_full(k.shape[:2], -1).scatter_(1, fine, numbers)
        columns["fine"] = numbers
        state = {"sizes": sizes, "like": v.new_zeros(0)}
        new = cls.of(upper[0], upper[1], at, state=state, **columns)
        return replace(new, tables=tables)


def _rows_at(rows: Tensor, ids: Tensor) -> Tensor:
    """[Hkv, F, B] of rows [Hkv, n, B] at ids [Hkv, F]."""
    return rows.gather(1, ids[..., None].expand(-1, -1, rows.shape[-1]))


def _grown(kept: Entries | None, name: str, rows: dict[str, Tensor]) -> tuple[int, Ragged]:
    """Table `name` of what is kept with these rows behind it, and the number of the first."""
    new = Ragged(columns=rows, starts=(0,), lengths=(len(next(iter(rows.values()))),))
    if kept is None:
        return 0, new.copied()
    old = kept.tables[name]
    return old.lengths[0], old.extended(new)


def channel_sizes(k: Tensor, v: Tensor) -> Tensor:
    """[Hkv, 2, D] float32: the square root of every channel's largest size; 1 where it is 0."""
    largest = torch.stack([k, v], 1).float().abs().amax(2)
    return torch.where(largest > 0, largest.sqrt(), 1.0)


def count_of(ratio: float, dim: int) -> int:
    """Outliers of a row of `dim` numbers."""
    return math.ceil(ratio * dim)


def outliers(rows: Tensor, ratio: float, distance: Tensor) -> tuple[Tensor, Tensor]:
    """Places and values of the numbers of a row [..., D] that have the largest distance.

    Returns:
        places [..., m] int16 and numbers [..., m] in the dtype of rows, m = ceil(ratio * D).
    """
    if rows.shape[-1] > torch.iinfo(torch.int16).max:
        raise ConfigError(f"head_dim must be below 32768 for outliers, got {rows.shape[-1]}")
    places = distance.topk(count_of(ratio, rows.shape[-1])).indices
    return places.to(torch.int16), rows.gather(-1, places)


def put_back(rows: Tensor, places: Tensor, numbers: Tensor) -> Tensor:
    """Rows [..., D] with the outliers in their places."""
    return rows.scatter(-1, places.long(), numbers.to(rows.dtype))
