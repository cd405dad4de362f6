"""Products of packed weights, on every instruction set, against package gguf's in float64."""

from __future__ import annotations

import ctypes
import mmap
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.library import Pool
from hybrid_kv.ops.native.linear import (
    PACKED_KINDS,
    PackedWeight,
    multiplies_packed,
    packed_linear,
)
from tests.ops.native.engines import engine_params, needs_engine
from tests.ops.native.packed_data import dequantised, random_weight
from tests.tolerances import TOLERANCES

EACH_KIND = pytest.mark.parametrize("kind", PACKED_KINDS)
IN_TILES = [isa for isa in engine_params() if library.load(isa).hkv_packed_tile_tokens()]
NO_TILES = pytest.param("baseline", "", marks=pytest.mark.skip(reason="this CPU has no AMX"))
EACH_KIND_IN_TILES = pytest.mark.parametrize(
    ("engine", "kind"), [*product(IN_TILES, PACKED_KINDS)] or [NO_TILES], indirect=["engine"]
)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def rounded(x: Tensor) -> Tensor:
    """What the engine makes of x: 8 bits by blocks of 32, in float64."""
    blocks = x.double().unflatten(-1, (-1, 32))
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    return torch.where(scales > 0, (blocks / scales).round() * scales, 0).flatten(-2)


def widths(kind: str) -> tuple[int, ...]:
    """Columns: less and more than a chunk of 256 values, also with a part of one at the end."""
    return (256, 512) if PACKED_KINDS[kind].values == 256 else (32, 576, 256)


@EACH_KIND
def test_products_are_those_of_rounded_inputs(engine: ctypes.CDLL, kind: str) -> None:
    for columns in widths(kind):
        weight = random_weight(kind, 37, columns, gap=3)
        wide = dequantised(weight)
        for tokens in (*range(1, 18), 33):
            x = torch.randn(tokens, columns)
            found = packed_linear(x, weight, engine=engine)
            # A few inputs are rounded to the other side of a tie.
            assert relative_error(found, rounded(x) @ wide.T) < 2e-4, (columns, tokens)


@EACH_KIND_IN_TILES
def test_many_tokens_are_multiplied_in_bfloat16(engine: ctypes.CDLL, kind: str) -> None:
    fewest = engine.hkv_packed_tile_tokens()
    for columns, dtype in product(widths(kind), TOLERANCES):
        weight, bias = random_weight(kind, 37, columns, gap=3), torch.randn(37)
        wide = dequantised(weight)
        for tokens in (fewest, 130):
            x = torch.randn(tokens, columns).to(dtype)
            found = packed_linear(x, weight, bias, engine=engine)
            wanted = x.bfloat16().double() @ wide.bfloat16().double().T + bias.double()
            # A few weights are rounded to the other side of a tie.
            assert relative_error(found, wanted) < 2e-4 + torch.finfo(dtype).eps
            fewer = packed_linear(x[-fewest:], weight, bias, engine=engine)
            assert torch.equal(fewer, found[-fewest:])
            exact = packed_linear(x, weight, bias, exact=True, engine=engine)
            wanted = x.double() @ wide.T + bias.double()
            assert relative_error(exact, wanted) < 1e-4 + torch.finfo(dtype).eps


@EACH_KIND_IN_TILES
def test_bfloat16_is_no_less_exact_than_8_bits(engine: ctypes.CDLL, kind: str) -> None:
    weight, tokens = random_weight(kind, 129, 2048), engine.hkv_packed_tile_tokens()
    for outliers in (0, 4):
        x = torch.randn(tokens, 2048)
        x[:, torch.randperm(2048)[:outliers]] *= 100
        wanted = x.double() @ dequantised(weight).T
        few = torch.cat([packed_linear(part, weight, engine=engine) for part in x.split(8)])
        many = packed_linear(x, weight, engine=engine)
        assert relative_error(many, wanted) < 3e-3 < relative_error(few, wanted)


@EACH_KIND
@pytest.mark.parametrize(("outliers", "most"), [(0, 7e-3), (4, 1.5e-2)])
def test_rounding_costs_little_and_nothing_in_exact_mode(
    engine: ctypes.CDLL, kind: str, outliers: int, most: float
) -> None:
    weight = random_weight(kind, 129, 2048)
    wide = dequantised(weight)
    for tokens in (1, 3, 8, 17):
        x = torch.randn(tokens, 2048)
        x[:, torch.randperm(2048)[:outliers]] *= 100
        wanted = x.double() @ wide.T
        assert relative_error(packed_linear(x, weight, engine=engine), wanted) < most
        exact = packed_linear(x, weight, exact=True, engine=engine)
        assert relative_error(exact, wanted) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5, 9])
def test_outputs_have_the_inputs_dtype_and_shape(
    engine: ctypes.CDLL, dtype: torch.dtype, tokens: int
) -> None:
    weight, bias = random_weight("Q4_1", 37, 576), torch.randn(37, dtype=dtype)
    x = torch.randn(576, tokens, 2, dtype=dtype).permute(2, 1, 0)
    found = packed_linear(x, weight, bias, exact=True, engine=engine)
    assert found.dtype == dtype
    assert found.shape == (2, tokens, 37)
    wanted = x.double() @ dequantised(weight).T + bias.double()
    assert relative_error(found, wanted) < 1e-4 + torch.finfo(dtype).eps


