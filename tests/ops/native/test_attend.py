"""Attention over retrieved ids against the float64 oracle, on every instruction set."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.native.attend import RetrievedAttention
from tests.ops.native.scan_data import ATTENTION, pool_of, strided
from tests.oracle import softmax_attention


def expected(
    queries: Tensor, keys: Tensor, values: Tensor, ids: Tensor, scale: float, softcap: float | None
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
) -> None:
    queries = torch.randn(*ids.shape[:2], keys.shape[2])
    attention = RetrievedAttention(keys, values, engine=engine)
    out, lse = attention.attend(queries, ids, scale=scale, softcap=softcap)
    wanted, wanted_lse = expected(queries, keys, values, ids, scale, softcap)
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
    with pytest.raises(ShapeError, match=r"values must be \[2, 30, Dv\]"):
        RetrievedAttention(keys, values[:, :29], engine=engine)
    with pytest.raises(ShapeError, match=r"values must be \[2, 30, Dv\] torch.float32"):
        RetrievedAttention(keys, values.half(), engine=engine)
