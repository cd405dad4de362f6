"""Linear layers of a few tokens, on every instruction set, against torch's in float64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch.nn import functional

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.native.library import Pool
from hybrid_kv.ops.native.linear import MAX_TOKENS, linear, multiplies
from tests.ops.native.scan_data import strided
from tests.tolerances import TOLERANCES

NARROW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@NARROW
@pytest.mark.parametrize("channels", [1, 37, 72, 576, 1030])
@pytest.mark.parametrize("biased", [True, False])
def test_outputs_are_those_of_the_definition(
    engine: ctypes.CDLL, dtype: torch.dtype, channels: int, biased: bool
) -> None:
    weight = strided(torch.randn(1, 37, channels, dtype=dtype) * channels**-0.5)[0]
    bias = torch.randn(37, dtype=dtype) if biased else None
    wide_bias = None if bias is None else bias.double()
    for tokens in range(1, MAX_TOKENS + 1):
        x = torch.randn(tokens, channels, dtype=dtype)
        found = linear(x, weight, bias, engine=engine)
        exact = functional.linear(x.double(), weight.double(), wide_bias)
        torch.testing.assert_close(found, exact.to(dtype), **TOLERANCES[dtype])


@NARROW
def test_threads_and_leading_axes_change_nothing(engine: ctypes.CDLL, dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 3, 520, dtype=dtype), torch.randn(777, 520, dtype=dtype)
    alone = linear(x, weight, engine=engine)
    assert alone.shape == (2, 3, 777)
    shared = linear(x.transpose(0, 1), weight, pool=Pool(3), engine=engine)
    assert torch.equal(shared, alone.transpose(0, 1)), "a row's sum depends on nothing else"


@NARROW
def test_what_is_not_finite_stays_so(engine: ctypes.CDLL, dtype: torch.dtype) -> None:
    x, weight = torch.ones(1, 37, dtype=dtype), torch.ones(3, 37, dtype=dtype)
    weight[1, 36], weight[2, 0] = float("nan"), float("inf")
    found = linear(x, weight, engine=engine)
    assert found[0, 0] == 37
    assert found[0, 1].isnan()
    assert found[0, 2].isinf()


def test_what_does_not_fit_is_refused(engine: ctypes.CDLL) -> None:
    x, weight = torch.ones(1, 8).bfloat16(), torch.ones(4, 8).bfloat16()
    with pytest.raises(ShapeError, match=r"x must be \[\.\.\., K\].*got \[1, 7\] and \[4, 8\]"):
        linear(x[:, 1:], weight, engine=engine)
    with pytest.raises(ShapeError, match=r"bias must be \[4\], got \[3\]"):
        linear(x, weight, weight[:3, 0], engine=engine)
    many = x.expand(MAX_TOKENS + 1, 8)
    wrong = [(many, weight), (x.float(), weight), (x.float(), weight.float())]
    wrong += [(x, weight.half()), (x[:0], weight), (x, torch.ones(8, 4).bfloat16().T)]
    for x, weight in wrong:
        assert not multiplies(x, weight, None)
        with pytest.raises(ConfigError, match=r"1 to 8 tokens, got .*nn\.functional\.linear"):
            linear(x, weight, engine=engine)
