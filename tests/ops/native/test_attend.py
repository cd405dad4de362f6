"""Attention and merge against the float64 oracle, on every instruction set."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops import Ops, native, reference
from hybrid_kv.ops.native import library, selected
from hybrid_kv.ops.native.attend import RetrievedAttention, Visible, attend_rows, merge
from hybrid_kv.ops.native.library import Pool, default_pool, work_alone
from hybrid_kv.ops.native.selected import attend_ragged
from hybrid_kv.types import HIDDEN, PartialAttention
from tests.ops.native.engines import each_kernel_with
from tests.ops.native.scan_data import ATTENTION, pool_of, strided
from tests.oracle import softmax_attention


def expected(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    ids: Tensor,
    scale: float,
    softcap: float | None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if ids.shape[2] == 0:
        shape = queries.shape[:2]
        return torch.zeros(*shape, values.shape[2]), torch.full(shape, -torch.inf)
    of_head = torch.arange(len(keys))[:, None, None]
    rows = ids.clamp_min(0)
    out, lse = softmax_attention(
        queries[:, :, None],
        keys[of_head, rows],
        values[of_head, rows],
        scale=scale,
        softcap=softcap,
        visible=(ids >= 0)[:, :, None],
        bias=None if bias is None else bias[:, :, None],
    )
    return out[:, :, 0], lse[:, :, 0]


def check(
    engine: ctypes.CDLL,
    keys: Tensor,
    values: Tensor,
    ids: Tensor,
    *,
    scale: float = 0.1,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> None:
    queries = torch.randn(*ids.shape[:2], keys.shape[2])
    attention = RetrievedAttention(keys, values, engine=engine)
    out, lse = attention.attend(queries, ids, scale=scale, softcap=softcap, bias=bias)
    wanted, wanted_lse = expected(queries, keys, values, ids, scale, softcap, bias)
    torch.testing.assert_close(out, wanted.float(), **ATTENTION)
    torch.testing.assert_close(lse, wanted_lse.float(), **ATTENTION)


@pytest.mark.parametrize(("dim", "value_dim"), [(1, 1), (8, 8), (72, 80), (128, 64), (256, 256)])
@pytest.mark.parametrize("num_ids", [0, 1, 3, 4, 5, 100])
def test_attention_is_that_of_the_oracle(
    engine: ctypes.CDLL, dim: int, value_dim: int, num_ids: int, dtype: torch.dtype
) -> None:
    keys = strided(torch.randn(2, 50, dim).to(dtype))
    values = strided(torch.randn(2, 50, value_dim).to(dtype))
    check(engine, keys, values, torch.randint(-1, 50, (2, 3, num_ids)))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_large_logits_and_softcap(engine: ctypes.CDLL, scale: float, softcap: float | None) -> None:
    keys, values = torch.randn(2, 300, 72), torch.randn(2, 300, 72)
    check(engine, keys, values, torch.randint(300, (2, 4, 130)), scale=scale, softcap=softcap)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("num_ids", [1, 5, 33])
def test_a_bias_shifts_logits_after_the_softcap_and_hides(
    engine: ctypes.CDLL, num_ids: int, softcap: float | None
) -> None:
    keys, values = torch.randn(2, 50, 72), torch.randn(2, 50, 72)
    bias = 3 * torch.randn(2, 4, num_ids)
    bias[:, :, ::3] = -torch.inf
    bias[0, 1] = -torch.inf
    ids = torch.randint(-1, 50, (2, 4, num_ids))
    check(engine, keys, values, ids, scale=0.3, softcap=softcap, bias=bias)


def test_a_query_without_entries_gets_the_identity_of_merging(engine: ctypes.CDLL) -> None:
    keys, values = torch.randn(2, 30, 72), torch.randn(2, 30, 64)
    ids = torch.randint(30, (2, 3, 7))
    ids[1, 2] = -1
    out, lse = RetrievedAttention(keys, values, engine=engine).attend(
        torch.randn(2, 3, 72), ids, scale=1.0
    )
    assert (out[1, 2] == 0).all()
    assert lse.isinf().nonzero().tolist() == [[1, 2]]
    empty = RetrievedAttention(keys[:, :0], values[:, :0], engine=engine)
    out, lse = empty.attend(torch.randn(2, 3, 72), ids[..., :0], scale=1.0)
    assert out.shape == (2, 3, 64)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_change_nothing(engine: ctypes.CDLL, threads: int) -> None:
    attention = RetrievedAttention(torch.randn(3, 200, 72), torch.randn(3, 200, 72), engine=engine)
    queries, ids = torch.randn(3, 9, 72), torch.randint(-1, 200, (3, 9, 33))
    alone = attention.attend(queries, ids, scale=0.1)
    with pool_of(engine, threads) as pool:
        together = attention.attend(queries, ids, scale=0.1, pool=pool)
    assert torch.equal(together.out, alone.out)
    assert torch.equal(together.lse, alone.lse)


def test_what_does_not_fit_is_refused(engine: ctypes.CDLL) -> None:
    keys, values = torch.zeros(2, 30, 8), torch.zeros(2, 30, 16)
    attention = RetrievedAttention(keys, values, engine=engine)
    queries, ids = torch.zeros(2, 3, 8), torch.zeros(2, 3, 5, dtype=torch.int64)
    with pytest.raises(ConfigError, match="an id is not below the number of keys"):
        attention.attend(queries, ids + 30, scale=1.0)
    with pytest.raises(ShapeError, match=r"queries must be \[2, M, 8\]"):
        attention.attend(queries[..., :7], ids, scale=1.0)
    with pytest.raises(ShapeError, match=r"ids must be \[2, 3, K\]"):
        attention.attend(queries, ids[:, :2], scale=1.0)
    with pytest.raises(ConfigError, match=r"ids int64, got torch\.float32 and torch\.int32"):
        attention.attend(queries, ids.int(), scale=1.0)
    with pytest.raises(ConfigError, match="softcap must be at least 0"):
        attention.attend(queries, ids, scale=1.0, softcap=-1.0)
    with pytest.raises(ShapeError, match=r"bias must be \[2, 3, 5\] torch.float32 on the host"):
        attention.attend(queries, ids, scale=1.0, bias=torch.zeros(2, 3, 4))
    with pytest.raises(ShapeError, match=r"values must be \[2, 30, Dv\]"):
        RetrievedAttention(keys, values[:, :29], engine=engine)
    with pytest.raises(ShapeError, match=r"values must be \[2, 30, Dv\] torch.float32"):
        RetrievedAttention(keys, values.half(), engine=engine)


def rows_of(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[B, H, N, D] in the middle of a larger array, the batch rows behind the heads."""
    batch, heads, count, dim = size
    by_head = strided(torch.randn(heads * batch, count, dim).to(dtype))
    return by_head.unflatten(0, (heads, batch)).transpose(0, 1)


