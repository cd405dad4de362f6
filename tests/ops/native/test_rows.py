"""Keys in 8 bits: every engine against the portable implementation, bit for bit."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from hybrid_kv.errors import BackendUnavailable, ConfigError, ShapeError
from hybrid_kv.ops import portable
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.rows import QuantisedKeys, describe, row_bytes, scanned_bytes
from hybrid_kv.ops.portable import QuantisedQuery
from tests.ops.native.scan_data import COUNTS, DIMS, make_keys, pool_of, strided


def quantised(keys: Tensor, engine: ctypes.CDLL, **options: bool) -> QuantisedKeys:
    result = QuantisedKeys(keys.shape[0], keys.shape[2], engine=engine, **options)
    result.build(keys)
    return result


def expected(keys: Tensor) -> portable.QuantisedKeys:
    result = portable.QuantisedKeys(keys.shape[0], keys.shape[2])
    result.build(keys)
    return result


def quantised_query(own: QuantisedKeys, query: Tensor, engine: ctypes.CDLL) -> QuantisedQuery:
    """A query [D] float32 for the second head, as searches quantise it."""
    codes = torch.empty(own.row_bytes, dtype=torch.int8)
    scale, total, offset = ctypes.c_float(), ctypes.c_int32(), ctypes.c_float()
    status = engine.hkv_quantise_query(
        ctypes.byref(own.structs[1]),
        query.data_ptr(),
        codes.data_ptr(),
        *map(ctypes.byref, (scale, total, offset)),
    )
    library.check(engine, status)
    return QuantisedQuery(codes, scale.value, total.value, offset.value)


def rows_of_blocks(blocks: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Codes [H, count, 4 ceil(D / 4)] and levels [H, 16 blocks] of the interleaved layout."""
    heads, num_blocks, size = blocks.shape
    quads = size // 64 - 1
    codes = blocks[..., :-64].reshape(heads, num_blocks, quads, 16, 4)
    codes = codes.permute(0, 1, 3, 2, 4).reshape(heads, num_blocks * 16, quads * 4)
    levels = blocks[..., -64:].contiguous().view(torch.float32)
    return codes[:, :count], levels.reshape(heads, -1)


