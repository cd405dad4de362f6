"""Codes of the sketch of a head's keys, for the engine and for its portable twin.

A sketch holds short codes of keys in the metric of the queries. A key k becomes codes
u = clip(round(A k - key_offset + zero), 0, 2^bits - 1) with zero = (2^bits - 1) / 2, and a query q
becomes x = B q, so that q . k ~ sum_j x_j (u_j - zero_j) up to a term that all keys share.

Keys lie in blocks of 16, a block in lines of 64 bytes that hold 4 bytes of each key. A byte is one
code of 8 bits, or codes of several quads of 4 dims, the first quad of the line in its lowest bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, NonFiniteError, ShapeError
from hybrid_kv.ops.host_memory import host_array

BLOCK_KEYS = 16
LINE_BYTES = 64
MAX_DIMS = 256
"""Products of so many codes of 8 bits are exact in float32."""
_QUAD = 4
_MIN_CAPACITY = 256


@dataclass(frozen=True, slots=True)
class SketchPlan:
    """Plan of a code, its dims by their bits: ((num_dims, bits), ...), most bits first.

    bits are 8, 4 or 2, each at most once; the dims of a group fill lines: 4, 8 or 16 each.

    Raises:
        ConfigError: the groups are not that.
    """

    groups: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        bits = [bits for _, bits in self.groups]
        if not bits or bits != sorted(set(bits), reverse=True) or not {*bits} <= {8, 4, 2}:
            raise ConfigError(
                f"groups of a sketch plan must have 8, 4, 2 bits in that order, got {self.groups}"
            )
        for num_dims, bits_of_dim in self.groups:
            if num_dims < 1 or num_dims % dims_per_line(bits_of_dim):
                raise ConfigError(
                    f"{bits_of_dim}-bit dims of a sketch plan come in multiples of "
                    f"{dims_per_line(bits_of_dim)}, got {num_dims}"
                )
        if self.num_dims > MAX_DIMS:
            raise ConfigError(f"a sketch plan has at most {MAX_DIMS} dims, got {self.num_dims}")

    @property
    def num_dims(self) -> int:
        """Dims of a code."""
        return sum(num_dims for num_dims, _ in self.groups)

    @property
    def code_bytes(self) -> int:
        """Bytes of a code; 16 of them make a block."""
        return sum(num_dims * bits for num_dims, bits in self.groups) // 8

    @property
    def num_lines(self) -> int:
        """Lines of a block."""
        return self.code_bytes // _QUAD

    def lines_of(self, bits: int) -> int:
        """Lines of a block that hold codes of so many bits."""
        return sum(dims // dims_per_line(bits) for dims, own in self.groups if own == bits)

    @property
    def tops(self) -> Tensor:
        """[num_dims] float32, the largest code of each dim, 2^bits - 1."""
        return torch.cat([torch.full((dims,), 2.0**bits - 1) for dims, bits in self.groups])

    @property
    def zeros(self) -> Tensor:
        """[num_dims] float32, the code that stands for 0 in each dim; between two of them."""
        return self.tops / 2

    def __str__(self) -> str:
        parts = " + ".join(f"{num_dims}x{bits}" for num_dims, bits in self.groups)
        return f"{self.code_bytes} B ({parts})"


def blocks_of(rows: Tensor) -> Tensor:
    """Codes [n, B] uint8, a row for each key, as blocks [ceil(n / 16), lines, 64]."""
    count, code_bytes = rows.shape
    blocks = rows.new_zeros(-(-count // BLOCK_KEYS), BLOCK_KEYS, code_bytes)
    blocks.flatten(0, 1)[:count] = rows
    count_of_lines = code_bytes // _QUAD
    return blocks.view(-1, BLOCK_KEYS, count_of_lines, _QUAD).transpose(1, 2).flatten(2)


def rows_of(blocks: Tensor, count: int) -> Tensor:
    """Rows that `blocks_of` made blocks of: codes [count, B] uint8."""
    keys = blocks.view(*blocks.shape[:2], BLOCK_KEYS, _QUAD).transpose(1, 2)
    return keys.flatten(2).flatten(0, 1)[:count]


def dims_per_line(bits: int) -> int:
    """Dims of every key that one line holds."""
    return _QUAD * (8 // bits)


@dataclass(frozen=True, eq=False)
class SketchMap:
    """Map by which keys and queries of D channels become codes of d dims.

    key_map, query_map: [d, D] float32, A and B of this module's text; centring, rotation and steps
    are folded in.
    key_offset: [d] float32.

    Raises:
        ShapeError: they do not fit the plan or each other.
        ConfigError: they are not float32 on the host.
        NonFiniteError: they hold NaN or infinity.
    """

    plan: SketchPlan
    key_map: Tensor
    key_offset: Tensor
    query_map: Tensor

    def __post_init__(self) -> None:
        dims, shape = self.plan.num_dims, list(self.key_map.shape)
        for name, expected in (
            ("key_map", [dims, *shape[1:2]]),
            ("key_offset", [dims]),
            ("query_map", [dims, *shape[1:2]]),
        ):
            array = getattr(self, name)
            if list(array.shape) != expected or len(shape) != 2:
                raise ShapeError(
                    f"{name} must be {expected} for a plan of {self.plan}, got {list(array.shape)}"
                )
            if array.dtype != torch.float32 or array.device.type != "cpu":
                raise ConfigError(
                    f"{name} must be float32 on the host, got {array.dtype} on {array.device}"
                )
            if not bool(torch.isfinite(array).all()):
                raise NonFiniteError(f"{name} holds NaN or infinity; check the samples")

    @property
    def head_dim(self) -> int:
        """D, channels of a key."""
        return self.key_map.shape[1]

    @cached_property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Key and query map as [D, room] and the start of the codes [room], room whole vectors.

        A code starts at zero - key_offset, and products are added in the order of the channels.
        """
        dims, room = self.plan.num_dims, -(-self.plan.num_dims // BLOCK_KEYS) * BLOCK_KEYS
        start = host_array([room], torch.float32).zero_()
        torch.sub(self.plan.zeros, self.key_offset, out=start[:dims])
        maps = []
        for rows in (self.key_map, self.query_map):
            columns = host_array([self.head_dim, room], torch.float32).zero_()
            columns[:, :dims] = rows.T
            maps.append(columns)
        return maps[0], maps[1], start

    @property
    def nbytes(self) -> int:
        """Bytes of the maps as searches read them."""
        return sum(array.nbytes for array in self.columns)


class SketchTier(ABC):
    """Codes of some keys of one head, made by one map, with room to grow.

    Args:
        sketch_map: how they are made.
        with_ids: the tier holds some rows of the keys, whose numbers it keeps; else all in order.

    count: keys held.
    """

    def __init__(self, sketch_map: SketchMap, *, with_ids: bool) -> None:
        self.map, self.with_ids = sketch_map, with_ids
        self.count = self._capacity = 0
        self._allocate(_MIN_CAPACITY)

    @property
    def codes(self) -> Tensor:
        """[blocks, lines, 64] uint8, those of the last block beyond `count` undefined."""
        return self._codes[: -(-self.count // BLOCK_KEYS)]

    @property
    def ids(self) -> Tensor | None:
        """[count] int32 rows of the keys, ascending; None where they are all rows in order."""
        return self._ids[: self.count] if self.with_ids else None

    def append(self, keys: Tensor, rows: Tensor | None = None) -> None:
        """Codes rows of keys [N, D] that are not held yet; they must be finite.

        Args:
            keys: float32, float16 or bfloat16, rows contiguous.
            rows: [n] int32 or int64, ascending, beyond those held; None for all from `count` on,
                in a tier without ids.

        Raises:
            ShapeError: keys or rows do not fit.
            ConfigError: keys or rows have a dtype that cannot be read.
            NonFiniteError: a row holds NaN or infinity; nothing is appended.
        """
        ids = self._rows_to_append(keys, rows)
        if not len(ids):
            return
        count = self.count + len(ids)
        self._reserve(count)
        self._encode(keys, ids)
        if self.with_ids:
            self._ids[self.count : count] = ids
        self.count = count

    @classmethod
    def restore(
        cls, sketch_map: SketchMap, codes: Tensor, ids: Tensor | None, count: int, **options: Any
    ) -> Self:
        """A tier with codes that were made by the same map before.

        Args:
            codes, ids: as the properties; ids makes a tier with_ids.
            options: as the constructor takes them.

        Raises:
            ShapeError: they are of other sizes or types.
            ConfigError: ids do not ascend from 0 on.
        """
        shape = [-(-count // BLOCK_KEYS), sketch_map.plan.num_lines, LINE_BYTES]
        if list(codes.shape) != shape or codes.dtype != torch.uint8 or count < 0:
            raise ShapeError(
                f"codes must be {shape} uint8 for {count} keys, got {list(codes.shape)} "
                f"{codes.dtype}"
            )
        if ids is not None and (list(ids.shape) != [count] or ids.dtype != torch.int32):
            raise ShapeError(f"ids must be [{count}] int32, got {list(ids.shape)} {ids.dtype}")
        if ids is not None and count:
            _check_ascending(ids, 0, 2**31)
        tier = cls(sketch_map, with_ids=ids is not None, **options)
        tier._reserve(count)
        tier._codes[: len(codes)] = codes
        if ids is not None:
            tier._ids[:count] = ids
        tier.count = count
        return tier

    @property
    def memory_bytes(self) -> int:
        """Bytes in use, without reserved room and without the map."""
        return self.codes.nbytes + (4 * self.count if self.with_ids else 0)

    @abstractmethod
    def _encode(self, keys: Tensor, rows: Tensor) -> None:
        """Writes the codes of rows [n] int32 from place `count` on; raises NonFiniteError."""

    def _rows_to_append(self, keys: Tensor, rows: Tensor | None) -> Tensor:
        if keys.dim() != 2 or keys.shape[1] != self.map.head_dim:
            raise ShapeError(f"keys must be [N, {self.map.head_dim}], got {list(keys.shape)}")
        if (rows is not None) != self.with_ids:
            raise ConfigError("rows must be given for a tier with ids, and for no other")
        if rows is None:
            if len(keys) < self.count:
                raise ShapeError(
                    f"keys must hold the {self.count} known rows first, got {len(keys)} rows"
                )
            return torch.arange(self.count, len(keys), dtype=torch.int32)
        if rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64):
            raise ShapeError(
                f"rows must be [n] int32 or int64, got {list(rows.shape)} {rows.dtype}"
            )
        if len(rows):
            first = int(self._ids[self.count - 1]) + 1 if self.count else 0
            _check_ascending(rows, first, len(keys))
        return rows.to(torch.int32)

    def _reserve(self, count: int) -> None:
        if count <= self._capacity:
            return
        old_codes, old_ids = self.codes, self._ids[: self.count]
        self._allocate(max(count, 2 * self._capacity) if self.count else count)
        self._codes[: len(old_codes)] = old_codes
        self._ids[: len(old_ids)] = old_ids

    def _allocate(self, capacity: int) -> None:
        self._capacity = _generous(capacity)
        blocks = self._capacity // BLOCK_KEYS
        self._codes = host_array([blocks, self.map.plan.num_lines, LINE_BYTES], torch.uint8)
        self._ids = host_array([self._capacity if self.with_ids else 0], torch.int32)


def pack_tiers(tiers: Iterable[SketchTier]) -> None:
    """Moves the codes of many tiers into one array, with room for each to grow by a quarter.

    A tier alone is often smaller than a huge page, and small pages slow a scan down. One that grows
    beyond its room moves out; the array lives as long as any tier in it.
    """
    tiers = list(tiers)
    for tier in tiers:
        tier._capacity = _generous(tier.count)
    sizes = [tier._capacity * tier.map.plan.code_bytes for tier in tiers]
    array, begin = host_array([sum(sizes)], torch.uint8), 0
    for tier, size in zip(tiers, sizes, strict=True):
        own = array[begin : begin + size].view(-1, *tier._codes.shape[1:])
        own[: len(tier.codes)] = tier.codes
        ids = host_array([tier._capacity if tier.with_ids else 0], torch.int32)
        ids[: tier.count] = tier._ids[: tier.count]  # nothing where there are none
        tier._codes, tier._ids = own, ids
        begin += size


def _generous(count: int) -> int:
    """Room for so many keys and those that follow; what is not written takes no memory."""
    return -(-max(count + count // 4, _MIN_CAPACITY) // BLOCK_KEYS) * BLOCK_KEYS


def _check_ascending(rows: Tensor, first: int, limit: int) -> None:
    if not (first <= int(rows[0]) and int(rows[-1]) < limit and bool((rows.diff() > 0).all())):
        raise ConfigError(
            f"rows of a tier must ascend within {first}..{limit - 1}, got {int(rows[0])}.."
            f"{int(rows[-1])}"
        )


def check_heads(keys: Sequence[Tensor], tiers: Sequence[Sequence[SketchTier]]) -> list[int]:
    """Checks that tiers of each head can be searched over its keys [N, D].

    Returns:
        Rows of each head up to the last one that a tier holds.

    Raises:
        ShapeError: they are of other sizes.
    """
    if len(keys) != len(tiers):
        raise ShapeError(f"tiers must be given for each of {len(keys)} heads, got {len(tiers)}")
    last_rows = []
    for rows, own in zip(keys, tiers, strict=True):
        last_rows.append(max(map(_num_rows, own), default=0))
        if rows.dim() != 2 or rows.shape[1] != keys[0].shape[1]:
            raise ShapeError(
                f"keys must be [N, D] with one D for all heads, got {list(rows.shape)} and "
                f"{list(keys[0].shape)}"
            )
        for tier in own:
            held = _num_rows(tier)
            if tier.map.head_dim != rows.shape[1] or held > len(rows):
                raise ShapeError(
                    f"a tier must hold rows of keys {list(rows.shape)}, got {held} rows of "
                    f"{tier.map.head_dim} channels"
                )
    return last_rows


def check_followed(keys: Sequence[Tensor], known: Sequence[Tensor]) -> None:
    """Checks that keys [N, D] of each head continue those that a searcher knows.

    Raises:
        ShapeError: they do not.
    """
    fits = len(keys) == len(known) and all(
        new.dim() == 2
        and new.shape[0] >= old.shape[0]
        and new.shape[1] == old.shape[1]
        and new.dtype == old.dtype
        and new.device == old.device
        and new.stride(1) == 1
        for new, old in zip(keys, known, strict=True)
    )
    if not fits:
        raise ShapeError(
            f"keys must continue those of {len(known)} heads, in rows of one shape and dtype, got "
            f"{[(list(one.shape), str(one.dtype)) for one in keys[:4]]}"
        )


def _num_rows(tier: SketchTier) -> int:
    """Rows of the keys up to the last one that the tier holds."""
    ids = tier.ids
    return tier.count if ids is None or not tier.count else int(ids[-1]) + 1


class SearchSizes(NamedTuple):
    """Candidates of each head, rows of each that are scored exactly, and the results' width."""

    candidates: list[int]
    first_exact: list[int]
    width: int


def check_search(
    queries: Tensor,
    keys: Sequence[Tensor],
    sketched: Sequence[int],
    *,
    top_k: int,
    most: int | None,
    num_rerank: Sequence[int],
    num_exact: int,
) -> SearchSizes:
    """Checks the arguments of a search; sketched is what `check_heads` returned.

    Raises:
        ShapeError, ConfigError: one does not fit.
    """
    heads, dim = len(keys), keys[0].shape[1] if keys else queries.shape[-1]
    if queries.dim() != 3 or (queries.shape[0], queries.shape[2]) != (heads, dim):
        raise ShapeError(
            f"queries must be [{heads}, M, {dim}] as the keys, got shape {list(queries.shape)}"
        )
    if queries.dtype != torch.float32 or queries.device.type != "cpu":
        raise ConfigError(
            f"queries must be float32 on the host, got {queries.dtype} on {queries.device}"
        )
    return search_sizes(
        keys, sketched, top_k=top_k, most=most, num_rerank=num_rerank, num_exact=num_exact
    )


def search_sizes(
    keys: Sequence[Tensor],
    sketched: Sequence[int],
    *,
    top_k: int,
    most: int | None,
    num_rerank: Sequence[int],
    num_exact: int,
) -> SearchSizes:
    """Sizes of a search, by `check_search` of the arguments beside the queries."""
    heads = len(keys)
    if top_k < 1:
        raise ConfigError(f"top_k must be at least 1, got {top_k}; ask for at least one key")
    if most is not None and most < top_k:
        raise ConfigError(f"most must be at least top_k {top_k}, got {most}; leave it out")
    if len(num_rerank) != heads or any(one < 0 for one in num_rerank):
        raise ConfigError(
            f"num_rerank must be {heads} numbers of at least 0, one per head, got "
            f"{list(num_rerank)}"
        )
    for rows, held in zip(keys, sketched, strict=True):
        later = rows.shape[0] - held  # len(rows) is a call of Python, for each head of a layer
        if not 0 <= num_exact <= later:
            raise ConfigError(
                f"num_exact must be 0..{later}, the newest rows of which no tier "
                f"holds any, got {num_exact}"
            )
    candidates = [max(one, top_k) for one in num_rerank]
    first_exact = [rows.shape[0] - num_exact for rows in keys]
    width = top_k if most is None else min(most, max(candidates, default=top_k) + num_exact)
    return SearchSizes(candidates, first_exact, width)