@pytest.mark.parametrize(("dim", "value_dim"), [(1, 1), (3, 9), (72, 80), (128, 64), (256, 256)])
@pytest.mark.parametrize(
    ("queries", "count"), [(1, 1), (3, 37), (4, 0), (4, 640), (6, 256), (0, 5)]
)
def test_every_query_attends_every_row(
    engine: ctypes.CDLL, dim: int, value_dim: int, queries: int, count: int, dtype: torch.dtype
) -> None:
    keys, values = (
        rows_of(2, 3, count, dim, dtype=dtype),
        rows_of(2, 3, count, value_dim, dtype=dtype),
    )
    q = torch.randn(2, 3, queries, dim).to(dtype)
    out, lse = attend_rows(q, keys, values, scale=0.1, engine=engine)
    wanted, wanted_lse = softmax_attention(q, keys, values, scale=0.1)
    if count == 0:
        wanted = torch.zeros_like(out)
    torch.testing.assert_close(out, wanted.float(), **ATTENTION)
    torch.testing.assert_close(lse, wanted_lse.float(), **ATTENTION)


@pytest.mark.parametrize("queries", [1, 2, 3, 5, 15, 16, 17, 40])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_any_number_of_queries_shares_the_rows(
    engine: ctypes.CDLL, queries: int, softcap: float | None
) -> None:
    keys, values, q = rows_of(1, 2, 300, 72), rows_of(1, 2, 300, 72), torch.randn(1, 2, queries, 72)
    out, lse = attend_rows(q, keys, values, scale=3.0, softcap=softcap, engine=engine)
    wanted, wanted_lse = softmax_attention(q, keys, values, scale=3.0, softcap=softcap)
    torch.testing.assert_close(out, wanted.float(), **ATTENTION)
    torch.testing.assert_close(lse, wanted_lse.float(), **ATTENTION)


