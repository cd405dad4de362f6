"""Matrices as GPTQ, AWQ and compressed-tensors store them, and the engine's blocks of them.

All three store whole numbers of 4 or 8 bits, several of them in a word of 32 bits, the first in the
lowest bits, and a scale and a zero for each group of inputs. A weight is scale * (number - zero).

    gptq                 qweight [K / 8, N], qzeros [G, N / 8], scales [G, N], g_idx [K]
    awq                  qweight [K, N / 8], qzeros [G, N / 8], scales [G, N]
    compressed-tensors   weight_packed [N, K / 8], weight_scale [N, G],
                         weight_zero_point [N / 8, G], weight_g_idx [K]

for 4 bits, N outputs, K inputs and G groups. Words of awq hold 8 outputs in an order of their own.
Zeros of gptq are stored less one, unless they are of its version 2. g_idx says which group an input
belongs to: inputs are then put into an order in which groups are whole blocks.

Blocks have a scale for 32 inputs. Where all zeros are the middle of the range, Q4_0 and Q8_0 hold
the same numbers. Others of 4 bits are Q4_1, whose least value, -zero * scale, is rounded to 16
bits: an error of at most .0074 scales, where rounding to 4 bits has .5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid_kv.ops.native.linear import PACKED_KINDS

_BLOCK = 32
_WORD_BITS = 32
_PIECE = 2**20
"""Values that are brought into another layout at a time, so that what is between lies in caches."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""By output, which field of a word holds it."""


class UnfitError(ValueError):
    """A checkpoint, or a matrix, has no blocks: the rest of a sentence that begins with it."""


class StoredForm(NamedTuple):
    """The tensors of a matrix by a method: their names, after the module's.

    numbers, scales: those that there must be. zeros: of the methods that have some; whether there
    must be any says `needs_zeros`. groups: the group of each input.
    """

    numbers: str
    scales: str
    zeros: str
    groups: str
    needs_zeros: bool

    @property
    def names(self) -> tuple[str, ...]:
        return self.numbers, self.scales, self.zeros, self.groups


FORMS: Mapping[str, StoredForm] = MappingProxyType(
    {
        "gptq": StoredForm("qweight", "scales", "qzeros", "g_idx", True),
        "awq": StoredForm("qweight", "scales", "qzeros", "g_idx", True),
        "compressed-tensors": StoredForm(
            "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", False
        ),
    }
)
"""By method."""


