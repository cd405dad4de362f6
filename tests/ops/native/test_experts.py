"""Products and sums of experts with packed weights, on every instruction set."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.native.bindings import CLAMPED_SILU, GELU_TANH, SILU
from hybrid_kv.ops.native.experts import (
    BoundMixture,
    ExpertMatrix,
    ExpertWeights,
    packed_experts,
)
from hybrid_kv.ops.native.library import Pool
from hybrid_kv.ops.native.linear import PACKED_KINDS, PackedWeight, packed_linear
from tests.ops.native.packed_data import dequantised, random_weight

EACH_KIND = pytest.mark.parametrize("kind", PACKED_KINDS)
EXPERTS, HIDDEN, INNER = 5, 256, 512


@EACH_KIND
@pytest.mark.parametrize("threads", [1, 3])
def test_tokens_are_multiplied_with_the_matrix_of_their_expert(
    engine: ctypes.CDLL, kind: str, threads: int
) -> None:
    """Few tokens by rows, many in panels, one group next to the other."""
    weight, rows = random_weight(kind, 5 * 77, 512, gap=3), 77
    experts, ends = torch.tensor([4, 0, 3]), torch.tensor([1, 14, 17])
    for dtype, exact in ((torch.float32, True), (torch.bfloat16, False)):
        x = torch.randn(512, 17, dtype=dtype).T
        pool = Pool(threads) if threads > 1 else None
        found = packed_experts(
            *(x, weight, 5, experts, ends), exact=exact, pool=pool, engine=engine
        )
        parts, begin = [], 0
        for expert, end in zip(experts.tolist(), ends.tolist(), strict=True):
            own = weight.blocks[expert * rows : (expert + 1) * rows]
            matrix = PackedWeight(kind, own, 512)
            parts.append(packed_linear(x[begin:end], matrix, exact=exact, engine=engine))
            begin = end
        assert torch.equal(found, torch.cat(parts))
    none = torch.empty(0, dtype=torch.int64)
    assert packed_experts(x[:0], weight, 5, none, none, engine=engine).shape == (0, rows)


def test_experts_that_do_not_fit_are_refused(engine: ctypes.CDLL) -> None:
    weight, x = random_weight("Q4_0", 6, 64), torch.ones(3, 64)

    def call(x: Tensor, experts: list[int], ends: list[int], count: int = 2, **of: Any) -> None:
        told = torch.tensor(experts, **of), torch.tensor(ends, dtype=torch.int64)
        packed_experts(x, weight, count, *told, engine=engine)

    call(x, [1, 0], [1, 3])
    with pytest.raises(ShapeError, match=r"x must be \[S, 64\].*got \[3, 63\]"):
        call(x[:, 1:], [1], [3])
    with pytest.raises(ShapeError, match=r"rows a multiple of 4 experts, got \[3, 64\] and 6"):
        call(x, [1], [3], count=4)
    with pytest.raises(ShapeError, match=r"experts and ends must be \[groups\] of int64"):
        call(x, [1], [3], dtype=torch.int32)
    with pytest.raises(ShapeError, match=r"experts and ends must be \[groups\].*int64 \[2\] and"):
        call(x, [1, 0], [3])
    with pytest.raises(ShapeError, match=r"the last of ends must be the 3 tokens of x, got \[2\]"):
        call(x, [1], [2])
    with pytest.raises(ConfigError, match="experts must be numbers of matrices"):
        call(x, [2], [3])
    with pytest.raises(ConfigError, match="experts must be numbers of matrices"):
        call(x, [-1], [3])
    with pytest.raises(ConfigError, match="ends must ascend from 1 on"):
        call(x, [1, 0], [3, 3])
    with pytest.raises(ConfigError, match=r"x must be float32.*got torch\.float64 on cpu"):
        call(x.double(), [1], [3])


def mixture(
    kinds: str, activation: int = SILU, *, exact: bool = True, bias: torch.dtype | None = None
) -> ExpertWeights:
    """Of kinds of the gate, of what it gates and of the last matrix; of two, one for both, whose
    rows lie in turn where there are biases.
    """
    *first, last = kinds.split()
    per_expert = INNER * (3 - len(first))
    up = [random_weight(kind, EXPERTS * per_expert, HIDDEN, gap=3) for kind in first]
    places = [range(INNER), range(INNER, 2 * INNER)] if len(up) == 1 else [range(INNER)] * 2
    biases: list[Tensor | None] = [None] * 3
    if bias is not None:
        both = 9 * torch.randn(EXPERTS, 2 * INNER, dtype=bias)
        biases = [both[:, ::2], both[:, 1::2], torch.randn(EXPERTS, HIDDEN, dtype=bias)]
        if len(up) == 1:
            places = [range(0, 2 * INNER, 2), range(1, 2 * INNER, 2)]
    down = random_weight(last, EXPERTS * HIDDEN, INNER, gap=3)
    matrices = zip((up[0], up[-1], down), (*places, range(HIDDEN)), biases, strict=True)
    gate, gated, out = (ExpertMatrix(*one) for one in matrices)
    return ExpertWeights(EXPERTS, gate, gated, out, activation, exact, 1.702, 7.0)


def unpacked(by: ExpertMatrix) -> Callable[[int, Tensor], Tensor]:
    """An expert's product in float64."""
    wide = dequantised(by.weight).unflatten(0, (EXPERTS, -1))
    wide = wide[:, by.rows.start : by.rows.stop : by.rows.step]
    bias = torch.zeros(wide.shape[:2]) if by.bias is None else by.bias
    return lambda expert, x: wide[expert] @ x + bias[expert].double()


