"""Keys and values for the engine: descriptors of the caller's rows, quantised copies of them, and
the writer of tokens to pages.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_void_p
from typing import Any, Self

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.host_memory import host_array
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.bindings import (
    BLOCK_KEYS,
    LEVELS,
    KeysStruct,
    KVStruct,
    PagesStruct,
    QuantisedStruct,
)
from hybrid_kv.ops.native.library import Pool, find_engine
from hybrid_kv.types import PagedKV

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_MIN_CAPACITY = 256


def pool_handle(pool: Pool | None) -> c_void_p | None:
    """The handle of a pool; None is the calling thread alone."""
    return None if pool is None else pool.handle


def is_readable(rows: Tensor) -> bool:
    """Whether the engine can read [..., N, D] where it lies: whole rows that do not overlap."""
    *_, count, dim = rows.shape
    *_, row, element = rows.stride()
    return (dim == 1 or element == 1) and (count < 2 or row >= dim)


def scanned_bytes(dim: int) -> int:
    """Bytes of a key that is scanned in 8 bits: whole groups of four channels, and a factor."""
    return -(-dim // 4) * 4 + 4


def row_bytes(dim: int) -> int:
    """Bytes of a key in 8 bits that is read alone: whole cache lines, and the code of a factor."""
    return -(-dim // 64) * 64 + 1


def describe(name: str, rows: Tensor) -> ctypes.Array[KeysStruct]:
    """Descriptors of rows [H, N, D]; they refer to the tensor, which must outlive them.

    Raises:
        ShapeError: not [H, N, D] on the host with contiguous rows.
        ConfigError: not float32, float16 or bfloat16.
    """
    if rows.dim() != 3 or rows.device.type != "cpu" or not is_readable(rows):
        raise ShapeError(
            f"{name} must be [H, N, D] on the host with contiguous rows, got shape "
            f"{list(rows.shape)} with strides {list(rows.stride())} on {rows.device}"
        )
    if rows.dtype not in DTYPES:
        raise ConfigError(
            f"{name} must be float32, float16 or bfloat16, got {rows.dtype}; convert them first"
        )
    heads, count, dim = rows.shape
    stride = rows.stride(1) if count > 1 else dim
    address, step, dtype = rows.data_ptr(), rows.stride(0) * rows.itemsize, DTYPES[rows.dtype]
    described = (KeysStruct * heads)()
    for head in range(heads):
        described[head] = KeysStruct(address + head * step, count, stride, dim, dtype)
    return described


class QuantisedKeys:
    """Keys of all KV heads in 8 bits, see `native/include/hybrid_kv_rows.h`.

    mean, channel: [H, D] float32, taken when built and kept when rows are added.
    levels: [H, 256] float32.
    rows: [H, capacity, row_bytes] uint8 with scale_codes [H, capacity] uint8, where asked for.
    blocks: [H, capacity / 16, block_bytes] uint8, where asked for.
    structs: the engine's descriptors, which stay where they are.
    """

    def __init__(
        self,
        heads: int,
        dim: int,
        *,
        with_rows: bool = False,
        with_blocks: bool = True,
        engine: ctypes.CDLL | None = None,
    ) -> None:
        self._engine = find_engine(engine)
        self.heads, self.dim = heads, dim
        self.row_bytes = int(self._engine.hkv_row_bytes(dim))
        self.block_bytes = int(self._engine.hkv_block_bytes(dim))
        self.mean, self.channel = (host_array([heads, dim], torch.float32) for _ in range(2))
        self.levels = host_array([heads, LEVELS], torch.float32)
        self._with_rows, self._with_blocks = with_rows, with_blocks
        self.count = self.capacity = 0
        self.structs = (QuantisedStruct * heads)()
        self._reserve(0)

    def build(self, keys: Tensor, pool: Pool | None = None) -> None:
        """Quantises keys [H, N, D] with statistics of their own, in place of those held.

        Raises:
            ShapeError, ConfigError: they cannot be read.
        """
        self._take(self._engine.hkv_quantise, keys, pool, known=0)

    def append(self, keys: Tensor, pool: Pool | None = None) -> None:
        """Quantises the rows of keys [H, N, D] beyond those held, clamping what does not fit.

        Raises:
            ShapeError, ConfigError: they cannot be read, or are fewer than those held.
        """
        self._take(self._engine.hkv_quantise_append, keys, pool, known=self.count)

    def like(self, head: int, *, with_rows: bool = False, with_blocks: bool = False) -> Self:
        """No keys yet, to be quantised with the statistics of one head."""
        empty = type(self)(
            1, self.dim, with_rows=with_rows, with_blocks=with_blocks, engine=self._engine
        )
        for name in ("mean", "channel", "levels"):
            getattr(empty, name)[0] = getattr(self, name)[head]
        return empty

    def take(self, head: int, keys: Tensor) -> Self:
        """Rows of some keys [n] int64 of one head, with its statistics, in memory of their own."""
        taken = self.like(head, with_rows=True)
        taken._reserve(len(keys))
        taken.count = len(keys)
        torch.index_select(self.rows[head], 0, keys, out=taken.rows[0, : taken.count])
        torch.index_select(self.scale_codes[head], 0, keys, out=taken.scale_codes[0, : taken.count])
        taken._describe()
        return taken

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """Arrays that `structs` refer to; who keeps the one keeps the other."""
        statistics = (self.mean, self.channel, self.levels)
        return (*statistics, self.rows, self.scale_codes, self.blocks)

    @property
    def memory_bytes(self) -> int:
        """Bytes in use, without reserved room."""
        blocks = -(-self.count // BLOCK_KEYS) * self.block_bytes if self._with_blocks else 0
        rows = self.count * (self.row_bytes + 1) if self._with_rows else 0
        return self.heads * (4 * (2 * self.dim + LEVELS) + blocks + rows)

    def _take(self, function: Any, keys: Tensor, pool: Pool | None, *, known: int) -> None:
        described = describe("keys", keys)
        heads, count, dim = keys.shape
        if (heads, dim) != (self.heads, self.dim):
            raise ShapeError(
                f"keys must be [{self.heads}, N, {self.dim}], got shape {list(keys.shape)}"
            )
        if count < known:
            raise ShapeError(f"keys must hold the {known} known rows first, got {count} rows")
        self.count = known
        if count > self.capacity:
            self._reserve(count)
        handle = None if pool is None else pool.handle
        status = function(handle, heads, described, self.structs)
        if status:
            library.check(self._engine, status)
        self.count = count

    def _reserve(self, count: int) -> None:
        """Room for `count` keys and amortised growth; keeps those held."""
        if self.capacity == 0 or count > self.capacity:
            old = self._arrays() if self.count else ()
            self.capacity = max(_generous(count), 2 * self.capacity if self.count else 0)
            self._allocate()
            for new, known in zip(self._arrays(), old, strict=bool(old)):
                new[:, : known.shape[1]] = known
        self._describe()

    def _describe(self) -> None:
        statistics, stored = ("mean", "channel", "levels"), ("rows", "scale_codes", "blocks")
        for head, struct in enumerate(self.structs):
            for name in (*statistics, *stored):
                array: Tensor = getattr(self, name)
                setattr(struct, name, array[head].data_ptr() if array.numel() else None)
            struct.count, struct.capacity, struct.dim = self.count, self.capacity, self.dim

    def _allocate(self) -> None:
        def array(wanted: bool, *size: int) -> Tensor:
            return host_array([self.heads, *size] if wanted else [0], torch.uint8)

        self.rows = array(self._with_rows, self.capacity, self.row_bytes)
        self.scale_codes = array(self._with_rows, self.capacity)
        self.blocks = array(self._with_blocks, self.capacity // BLOCK_KEYS, self.block_bytes)

    def _arrays(self) -> tuple[Tensor, ...]:
        rows = (self.rows, self.scale_codes) if self._with_rows else ()
        return (*rows, self.blocks) if self._with_blocks else rows


def _generous(count: int) -> int:
    """Room for so many keys and those that follow; what is not written takes no memory."""
    return -(-max(count + count // 4, _MIN_CAPACITY) // BLOCK_KEYS) * BLOCK_KEYS


def serves(k: Tensor, v: Tensor) -> bool:
    """Whether the engine is there and reads [..., N, D], two of one dtype, where they lie."""
    if not k.is_cpu or k.dtype != v.dtype or k.dtype not in DTYPES or library.engine() is None:
        return False
    # Whole rows that do not overlap, as `is_readable` says, in the strides that every store has.
    (*_, row, step), (*_, value_row, value_step) = k.stride(), v.stride()
    if step == 1 == value_step and row >= k.shape[-1] and value_row >= v.shape[-1]:
        return True
    return is_readable(k) and is_readable(v)


def described(keys: Tensor, values: Tensor) -> KVStruct:
    """Of keys [..., H, N, D] and values [..., H, N, Dv], which must outlive it.

    Raises:
        ShapeError, ConfigError: they cannot be read or do not fit together.
    """
    *outer, count, dim = keys.shape
    *value_outer, value_count, value_dim = values.shape
    dtype = DTYPES.get(keys.dtype)
    if outer != value_outer or count != value_count or keys.dtype != values.dtype:
        raise ShapeError(
            f"values must be [{', '.join(map(str, keys.shape[:-1]))}, Dv] {keys.dtype} as the "
            f"keys, got {list(values.shape)} {values.dtype}"
        )
    if dtype is None:
        raise ConfigError(
            f"keys must be float32, float16 or bfloat16, got {keys.dtype}; convert them first"
        )
    *key_steps, key_row, key_step = keys.stride()
    *value_steps, value_row, value_step = values.stride()
    plain = key_step == 1 == value_step and key_row >= dim and value_row >= value_dim
    readable = plain or (is_readable(keys) and is_readable(values))
    if not (keys.is_cpu and values.is_cpu and readable):
        raise ShapeError(
            "keys and values must be on the host with contiguous rows, got shapes "
            f"{list(keys.shape)} and {list(values.shape)} with strides {list(keys.stride())} and "
            f"{list(values.stride())} on {keys.device} and {values.device}"
        )
    if count < 2:  # then torch gives any stride
        key_row, value_row = dim, value_dim
    return KVStruct(
        *(keys.data_ptr(), count, key_row, dim, dtype),
        *(values.data_ptr(), count, value_row, value_dim, dtype),
        *(key_steps[0], key_steps[-1], value_steps[0], value_steps[-1]),
    )


class PageWriter:
    """Appends tokens to pages, one by one.

    struct: of the engine, for who stores a token in a larger call.

    Args:
        pages: on the host, each tensor contiguous, k and v of a dtype of DTYPES; kept by reference.
        engine: another library than the one in use.

    Raises:
        BackendUnavailable: there is no engine.
    """

    def __init__(self, pages: PagedKV, *, engine: ctypes.CDLL | None = None) -> None:
        self._engine = find_engine(engine)
        self.pages = pages
        heads, slots, size, dim = pages.k.shape
        self._size, self._dtype = size, pages.k.dtype
        value_dim = pages.v.shape[3]
        self._sizes = (
            ((heads, 1, dim), (heads, 1, value_dim)),
            (*((1, heads, 1, dim), (1, heads, 1, value_dim)),),
        )
        lows, highs = (
            None if digests is None else digests.data_ptr()
            for digests in (pages.key_min, pages.key_max)
        )
        self.struct = PagesStruct(
            *(pages.k.data_ptr(), pages.v.data_ptr(), pages.positions.data_ptr(), lows, highs),
            *(slots, size, heads, dim, pages.v.shape[3], DTYPES[pages.k.dtype]),
        )

    def takes(self, k: Tensor, v: Tensor) -> bool:
        """Whether k, v [Hkv, 1, D], or [1, Hkv, 1, D], can be stored from where they lie."""
        dtype = self._dtype
        if (k.shape, v.shape) not in self._sizes or k.dtype != dtype:
            return False
        near = k.is_cpu and v.is_cpu and v.dtype == dtype
        return near and k.stride(-1) == 1 == v.stride(-1)

    def append(self, k: Tensor, v: Tensor, place: int, position: int) -> None:
        """Stores a token k, v [Hkv, 1, D] that it `takes`, and its page's digest anew.

        Args:
            place: slot * S + offset; the page is filled up to there.
        """
        slot, offset = divmod(place, self._size)
        status = self._engine.hkv_append(
            byref(self.struct),
            *(k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)),
            *(slot, offset, position),
        )
        if status:
            library.check(self._engine, status)