@pytest.mark.parametrize("new", [1, 2, 5])
def test_positions_hide_what_is_later(engine: ctypes.CDLL, new: int) -> None:
    keys, values, q = rows_of(2, 2, 600, 24), rows_of(2, 2, 600, 24), torch.randn(2, 2, 3 * new, 24)
    positions = torch.zeros(2, 640, dtype=torch.int64)[:, :600]  # as the first slots of arenas
    positions[:] = torch.stack([torch.randperm(600) + 1, torch.randperm(600)])
    positions[1, :300] = HIDDEN
    newest = [4, 599]
    out, lse = attend_rows(
        q, keys, values, scale=0.1, visible=Visible(positions, newest, new), engine=engine
    )
    of_queries = (torch.tensor(newest)[:, None] + torch.arange(1 - new, 1)).repeat(1, 3)
    visible = (positions[:, None] <= of_queries[..., None])[:, None]
    wanted, wanted_lse = softmax_attention(q, keys, values, scale=0.1, visible=visible)
    torch.testing.assert_close(out, wanted.float(), **ATTENTION)
    torch.testing.assert_close(lse, wanted_lse.float(), **ATTENTION)
    assert bool(lse[0].isinf().any()) == (new == 5)  # its first token sees position 0, which is not


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_change_no_bit_of_a_long_attention(engine: ctypes.CDLL, threads: int) -> None:
    keys, values, q = rows_of(1, 1, 9001, 24), rows_of(1, 1, 9001, 24), torch.randn(1, 1, 5, 24)
    alone = attend_rows(q, keys, values, scale=0.3, engine=engine)
    wanted, wanted_lse = softmax_attention(q, keys, values, scale=0.3)
    torch.testing.assert_close(alone.out, wanted.float(), **ATTENTION)
    torch.testing.assert_close(alone.lse, wanted_lse.float(), **ATTENTION)
    with pool_of(engine, threads) as pool:
        together = attend_rows(q, keys, values, scale=0.3, pool=pool, engine=engine)
    assert torch.equal(together.out, alone.out)
    assert torch.equal(together.lse, alone.lse)


def test_rows_that_do_not_fit_are_refused(engine: ctypes.CDLL) -> None:
    keys, q = torch.zeros(2, 3, 30, 8), torch.zeros(2, 3, 4, 8)
    positions = torch.zeros(2, 30, dtype=torch.int64)

    def call(q: Tensor = q, visible: Visible | None = None, softcap: float | None = None) -> None:
        attend_rows(q, keys, keys, scale=1.0, softcap=softcap, visible=visible, engine=engine)

    with pytest.raises(ShapeError, match=r"queries must be \[2, 3, M, 8\]"):
        call(q[..., :7])
    with pytest.raises(ConfigError, match="queries must be float32, float16 or bfloat16"):
        call(q.double())
    with pytest.raises(ShapeError, match=r"positions must be \[2, 30\] and newest \[2\]"):
        call(visible=Visible(positions, [1], 1))
    with pytest.raises(ConfigError, match="positions must be int64 in contiguous rows"):
        call(visible=Visible(positions.int(), [1, 1], 1))
    with pytest.raises(ConfigError, match="new tokens must be 1"):
        call(visible=Visible(positions, [1, 1], 0))
    with pytest.raises(ConfigError, match="softcap must be at least 0"):
        call(softcap=-1.0)