def check_same(own: QuantisedKeys, other: portable.QuantisedKeys, dim: int) -> None:
    count = other.count
    assert own.count == count
    assert torch.equal(own.mean, other.mean)
    assert torch.equal(own.channel, other.channel)
    assert torch.equal(own.levels, other.levels)
    assert torch.equal(own.scale_codes[:, :count], other.scale_codes[:, :count])
    assert torch.equal(own.rows[:, :count, :dim], other.rows[:, :count])
    assert (own.rows[:, :count, dim:] == 128).all()
    num_blocks = -(-count // 16)
    codes, levels = rows_of_blocks(own.blocks[:, :num_blocks], count)
    assert torch.equal(codes[..., :dim], other.rows[:, :count])
    assert (codes[..., dim:] == 128).all()
    scale_codes = other.scale_codes[:, :count].long()
    assert torch.equal(levels[:, :count], other.levels.gather(1, scale_codes))
    assert levels[:, count:].isnan().all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("count", COUNTS)
def test_codes_are_those_of_the_oracle(
    engine: ctypes.CDLL, count: int, dim: int, dtype: torch.dtype
) -> None:
    keys = strided(make_keys(2, count, dim, dtype))
    check_same(quantised(keys, engine, with_rows=True), expected(keys), dim)


def test_codes_stand_for_the_keys(engine: ctypes.CDLL) -> None:
    keys = make_keys(2, 1000, 72)
    own = quantised(keys, engine, with_rows=True)
    level = own.levels.gather(1, own.scale_codes[:, :1000].long())[..., None]
    values = (own.rows[:, :1000, :72].float() - 128) * level * own.channel[:, None]
    error = (values + own.mean[:, None] - keys).abs() / own.channel[:, None]
    assert (error <= 0.501 * level).all(), "half a step"
    largest = (own.rows[:, :1000].float() - 128).abs().amax(-1)
    assert largest.max() <= 127
    assert largest.min() >= 120, "a level is not much larger than it must be"


@pytest.mark.parametrize("steps", [[0, 5, 16, 17, 40, 600], [100, 5000], [16, 32, 33]])
def test_added_keys_are_quantised_with_the_first_ones_statistics(
    engine: ctypes.CDLL, steps: list[int]
) -> None:
    keys = make_keys(2, steps[-1], 72)
    own, other = (
        quantised(keys[:, : steps[0]], engine, with_rows=True),
        expected(keys[:, : steps[0]]),
    )
    for stop in steps[1:]:
        own.append(keys[:, :stop])
        other.append(keys[:, :stop])
        check_same(own, other, 72)


def test_what_statistics_did_not_foresee_is_clamped(engine: ctypes.CDLL) -> None:
    keys = make_keys(1, 100, 72)
    keys[:, 90:] = keys[:, :1] + 1e6
    own, other = quantised(keys[:, :90], engine, with_rows=True), expected(keys[:, :90])
    own.append(keys)
    other.append(keys)
    check_same(own, other, 72)
    assert (own.scale_codes[:, 90:100] == 255).all()
    assert (own.rows[:, 90:100, :72] == 255).all()


@pytest.mark.parametrize("value", [0.0, -3.25, 1e30])
def test_equal_keys_need_no_codes(engine: ctypes.CDLL, value: float) -> None:
    keys = torch.full((1, 40, 72), value)
    own = quantised(keys, engine, with_rows=True)
    check_same(own, expected(keys), 72)
    assert (own.rows[:, :40] == 128).all()
    torch.testing.assert_close(own.mean, keys[:, 0])


@pytest.mark.parametrize("dim", DIMS)
def test_queries_are_quantised_as_by_the_oracle(engine: ctypes.CDLL, dim: int) -> None:
    keys = make_keys(2, 100, dim)
    own, other = quantised(keys, engine), expected(keys)
    for query in (torch.randn(dim), torch.zeros(dim), 1e-30 * torch.ones(dim)):
        got, wanted = quantised_query(own, query, engine), other.quantise_query(1, query)
        assert torch.equal(got.codes[:dim], wanted.codes)
        assert (got.codes[dim:] == 0).all()
        assert (got.scale, got.sum) == (wanted.scale, wanted.sum)
        assert got.offset == pytest.approx(wanted.offset, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("dim", [*DIMS, 40, 64, 96, 128])
def test_bytes_of_a_key_are_those_of_the_engine(engine: ctypes.CDLL, dim: int) -> None:
    keys = QuantisedKeys(1, dim, engine=engine)
    assert 16 * scanned_bytes(dim) == keys.block_bytes
    assert row_bytes(dim) == keys.row_bytes + 1, "and its code of a factor"


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_change_nothing(engine: ctypes.CDLL, threads: int) -> None:
    keys = make_keys(3, 9000, 8)
    with pool_of(engine, threads) as pool:
        own = QuantisedKeys(3, 8, with_rows=True, engine=engine)
        own.build(keys[:, :5000], pool)
        own.append(keys, pool)
    other = expected(keys[:, :5000])
    other.append(keys)
    check_same(own, other, 8)


def test_building_again_replaces_the_content(engine: ctypes.CDLL) -> None:
    own = quantised(make_keys(2, 1000, 72), engine, with_rows=True)
    keys = make_keys(2, 37, 72, offset=-5.0)
    own.build(keys)
    check_same(own, expected(keys), 72)
    assert own.memory_bytes == 2 * (37 * 129 + 3 * 19 * 64 + 4 * (2 * 72 + 256))


def test_arrays_lie_on_cache_lines(engine: ctypes.CDLL) -> None:
    own = quantised(make_keys(3, 1000, 72), engine, with_rows=True)
    assert all(head.data_ptr() % 64 == 0 for array in (own.rows, own.blocks) for head in array)


def test_keys_that_cannot_be_read_are_refused(engine: ctypes.CDLL) -> None:
    own = QuantisedKeys(2, 72, engine=engine)
    with pytest.raises(ShapeError, match=r"keys must be \[2, N, 72\], got shape \[1, 5, 72\]"):
        own.build(torch.zeros(1, 5, 72))
    with pytest.raises(ShapeError, match="with contiguous rows, got shape"):
        own.build(torch.zeros(2, 72, 5).transpose(1, 2))
    with pytest.raises(ShapeError, match="with contiguous rows, got shape"):
        own.build(torch.zeros(2, 1, 72).expand(2, 5, 72))
    with pytest.raises(ConfigError, match=r"float32, float16 or bfloat16, got torch\.float64"):
        own.build(torch.zeros(2, 5, 72, dtype=torch.float64))
    own.build(torch.zeros(2, 5, 72))
    with pytest.raises(ShapeError, match="keys must hold the 5 known rows first, got 4 rows"):
        own.append(torch.zeros(2, 4, 72))


def test_the_engine_refuses_what_it_cannot_address(engine: ctypes.CDLL) -> None:
    own = QuantisedKeys(1, 72, engine=engine)
    keys = describe("keys", torch.zeros(1, 5, 72))
    keys[0].stride = 71
    with pytest.raises(ConfigError, match="the stride of keys must be at least dim"):
        library.check(engine, engine.hkv_quantise(None, 1, keys, own.structs))
    keys = describe("keys", torch.zeros(1, 5000, 72))
    with pytest.raises(ConfigError, match="quantised must have capacity for all keys"):
        library.check(engine, engine.hkv_quantise(None, 1, keys, own.structs))
    own.structs[0].blocks += 4
    keys[0].count = 5
    with pytest.raises(ConfigError, match="rows and blocks must lie on 64 bytes"):
        library.check(engine, engine.hkv_quantise(None, 1, keys, own.structs))


def test_without_an_engine_the_portable_rows_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "engine", lambda: None)
    with pytest.raises(BackendUnavailable, match=r"use hybrid_kv\.ops\.portable instead"):
        QuantisedKeys(1, 8)


def test_rows_that_were_taken_have_room_for_those_that_come(engine: ctypes.CDLL) -> None:
    """Else the first key that leaves the window would have all rows of its head copied."""
    keys = torch.randn(2, 1000, 72)
    quantised = QuantisedKeys(2, 72, with_rows=True, engine=engine)
    quantised.build(keys)
    taken = quantised.take(1, torch.arange(0, 1000, 2))
    where, before = taken.rows.data_ptr(), taken.rows[0, :500].clone()
    assert torch.equal(before, quantised.rows[1, 0:1000:2])
    more = torch.cat([keys[1:, ::2], keys[1:, 1:40:2]], 1)
    taken.append(more)
    assert taken.rows.data_ptr() == where
    assert torch.equal(taken.rows[0, :500], before)
    assert torch.equal(taken.rows[0, 500:520], quantised.rows[1, 1:40:2])
