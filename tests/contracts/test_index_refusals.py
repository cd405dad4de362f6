"""What every registered index refuses, and in which words."""

from __future__ import annotations

import pytest
import torch

from hybrid_kv.errors import ConfigError, NonFiniteError, ShapeError
from tests.index.oracle import KINDS, check_result, clustered, make

pytestmark = pytest.mark.host("an index lies in host memory, whatever computes")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_key_that_is_not_finite_is_refused_and_named(kind: str, value: float) -> None:
    keys, queries = clustered(37)
    keys[1, 17, 3] = value
    with pytest.raises(NonFiniteError, match="keys of KV head 1, row 17 are not finite; "):
        make(kind).build(keys, None)
    index = make(kind)
    index.build(keys[:, :17], None)
    with pytest.raises(NonFiniteError, match="keys of KV head 1, row 17 are not finite; "):
        index.add(keys)
    assert len(index) == 17
    check_result(index.search(queries, 5), queries, keys[:, :17], 5)


def test_a_wrong_shape_is_refused_by_name(kind: str) -> None:
    keys, queries = clustered(37)
    index = make(kind)
    with pytest.raises(ShapeError, match=r"keys must be \[Hkv, N, D\], got shape \[37, 72\]"):
        index.build(keys[0], None)
    with pytest.raises(ShapeError, match=r"samples must be \[2, G, M, 72\].*shape \[2, 9, 72\]"):
        index.build(keys, queries)
    index.build(keys, None)
    with pytest.raises(ShapeError, match=r"queries must be \[2, M, 72\].*got shape \[2, 9, 64\]"):
        index.search(queries[..., :64], 5)
    with pytest.raises(ShapeError, match=r"keys must be \[2, N >= 37, 72\], got shape \[2, 36, "):
        index.add(keys[:, :36])


def test_top_k_below_one_is_refused(kind: str) -> None:
    keys, queries = clustered(37)
    index = make(kind)
    index.build(keys, None)
    with pytest.raises(ConfigError, match="top_k must be at least 1, got 0"):
        index.search(queries, 0)