def flat_rows(count: int, dim: int, dtype: torch.dtype) -> Tensor:
    """[count, dim] in the middle of a larger array, its last row at the end of memory."""
    return strided(torch.randn(1, count, dim).to(dtype))[0]


@each_kernel_with(
    dims=((1, 1), (3, 9), (72, 80), (128, 64), (256, 256)),
    lengths=([37, 0, 5], [1, 4097, 3], [0, 0, 0]),
    given=((1, None), (3, None), (5, 3.0), (17, None)),
)
def test_every_head_attends_as_many_rows_as_it_has(
    engine: ctypes.CDLL,
    dims: tuple[int, int],
    lengths: list[int],
    given: tuple[int, float | None],
    dtype: torch.dtype,
) -> None:
    (dim, value_dim), (queries, softcap) = dims, given
    starts = [2, 2 + lengths[0] + 3, 8 + lengths[0] + lengths[1]]
    count = starts[2] + lengths[2]
    keys, values = flat_rows(count, dim, dtype), flat_rows(count, value_dim, dtype)
    q = torch.randn(3, queries, dim).to(dtype)
    bias = torch.randn(count)
    bias[::4] = -torch.inf
    for added in (None, bias):
        out, lse = attend_ragged(
            *(q, keys, values, starts, lengths),
            scale=0.3,
            softcap=softcap,
            bias=added,
            engine=engine,
        )
        for h, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            rows = slice(start, start + length)
            wanted, wanted_lse = softmax_attention(
                *(q[h], keys[rows], values[rows]),
                scale=0.3,
                softcap=softcap,
                bias=None if added is None else added[rows],
            )
            wanted = wanted if length else torch.zeros_like(out[h])
            torch.testing.assert_close(out[h], wanted.float(), **ATTENTION)
            torch.testing.assert_close(lse[h], wanted_lse.float(), **ATTENTION)


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_change_no_bit_of_a_ragged_attention(engine: ctypes.CDLL, threads: int) -> None:
    keys, q = torch.randn(9100, 24), torch.randn(3, 5, 24)
    extents = [0, 9001, 9001], [9001, 0, 99]
    alone = attend_ragged(q, keys, keys, *extents, scale=0.3, engine=engine)
    with pool_of(engine, threads) as pool:
        together = attend_ragged(q, keys, keys, *extents, scale=0.3, pool=pool, engine=engine)
    assert torch.equal(together.out, alone.out)
    assert torch.equal(together.lse, alone.lse)


def test_ragged_rows_that_do_not_fit_are_refused(engine: ctypes.CDLL) -> None:
    keys, q = torch.zeros(30, 8), torch.zeros(2, 4, 8)

    def call(
        q: Tensor = q,
        starts: list[int] | None = None,
        lengths: list[int] | None = None,
        bias: Tensor | None = None,
    ) -> None:
        extents = starts or [0, 20], lengths or [20, 10]
        attend_ragged(q, keys, keys, *extents, scale=1.0, bias=bias, engine=engine)

    call()
    with pytest.raises(ShapeError, match=r"queries must be \[2, M, 8\]"):
        call(q[..., :7])
    with pytest.raises(ConfigError, match="queries must be float32, float16 or bfloat16"):
        call(q.double())
    with pytest.raises(ShapeError, match=r"lengths must be \[2\] as starts, got \[1\]"):
        call(lengths=[3])
    with pytest.raises(ConfigError, match="a head's rows must lie inside the array"):
        call(lengths=[20, 11])
    with pytest.raises(ShapeError, match=r"bias must be \[30\] torch.float32 on the host"):
        call(bias=torch.zeros(29))