def wanted_sums(of: ExpertWeights) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """In float64."""
    gated_by, gated, last = map(unpacked, (of.gate, of.up, of.down))

    def part(expert: int, x: Tensor) -> Tensor:
        gate, up = gated_by(expert, x), gated(expert, x)
        if of.activation == CLAMPED_SILU:
            gate, up = gate.clamp(max=of.limit), up.clamp(-of.limit, of.limit) + 1
            gate = gate * torch.sigmoid(gate * of.alpha)
        else:
            gate = functional.silu(gate) if of.activation == SILU else gelu(gate)
        return last(expert, gate * up)

    def sums(x: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
        for token, one in enumerate(x.double()):
            for expert, share in zip(experts[token].tolist(), shares[token].tolist(), strict=True):
                out[token] += share * part(expert, one)
        return out

    return sums


def gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def some_tokens(tokens: int, chosen: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    experts = torch.rand(tokens, EXPERTS, generator=draw).topk(chosen).indices
    x = torch.randn(tokens, HIDDEN, generator=draw)
    return x, experts, torch.randn(tokens, chosen, generator=draw)


@pytest.mark.parametrize("kinds", ["Q4_K Q4_K Q6_K", "Q8_0 Q4_1 Q5_0", "Q4_1 Q8_0", "MXFP4 IQ4_NL"])
@pytest.mark.parametrize("threads", [1, 3])
def test_each_token_gets_the_sum_of_its_experts(
    engine: ctypes.CDLL, kinds: str, threads: int
) -> None:
    pool = Pool(threads) if threads > 1 else None
    for activation in (SILU, GELU_TANH, CLAMPED_SILU):
        bias = torch.float32 if activation == CLAMPED_SILU else None
        of = mixture(kinds, activation, bias=bias)
        bound, wanted_of = BoundMixture(of, engine=engine), wanted_sums(of)
        for tokens in range(9):
            inputs = some_tokens(tokens)
            found = bound.sums(*inputs, pool)
            assert found.shape == (tokens, HIDDEN)
            wanted = wanted_of(*inputs)
            assert (found.double() - wanted).norm() <= 2e-4 * wanted.norm()


def test_a_token_gets_the_same_with_others_and_in_any_layout(engine: ctypes.CDLL) -> None:
    bound = BoundMixture(mixture("Q4_K Q6_K", exact=False), engine=engine)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, experts, shares = some_tokens(8)
        x = (x / 64).to(dtype)
        found = bound.sums(x, experts, shares, None)
        assert found.dtype == dtype
        each = zip(x.split(1), experts.split(1), shares.split(1), strict=True)
        alone = [bound.sums(*one, None) for one in each]
        assert torch.equal(found, torch.cat(alone))
        others = bound.sums(x.T.contiguous().T, experts.int(), shares.T.contiguous().T, None)
        assert torch.equal(found, others)
        order = torch.tensor([2, 0, 1])
        assert torch.equal(found, bound.sums(x, experts[:, order], shares[:, order], None))
        assert not bound.sums(x, experts[:, :0], shares[:, :0], None).any()


def test_mixtures_that_do_not_fit_are_refused(engine: ctypes.CDLL) -> None:
    bound, (x, experts, shares) = BoundMixture(mixture("Q4_K Q6_K"), engine=engine), some_tokens(2)
    with pytest.raises(ShapeError, match=r"x must be \[T, 256\].*got \[2, 255\], \[2, 3\]"):
        bound.sums(x[:, 1:], experts, shares, None)
    with pytest.raises(ShapeError, match=r"got \[1, 256\], \[2, 3\] and \[2, 3\]"):
        bound.sums(x[:1], experts, shares, None)
    with pytest.raises(ShapeError, match=r"got \[2, 256\], \[2, 3\] and \[2, 2\]"):
        bound.sums(x, experts, shares[:, 1:], None)
    with pytest.raises(ShapeError, match=r"got \[2, 256\], \[2\] and \[2\]"):
        bound.sums(x, experts[:, 0], shares[:, 0], None)
    with pytest.raises(ShapeError, match=r"got \[2, 256\], \[2\] and \[2\]"):
        bound.sums(x, experts[:, 0], shares[:, 0], None)
    with pytest.raises(ConfigError, match=r"x must be float32.*got torch\.float64 on cpu"):
        bound.sums(x.double(), experts, shares, None)
    for expert in (-1, EXPERTS):
        with pytest.raises(ConfigError, match="experts must be numbers of matrices"):
            bound.sums(x, torch.full_like(experts, expert), shares, None)
    of_halves = BoundMixture(mixture("Q4_K Q6_K", bias=torch.float16), engine=engine)
    assert [of_halves.takes(one) for one in (torch.float16, torch.float32)] == [True, False]
    with pytest.raises(ConfigError, match=r"x must be of the dtype of the biases.*float32"):
        of_halves.sums(x, experts, shares, None)
    with pytest.raises(ConfigError, match="tokens must be 0 to 8"):
        bound.sums(*some_tokens(9), None)


def test_what_is_not_a_number_stays_with_its_token(engine: ctypes.CDLL) -> None:
    bound, (x, experts, shares) = BoundMixture(mixture("Q4_K Q6_K"), engine=engine), some_tokens(3)
    x[1, 7] = torch.nan
    assert bound.sums(x, experts, shares, None).isnan().any(1).tolist() == [False, True, False]
