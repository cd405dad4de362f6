"""A decoder layer around its attention, on every instruction set, against torch in float64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybrid_kv.ops.native.bindings import GELU_TANH, NORM, NORM_CENTRED, NORM_ONCE, SILU
from hybrid_kv.ops.native.decoder import BoundDecoder, DecoderWeights, Matrix, Norm
from hybrid_kv.ops.native.library import Pool
from hybrid_kv.ops.native.linear import PACKED_KINDS
from tests.ops.native.engines import engine_params
from tests.ops.native.packed_data import dequantised, random_weight
from tests.pairs import in_pairs

HEADS, KV_HEADS, DIM, HIDDEN, INNER = 8, 2, 32, 256, 512
SIZES = {
    **{"query": (HEADS * DIM, HIDDEN), "key": (KV_HEADS * DIM, HIDDEN)},
    **{"value": (KV_HEADS * DIM, HIDDEN), "output": (HIDDEN, HEADS * DIM)},
    **{"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)},
}


FORMS = {"plain": NORM, "norms": NORM_ONCE, "gemma": NORM_CENTRED}


def matrices(kind: str, dtype: torch.dtype) -> dict[str, Matrix]:
    """Of one kind of blocks, or plain; two have a bias."""
    made = {}
    for name, (rows, columns) in SIZES.items():
        bias = torch.randn(rows, dtype=dtype) if name in ("query", "down") else None
        if kind == "plain":
            made[name] = Matrix((torch.randn(rows, columns) * columns**-0.5).to(dtype), bias)
        else:
            made[name] = Matrix(random_weight(kind, rows, columns), bias, exact=True)
    return made


def layer(kind: str, dtype: torch.dtype, form: str = "plain") -> DecoderWeights:
    """Of a form: `plain`, with `norms` of queries and keys that are rounded once, or that of
    `gemma` with these.
    """

    def norm(size: int, epsilon: float) -> Norm:
        around_zero = torch.randn(size).mul(0.1)
        weight = around_zero if form == "gemma" else 1 + around_zero
        return Norm(weight.to(dtype), epsilon, FORMS[form])

    named = {name: norm(HIDDEN, 1e-3) for name in ("before_attention", "before_feed_forward")}
    heads = [None, None] if form == "plain" else [norm(DIM, 0.5) for _ in range(2)]
    weights = DecoderWeights(
        **named, of_queries=heads[0], of_keys=heads[1], **matrices(kind, dtype)
    )
    if form != "gemma":
        return weights
    after = {name: norm(HIDDEN, 1e-3) for name in ("after_attention", "after_feed_forward")}
    return weights._replace(**after, activation=GELU_TANH, residual_scale=0.3)


def normed(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    mean = x.square().mean(-1, keepdim=True)
    return x * (mean + norm.epsilon).rsqrt() * (norm.weight.double() + (norm.form == NORM_CENTRED))


def gated(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    if activation == SILU:
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh") * up


def product(x: Tensor, matrix: Matrix) -> Tensor:
    weight, bias, _ = matrix
    wide = weight.double() if isinstance(weight, Tensor) else dequantised(weight)
    return functional.linear(x, wide, None if bias is None else bias.double())


def turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    x, rest = x.split((cosines.shape[-1], x.shape[-1] - cosines.shape[-1]), dim=-1)
    low, high = x.chunk(2, dim=-1)
    x = x * cosines[:, None].double() + torch.cat((-high, low), -1) * sines[:, None].double()
    return torch.cat((x, rest), -1)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.square().mean().sqrt())


KINDS = [
    *(("plain", dtype) for dtype in (torch.bfloat16, torch.float16)),
    *((kind, dtype) for kind in PACKED_KINDS for dtype in (torch.float32, torch.bfloat16)),
]


@pytest.mark.parametrize(
    ("engine", "of", "form"),
    in_pairs(engine_params(), KINDS, ("plain", "norms", "gemma")),
    ids=str,
    indirect=["engine"],
)
def test_a_layer_is_its_operations_one_after_the_other(
    engine: ctypes.CDLL, of: tuple[str, torch.dtype], form: str
) -> None:
    (kind, dtype), pool = of, Pool(2)
    weights = layer(kind, dtype, form)
    bound = BoundDecoder(weights, DIM, partial=True, engine=engine)
    limit = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    for rows, tokens, channels in ((1, 1, DIM), (2, 3, 22), (1, 8, 0)):
        hidden = torch.randn(rows, tokens, HIDDEN, dtype=dtype)
        angles = torch.randn(1, tokens, channels // 2).repeat(1, 1, 2)
        rotation = angles.cos().to(dtype), angles.sin().to(dtype)
        given = rotation if channels else ()
        assert bound.takes(hidden, given)
        found = bound.inputs(hidden, given, pool)
        x = hidden.double().view(-1, HIDDEN)
        cosines, sines = (part.expand(rows, -1, -1).flatten(0, 1) for part in rotation)
        inner = normed(x, weights.before_attention)
        q, k, v = (
            product(inner, one).unflatten(-1, (-1, DIM))
            for one in (weights.query, weights.key, weights.value)
        )
        q, k = normed(q, weights.of_queries), normed(k, weights.of_keys)
        assert error(found.queries, turned(q, cosines, sines)) < limit
        assert error(found.keys, turned(k, cosines, sines)) < limit
        assert error(found.values, v) < limit
        attended = torch.randn(rows, tokens, HEADS, DIM, dtype=dtype)
        out = bound.outputs(hidden, attended, pool)
        back = product(attended.double().view(-1, HEADS * DIM), weights.output)
        x = x + weights.residual_scale * normed(back, weights.after_attention)
        inner = normed(x, weights.before_feed_forward)
        inner = gated(product(inner, weights.gate), product(inner, weights.up), weights.activation)
        back = normed(product(inner, weights.down), weights.after_feed_forward)
        x = x + weights.residual_scale * back
        assert out.shape == hidden.shape
        assert error(out.view(-1, HIDDEN), x) < limit


@pytest.mark.parametrize("activation", [SILU, GELU_TANH])
def test_gates_far_from_zero(engine: ctypes.CDLL, activation: int) -> None:
    """Activations of large numbers of both signs are numbers, and what they should be."""
    weights = layer("Q8_0", torch.float32)
    hidden, attended = torch.randn(1, 1, HIDDEN), torch.randn(1, 1, HEADS, DIM)
    steep = Norm(weights.before_feed_forward.weight * 1e4, 1e-3)
    weights = weights._replace(before_feed_forward=steep, activation=activation)
    out = BoundDecoder(weights, DIM, engine=engine).outputs(hidden, attended, None)
    x = hidden.double().view(1, -1) + product(attended.double().view(1, -1), weights.output)
    inner = normed(x, steep)
    gate, up = product(inner, weights.gate), product(inner, weights.up)
    assert float(gate.min()) < -1000 < 1000 < float(gate.max())
    assert error(out.view(1, -1), x + product(gated(gate, up, activation), weights.down)) < 1e-3


@pytest.mark.parametrize("form", ["plain", "gemma"])
def test_a_layer_without_a_feed_forward_ends_before_its_norm(
    engine: ctypes.CDLL, form: str
) -> None:
    weights = layer("Q8_0", torch.float32, form)
    weights = weights._replace(gate=None, up=None, down=None, before_feed_forward=None)
    bound = BoundDecoder(weights, DIM, engine=engine)
    assert not bound.has_feed_forward
    hidden, attended = torch.randn(2, 3, HIDDEN), torch.randn(2, 3, HEADS, DIM)
    out = bound.outputs(hidden, attended, Pool(2))
    back = product(attended.double().flatten(2), weights.output)
    wanted = hidden.double() + weights.residual_scale * normed(back, weights.after_attention)
    assert error(out, wanted) < 1e-3


def test_what_does_not_fit_is_not_taken() -> None:
    bound = BoundDecoder(layer("Q8_0", torch.float32), DIM)
    hidden, angle = torch.randn(1, 1, HIDDEN), torch.randn(1, 1, DIM)
    assert bound.takes(hidden, (angle, angle))
    assert not bound.takes(hidden, None)
    assert not bound.takes(hidden.half(), (angle, angle))
    assert not bound.takes(hidden, (angle, angle.half()))
    assert not bound.takes(hidden[..., 1:], (angle, angle))
    assert not bound.takes(hidden, (angle[..., 2:], angle[..., 2:]))  # a rotation of a part
    assert not bound.takes(hidden.to("meta"), (angle, angle))
    assert not bound.takes(hidden[0], (angle, angle))
    assert not bound.takes(hidden, (angle,))
    assert not bound.takes(hidden, (angle[0], angle[0]))
    two = torch.randn(3, 2, HIDDEN)
    assert bound.takes(two, (torch.randn(1, 2, DIM), torch.randn(3, 2, DIM)))
    assert not bound.takes(two, (angle, angle))  # of fewer tokens
    assert not bound.takes(two, (torch.randn(2, 2, DIM), torch.randn(3, 2, DIM)))
    bound = BoundDecoder(layer("Q8_0", torch.float32), DIM, partial=True)
    assert bound.takes(hidden, (angle[..., 2:], angle[..., 2:]))
    assert not bound.takes(hidden, (angle[..., 1:], angle[..., 1:]))  # of half a pair
    assert not bound.takes(hidden, (angle[..., 2:], angle))
    wide = torch.randn(1, 1, DIM + 2)
    assert not bound.takes(hidden, (wide, wide))


@pytest.mark.parametrize("kind", ["plain", "Q4_K"])
def test_layers_that_lie_in_one(kind: str) -> None:
    weight = torch.randn(24, 256) if kind == "plain" else random_weight(kind, 24, 256)
    whole = Matrix(weight, torch.randn(24), exact=True)
    assert whole.parts([1]) == [whole]
    parts = whole.parts([4, 1, 1])
    x = torch.randn(3, 256).double()
    assert [len(part.bias) for part in parts if part.bias is not None] == [16, 4, 4]
    assert all(part.exact for part in parts)
    found = torch.cat([product(x, part) for part in parts], -1)
    torch.testing.assert_close(found, product(x, whole))


@pytest.mark.parametrize("form", [NORM, NORM_ONCE])
def test_norms_are_rounded_where_their_models_round(engine: ctypes.CDLL, form: int) -> None:
    """Values that come out as they are, but for one product."""
    weights = layer("plain", torch.bfloat16)
    weight = torch.linspace(0.5, 2, HIDDEN).bfloat16()
    eye = torch.eye(HIDDEN, dtype=torch.bfloat16)
    weights = weights._replace(
        before_attention=Norm(weight, 0.0, form), query=Matrix(eye), key=Matrix(eye)
    )
    x = torch.randn(1, 1, HIDDEN).bfloat16()
    found = BoundDecoder(weights, DIM, engine=engine).inputs(x, (), None).queries.flatten()
    wide = x.flatten().float()
    wide = wide * wide.square().mean().rsqrt()
    wanted = weight * wide.bfloat16() if form == NORM else (weight * wide).bfloat16()
    assert (found == wanted).float().mean() > 0.99  # sums of squares have another order