@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("dim", [1, 24, 72, 300])
def test_a_merge_is_that_of_the_reference(
    engine: ctypes.CDLL, num_parts: int, dim: int, dtype: torch.dtype
) -> None:
    kinds = [torch.float32, dtype]
    parts = [
        PartialAttention(torch.randn(2, 3, 7, dim).to(kinds[part % 2]), 9 * torch.randn(2, 3, 7))
        for part in range(num_parts)
    ]
    parts[-1].lse[0, 1] = -torch.inf  # next to parts with entries
    parts[-1].lse[1, :, :3] = 80.0
    for part in parts:
        part.lse[0, 0] = -torch.inf
    merged, expected = merge(parts, dtype, engine=engine), reference.merge(parts, dtype)
    assert merged.out.dtype == dtype
    assert (merged.out[0, 0] == 0).all()
    assert (merged.lse[0, 0] == -torch.inf).all()
    torch.testing.assert_close(merged.out, expected.out)
    torch.testing.assert_close(merged.lse, expected.lse)


def test_a_merge_rounds_as_torch_does(engine: ctypes.CDLL) -> None:
    odd = torch.tensor([0.0, -0.0, 1e-8, 3e-8, 6.1e-5, 65519.0, 65520.0, 3.3e38, torch.inf])
    sizes = (1e-7, 1e-4, 1.0, 1e4)
    values = torch.cat([torch.randn(40_000).exp() * size for size in sizes] + [odd, -odd])[:, None]
    part = PartialAttention(values, torch.zeros(len(values)))
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(merge([part], dtype, engine=engine).out, values.to(dtype))
    nan = PartialAttention(torch.full((1, 1), torch.nan), torch.zeros(1))
    assert merge([nan], torch.bfloat16, engine=engine).out.isnan().all()
    assert merge([nan], torch.float16, engine=engine).out.isnan().all()


def test_a_merge_of_many_rows_is_shared_by_threads(engine: ctypes.CDLL) -> None:
    parts = [PartialAttention(torch.randn(3, 500, 24), torch.randn(3, 500)) for _ in range(2)]
    alone = merge(parts, torch.float32, engine=engine)
    with pool_of(engine, 3) as pool:
        together = merge(parts, torch.float32, pool=pool, engine=engine)
    assert torch.equal(together.out, alone.out)
    assert torch.equal(together.lse, alone.lse)
    torch.testing.assert_close(alone.out, reference.merge(parts, torch.float32).out)


def test_a_merge_refuses_other_dtypes(engine: ctypes.CDLL) -> None:
    part = PartialAttention(torch.zeros(3, 8).double(), torch.zeros(3))
    with pytest.raises(ConfigError, match="out must be float32, float16 or bfloat16"):
        merge([part], torch.float32, engine=engine)


def test_a_thread_that_works_alone_leaves_the_pool_to_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if library.engine() is None:
        pytest.skip("no engine")
    pools: list[Pool | None] = []

    def watched(op: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            pools.append(options["pool"])
            return op(*args, **options)

        return call

    for name in ("attend_rows", "attend_retrieved", "merge"):
        monkeypatch.setattr(native, name, watched(getattr(native, name)))
    monkeypatch.setattr(selected, "attend_ragged", watched(attend_ragged))
    rows, ids = torch.randn(1, 2, 9, 8), torch.zeros(2, 9, 1, dtype=torch.int64)

    def work() -> None:
        ops = Ops()
        part = ops.attend(rows, rows, rows, scale=1.0)
        ops.merge([part, part], torch.float32)
        ops.attend_retrieved(rows[0], rows[0], rows[0], ids, scale=1.0)
        ops.attend_ragged(rows[0], rows[0, 0], rows[0, 0], [0, 4], [4, 5], scale=1.0)

    def work_in_the_background() -> None:
        work_alone()
        work()

    thread = threading.Thread(target=work_in_the_background)
    thread.start()
    thread.join()
    assert pools == [None] * 4
    work()
    assert pools[4:] == [default_pool()] * 4