@EACH_KIND
@pytest.mark.parametrize("tokens", [1, 3, 20, 64])
def test_threads_change_nothing(engine: ctypes.CDLL, kind: str, tokens: int) -> None:
    weight, x = random_weight(kind, 1037, 512), torch.randn(tokens, 512)
    alone = packed_linear(x, weight, engine=engine)
    assert torch.equal(packed_linear(x, weight, pool=Pool(3), engine=engine), alone)


@EACH_KIND
@pytest.mark.parametrize("tokens", [1, 9])
def test_extreme_codes_do_not_overflow(engine: ctypes.CDLL, kind: str, tokens: int) -> None:
    weight = random_weight(kind, 16, 512)
    weight.blocks[:8] = 0xFF  # also NaN scales in some places
    weight.blocks[8:] = 0x80
    known = PACKED_KINDS[kind]
    blocks = weight.blocks.view(16, -1, known.bytes)
    one = torch.tensor([1.0]).half().view(torch.uint8)
    for place in (208,) if kind == "Q6_K" else (0,):
        blocks[..., place : place + 2] = one
    if kind == "MXFP4":
        blocks[..., 0] = 127
    if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        blocks[..., 2:4] = 0
    for sign in (1.0, -1.0):
        x = torch.full((tokens, 512), sign)
        wanted = x.double() @ dequantised(weight).T
        found = packed_linear(x, weight, engine=engine).double()
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)  # of sums in float32


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tokens", [2, 9, 64])
def test_what_is_not_finite_stays_in_its_token(
    engine: ctypes.CDLL, value: float, tokens: int
) -> None:
    x = torch.randn(tokens, 576)
    x[1, 570] = value
    found = packed_linear(x, random_weight("Q4_0", 5, 576), engine=engine)
    assert not found[1].isfinite().any()
    assert found[0].isfinite().all()


def test_zeros_and_tiny_inputs_are_multiplied(engine: ctypes.CDLL) -> None:
    weight = random_weight("Q8_0", 5, 64)
    for value in (0.0, 1e-42):
        found = packed_linear(torch.full((1, 64), value), weight, exact=True, engine=engine)
        assert found.abs().max() < 1e-38
    assert packed_linear(torch.ones(0, 64), weight, engine=engine).shape == (0, 5)


@EACH_KIND
def test_a_mapped_file_is_read_where_it_lies(
    engine: ctypes.CDLL, tmp_path: Path, kind: str
) -> None:
    # The file ends on a page: a byte further lies nothing.
    weight, x = random_weight(kind, 15, 512), torch.randn(64, 512)
    size = weight.blocks.numel()
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    path = tmp_path / "weights"
    path.write_bytes(bytes(whole - size) + weight.blocks.numpy().tobytes())
    mapped = torch.from_file(str(path), size=whole, dtype=torch.uint8)[whole - size :]
    lying = PackedWeight(kind, mapped.view_as(weight.blocks), 512)
    for tokens in (1, 9, 64):
        assert torch.equal(
            packed_linear(x[:tokens], lying, engine=engine),
            packed_linear(x[:tokens], weight, engine=engine),
        )


def test_what_does_not_fit_is_refused(engine: ctypes.CDLL) -> None:
    weight, x = random_weight("Q4_0", 5, 64), torch.ones(1, 64)
    with pytest.raises(ShapeError, match=r"x must be \[\.\.\., 64\], got \[1, 63\]"):
        packed_linear(x[:, 1:], weight, engine=engine)
    with pytest.raises(ShapeError, match=r"bias must be \[5\], got \[4\]"):
        packed_linear(x, weight, torch.ones(4), engine=engine)
    with pytest.raises(ConfigError, match=r"x must be float32.*got torch\.float64 on cpu"):
        packed_linear(x.double(), weight, engine=engine)
    with pytest.raises(ConfigError, match=r"kind must be one of Q4_0.*got 'Q2_K'.*gguf"):
        PackedWeight("Q2_K", weight.blocks, 64)
    with pytest.raises(ShapeError, match="columns must be a multiple of 32 for Q4_0, got 63"):
        PackedWeight("Q4_0", weight.blocks, 63)
    with pytest.raises(ShapeError, match=r"blocks must be \[N, 54\].*got \[5, 36\]"):
        PackedWeight("Q4_0", weight.blocks, 96)
    with pytest.raises(ConfigError, match=r"blocks must be uint8 on the host, got torch\.int8"):
        PackedWeight("Q4_0", weight.blocks.view(torch.int8), 64)


@pytest.mark.parametrize("tokens", [1, 9])
def test_powers_of_two_are_scales_down_to_the_smallest(engine: ctypes.CDLL, tokens: int) -> None:
    weight = random_weight("MXFP4", 4, 512)
    weight.blocks.view(4, -1, 17)[..., 0] = torch.tensor([0, 1, 2, 200])[:, None]
    x = torch.ones(tokens, 512)
    wanted = x.double() @ dequantised(weight).T
    found = packed_linear(x, weight, engine=engine).double()
    # Products of such scales are subnormal, which have fewer bits.
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0)
    assert (found != 0).all()


@needs_engine
def test_kinds_and_devices_of_the_engine() -> None:
    assert all(multiplies_packed(kind) for kind in PACKED_KINDS)
    assert not multiplies_packed("Q2_K")
    assert not multiplies_packed("Q4_0", torch.device("cuda"))
