"""Keys, exact answers and tolerances of the tests of quantised rows, scans and attention."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_void_p
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.ops.native import library
from hybrid_kv.types import SearchResult

DIMS = [1, 8, 64, 72, 80, 128, 256]
COUNTS = [0, 1, 15, 16, 17, 1000]
SCORES = {"rtol": 1e-5, "atol": 2e-4}  # float32 sums of up to 256 products of order 1
SAME_CODES = {"rtol": 1e-6, "atol": 1e-5}  # the same integers, times scales, plus an offset
ATTENTION = {"rtol": 1e-5, "atol": 2e-5}
INT8_ERROR = 0.08  # of a score by the codes, in standard deviations of the scores


def make_keys(
    heads: int, count: int, dim: int, dtype: torch.dtype = torch.float32, offset: float = 2.0
) -> Tensor:
    """[heads, count, dim] with channels of different sizes and a common offset."""
    keys = torch.randn(heads, count, dim) * (0.2 + torch.rand(heads, 1, dim))
    return (keys + offset * torch.randn(heads, 1, dim)).to(dtype)


def strided(keys: Tensor) -> Tensor:
    """The same keys in the middle of a larger array, whose other elements are NaN."""
    heads, count, dim = keys.shape
    room = torch.full((heads, count + 3, dim + 5), torch.nan, dtype=keys.dtype)
    view = room[:, 2 : count + 2, 3 : dim + 3]
    view.copy_(keys)
    return view


def true_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """[heads, M, N] float64."""
    return torch.einsum("hmd,hnd->hmn", queries.double(), keys.double())


def check_exact(result: SearchResult, queries: Tensor, keys: Tensor, top_k: int) -> None:
    """Ids and scores of an exact search: order, ties, padding."""
    found = min(top_k, keys.shape[1])
    true = true_scores(queries, keys)
    best = true.topk(found, -1).values.float()
    assert result.ids.shape == result.scores.shape == (*queries.shape[:2], top_k)
    torch.testing.assert_close(result.scores[..., :found], best, **SCORES)
    own = true.gather(-1, result.ids[..., :found].long()).float()
    torch.testing.assert_close(result.scores[..., :found], own, **SCORES)
    check_order(result, found)


def check_order(result: SearchResult, found: int) -> None:
    """Best first, of equal scores the lower id first, nothing twice, padding last."""
    scores, ids = result.scores[..., :found], result.ids[..., :found]
    falls, same = scores.diff(dim=-1) < 0, scores.diff(dim=-1) == 0
    assert (falls | (same & (ids.diff(dim=-1) > 0))).all()
    for row in ids.flatten(0, 1):
        assert row.unique().numel() == found
    assert (result.ids[..., found:] == -1).all()
    assert (result.scores[..., found:] == -torch.inf).all()


@contextmanager
def pool_of(engine: ctypes.CDLL, threads: int) -> Iterator[Any]:
    """Worker threads of a library that is not the one in use."""
    handle = c_void_p()
    library.check(engine, engine.hkv_pool_create(threads, None, 0, byref(handle)))
    try:
        yield SimpleNamespace(handle=handle, threads=threads)
    finally:
        engine.hkv_pool_destroy(handle)