def _kind(bits: int, *, centred: bool) -> str:
    return ("Q4_0" if centred else "Q4_1") if bits == 4 else "Q8_0"


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """A checkpoint's way of storing its matrices.

    bits: 4 or 8. group: inputs of a group; 0 where a row has one scale. centred: zeros are said to
    be the middle of the range. less_one: zeros are stored less one.
    """

    method: str
    bits: int
    group: int
    centred: bool
    less_one: bool = False

    @property
    def form(self) -> StoredForm:
        return FORMS[self.method]

    @property
    def kind(self) -> str:
        """The kind of blocks that such matrices come to."""
        return _kind(self.bits, centred=self.centred)

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a matrix's tensors, by name; those that may be missing as well."""
        form, fields = self.form, _WORD_BITS // self.bits
        groups = -(-columns // self.group) if self.group else 1
        packed_rows, packed_columns = -(-rows // fields), -(-columns // fields)
        if self.method == "compressed-tensors":
            shapes = (rows, packed_columns), (rows, groups), (packed_rows, groups)
        else:
            numbers = (columns, packed_rows) if self.method == "awq" else (packed_columns, rows)
            shapes = numbers, (groups, rows), (groups, packed_rows)
        return dict(zip(form.names, (*shapes, (columns,)), strict=True))


def stored_layout(told: Mapping[str, Any]) -> StoredLayout:
    """The layout that a checkpoint's quantization_config tells of.

    Raises:
        UnfitError: the engine has no blocks for it; the rest of a sentence about the checkpoint.
    """
    method = str(told.get("quant_method"))
    if method == "compressed-tensors":
        return _compressed(told)
    bits = _bits(told.get("bits"), (4,) if method == "awq" else (4, 8))
    version = told.get("checkpoint_format") or told.get("format") or told.get("version")
    version = str(version or ("gptq" if method == "gptq" else "gemm")).lower()
    if version not in (("gptq", "gptq_v2") if method == "gptq" else ("gemm",)):
        raise UnfitError(f"in its form '{version}'")
    if told.get("pack_dtype", "int32") != "int32":
        raise UnfitError(f"in words of {told['pack_dtype']}")
    centred = method == "gptq" and bool(told.get("sym", True))
    group = _group(told.get("group_size"))
    return StoredLayout(method, bits, group, centred, version == "gptq")


def _compressed(told: Mapping[str, Any]) -> StoredLayout:
    groups = list((told.get("config_groups") or {}).values())
    if told.get("format") != "pack-quantized":
        raise UnfitError(f"in its form '{told.get('format')}'")
    schemes = [group.get("weights") or {} for group in groups]
    if any(group.get("input_activations") for group in groups):
        raise UnfitError("with activations in fewer bits")
    layouts = {(one.get("num_bits"), _group(one.get("group_size"))) for one in schemes}
    if len(layouts) != 1:
        raise UnfitError(f"in {len(layouts)} layouts at once")
    if any(one.get("type", "int") != "int" for one in schemes):
        raise UnfitError(f"in numbers of type '{schemes[0].get('type')}'")
    if any(one.get("strategy") not in ("group", "channel", None) for one in schemes):
        raise UnfitError(f"by the strategy '{schemes[0].get('strategy')}'")
    ((bits, group),) = layouts
    centred = all(bool(one.get("symmetric", True)) for one in schemes)
    return StoredLayout("compressed-tensors", _bits(bits, (4, 8)), group, centred)


def _bits(bits: Any, known: tuple[int, ...]) -> int:
    if bits not in known:
        raise UnfitError(f"in {bits} bits")
    return int(bits)


def _group(size: Any) -> int:
    """Inputs of a group; 0 for all of a row.

    Raises:
        UnfitError: they are no whole blocks.
    """
    if size in (None, -1):
        return 0
    if not isinstance(size, int) or size <= 0 or size % _BLOCK:
        raise UnfitError(f"in groups of {size} inputs, no multiple of {_BLOCK}")
    return size


# Numbers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """A matrix in whole numbers.

    numbers: from a slice of rows, whose ends are multiples of 8, to uint8 [n, K].
    scales: [N, G], a floating dtype. zeros: [N, G], whole. groups: [K], the group of each input.
    """

    numbers: Callable[[slice], Tensor]
    scales: Tensor
    zeros: Tensor
    groups: Tensor
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return len(self.scales), len(self.groups)

    def kind(self) -> str:
        """The kind of blocks that holds it.

        Raises:
            UnfitError: there is none.
        """
        centred = bool((self.zeros == 1 << (self.bits - 1)).all())
        if self.bits == 8 and not centred:
            raise UnfitError("has zeros of 8 bits, and blocks of 8 bits have none")
        return _kind(self.bits, centred=centred)

    def order(self) -> Tensor | None:
        """The input of each column of blocks, int64 [K]; None where they are in order.

        Raises:
            UnfitError: a block would have inputs of several groups.
        """
        order, groups = None, self._checked_groups()
        if bool((groups.diff() < 0).any()):
            order = groups.argsort(stable=True)
            groups = groups[order]
        blocks = groups.view(-1, _BLOCK)
        if bool((blocks != blocks[:, :1]).any()):
            raise UnfitError(f"has groups that are no multiples of {_BLOCK} inputs")
        return order

    def blocks(
        self, kind: str | None = None, out: Tensor | None = None
    ) -> tuple[str, Tensor, Tensor | None]:
        """Kind, blocks as uint8 [N, bytes of a row] and order of its columns.

        Args:
            kind: to be made: that of `kind`, which None stands for, or Q4_1 in place of Q4_0.
            out: where they go; None for memory of their own.

        Raises:
            UnfitError: it has none.
        """
        kind, order = kind or self.kind(), self.order()
        rows, columns = self.shape
        groups = (self.groups if order is None else self.groups[order])[::_BLOCK]
        ends = [self.scales.half()]
        if kind == "Q4_1":
            ends.append((-self.scales.float() * self.zeros).half())
        if not all(bool(end.isfinite().all()) for end in ends):
            raise UnfitError("has scales that 16 bits cannot hold")
        if out is None:
            out = torch.empty(rows, PACKED_KINDS[kind].row_bytes(columns), dtype=torch.uint8)
        blocks = out.view(rows, -1, PACKED_KINDS[kind].bytes)
        for piece in _pieces(rows, columns):
            numbers, target = self.numbers(piece), blocks[piece]
            halves = target.view(torch.float16)
            if order is not None:
                numbers = numbers.index_select(1, order)
            for place, end in enumerate(ends):
                halves[..., place] = end[piece].index_select(1, groups)
            body = target[..., 2 * len(ends) :]
            if kind == "Q8_0":
                body[:] = (numbers ^ 128).view(body.shape)
            else:
                low, high = numbers.view(*body.shape[:2], 2, _BLOCK // 2).unbind(2)
                body[:] = low | high << 4
        return kind, out, order

    def values(self, out: Tensor) -> Tensor:
        """The weights [N, K], computed in float32 and rounded once to `out`.

        Raises:
            UnfitError: an input belongs to no group.
        """
        groups = self._checked_groups()
        for piece in _pieces(*self.shape):
            zeros = self.zeros[piece].index_select(1, groups)
            scales = self.scales[piece].float().index_select(1, groups)
            out[piece] = (self.numbers(piece).float() - zeros) * scales
        return out

    def _checked_groups(self) -> Tensor:
        groups, count = self.groups, self.scales.shape[1]
        if bool((groups < 0).any()) or bool((groups >= count).any()):
            raise UnfitError(f"has inputs of groups beyond its {count}")
        return groups


def read_codes(
    layout: StoredLayout, tensors: Mapping[str, Tensor], rows: int, columns: int
) -> StoredCodes:
    """The matrix in tensors of the shapes that `StoredLayout.shapes` gives.

    Args:
        tensors: by name, on the host; without zeros and groups where there are none.
    """
    form, bits = layout.form, layout.bits
    words, scales = tensors[form.numbers], tensors[form.scales]
    zeros, groups = tensors.get(form.zeros), tensors.get(form.groups)
    if layout.method == "compressed-tensors":
        packed = words

        def numbers(piece: slice) -> Tensor:
            return _fields(packed[piece], bits)[:, :columns]

        zeros = None if zeros is None else _fields(zeros.t(), bits)[:, :rows].t()
    else:
        scales = scales.t()
        if layout.method == "awq":
            order = torch.tensor(_AWQ_ORDER)

            def numbers(piece: slice) -> Tensor:
                some = slice(piece.start // 8, -(-piece.stop // 8))
                return _reordered(_fields(words[:, some], bits), order).t()

            assert zeros is not None
            zeros = _reordered(_fields(zeros, bits), order).t()
        else:

            def numbers(piece: slice) -> Tensor:
                return _fields(words[:, piece].t(), bits)

            assert zeros is not None
            # With a carry from field to field, as the subtraction had it that gptqmodel made.
            one = sum(1 << shift for shift in range(0, _WORD_BITS, bits))
            zeros = _fields(zeros + one if layout.less_one else zeros, bits).t()
    if zeros is None:
        zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8)
    if groups is None or bool((groups == -1).all()):  # -1: compressed-tensors' word for none
        groups = torch.arange(columns) // (layout.group or columns)
    return StoredCodes(numbers, scales, zeros, groups.long(), bits)


def _pieces(rows: int, columns: int) -> list[slice]:
    """Slices of rows, each from a multiple of 8 on."""
    size = max(1, _PIECE // columns // 8) * 8
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _fields(words: Tensor, bits: int) -> Tensor:
    """Numbers [n, w * 32 / bits] in uint8 of words [n, w] in int32."""
    numbers = words.contiguous().view(torch.uint8)
    if bits == 8:
        return numbers
    return torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2)


def _reordered(numbers: Tensor, order: Tensor) -> Tensor:
    """Columns of each 8 in another order."""
    rows, columns = numbers.shape
    return numbers.view(rows, columns // 8, 8).index_select(2, order).view(rows, columns)
