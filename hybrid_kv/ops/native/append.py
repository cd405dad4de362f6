"""A new token of a layer, stored by the engine: the pages are described once."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_void_p
from functools import cache

from torch import Tensor

from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.rows import DTYPES, find_engine
from hybrid_kv.types import PagedKV


class PagesStruct(Structure):
    """`hkv_pages`."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "positions", "lows", "highs")),
        *((name, c_int64) for name in ("slots", "page_size")),
        *((name, c_int32) for name in ("heads", "dim", "value_dim", "dtype")),
    )


@cache
def _declared(engine: ctypes.CDLL | None) -> ctypes.CDLL:
    engine = find_engine(engine)
    rows = (c_void_p, c_int64, c_void_p, c_int64)
    library.declare(engine, "hkv_append", POINTER(PagesStruct), *rows, *(c_int64,) * 3)
    return engine


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
        self._engine = _declared(engine)
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
