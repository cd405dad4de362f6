from __future__ import annotations

import math
from itertools import pairwise, permutations

import pytest
import torch

from hybrid_kv.errors import ShapeError
from hybrid_kv.ops import reference
from hybrid_kv.runtime.step import apply_sink, empty_partial, merge_partials
from hybrid_kv.types import PartialAttention
from tests.oracle import softmax_attention
from tests.tolerances import TOLERANCES, Tolerance

DIM = 72
CUTS = (0, 11, 12, 12, 37)  # an odd part, one key, no key, the rest

Scene = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def scene(keys: int = 37) -> Scene:
    return torch.randn(2, 3, 5, DIM), torch.randn(2, 3, keys, DIM), torch.randn(2, 3, keys, DIM)


def parts_of(data: Scene, dtype: torch.dtype = torch.float32) -> list[PartialAttention]:
    q, k, v = data
    return [
        PartialAttention(part.out.to(dtype), part.lse)
        for start, stop in pairwise(CUTS)
        for part in [reference.attend(q, k[:, :, start:stop], v[:, :, start:stop], scale=0.3)]
    ]


def assert_same(one: PartialAttention, other: PartialAttention, tolerance: Tolerance) -> None:
    torch.testing.assert_close(one.out, other.out, check_dtype=False, **tolerance)
    torch.testing.assert_close(one.lse, other.lse, check_dtype=False, **TOLERANCES[torch.float32])


def whole(data: Scene) -> PartialAttention:
    return PartialAttention(*softmax_attention(*data, scale=0.3))


def test_merge_of_parts_is_attention_over_the_union(
    dtype: torch.dtype, tolerance: Tolerance
) -> None:
    data = scene()
    merged = merge_partials(parts_of(data, dtype))
    assert (merged.out.dtype, merged.lse.dtype) == (dtype, torch.float32)
    assert_same(merged, whole(data), tolerance)


def test_merge_is_order_independent() -> None:
    data = scene()
    for order in permutations(parts_of(data)):
        assert_same(merge_partials(order), whole(data), TOLERANCES[torch.float32])


def test_merge_is_associative() -> None:
    a, b, c, d = parts_of(scene())
    at_once = merge_partials([a, b, c, d])
    for nested in (
        merge_partials([merge_partials([a, b]), merge_partials([c, d])]),
        merge_partials([a, merge_partials([b, merge_partials([c, d])])]),
        merge_partials([merge_partials([merge_partials([a, b]), c]), d]),
    ):
        assert_same(nested, at_once, TOLERANCES[torch.float32])


def test_merge_with_an_empty_part_is_identity() -> None:
    part = parts_of(scene())[0]
    empty = empty_partial(part.out)
    for merged in (merge_partials([part, empty]), merge_partials([empty, part, empty])):
        assert torch.equal(merged.out, part.out)
        assert torch.equal(merged.lse, part.lse)


def test_merge_of_only_empty_parts_is_empty_and_not_nan() -> None:
    empty = empty_partial(torch.randn(2, 3, 5, DIM))
    merged = merge_partials([empty, empty, empty])
    assert torch.equal(merged.out, torch.zeros_like(merged.out))
    assert (merged.lse == -torch.inf).all()


def test_rows_may_be_empty_in_different_parts() -> None:
    q, k, v = scene(keys=4)
    bias = torch.zeros(5, 4)
    bias[0] = -torch.inf  # row 0 sees nothing here
    near = reference.attend(q, k[:, :, :2], v[:, :, :2], scale=0.3, bias=bias[:, :2])
    far = reference.attend(q, k[:, :, 2:], v[:, :, 2:], scale=0.3, bias=bias[:, 2:].flip(0))
    bias[:, 2:] = bias[:, 2:].flip(0)
    exact = PartialAttention(*softmax_attention(q, k, v, scale=0.3, bias=bias))
    assert_same(merge_partials([near, far]), exact, TOLERANCES[torch.float32])


def test_lse_is_a_natural_logarithm() -> None:
    q, k, v = scene()
    merged = merge_partials(parts_of((q, k, v)))
    logits = torch.einsum("bhmd,bhnd->bhmn", q.double(), k.double()) * 0.3
    exact = torch.logsumexp(logits, -1)
    torch.testing.assert_close(merged.lse.double(), exact, **TOLERANCES[torch.float32])


def test_far_apart_logits_neither_overflow_nor_vanish() -> None:
    out = torch.randn(3, DIM)
    parts = [PartialAttention(out * i, torch.full((3,), lse)) for i, lse in enumerate((-9e4, 9e4))]
    merged = merge_partials(parts)
    assert torch.equal(merged.out, out)
    assert torch.equal(merged.lse, torch.full((3,), 9e4))


def test_parts_of_mixed_dtypes_merge_in_float32_to_the_dtype_of_the_first() -> None:
    data = scene()
    a, b, c, d = parts_of(data)
    half = PartialAttention(a.out.half(), a.lse)
    rough = PartialAttention(b.out.bfloat16(), b.lse.double())
    merged = merge_partials([half, rough, c, d])
    assert (merged.out.dtype, merged.lse.dtype) == (torch.float16, torch.float32)
    assert_same(merged, whole(data), TOLERANCES[torch.bfloat16])


def test_inputs_are_left_alone() -> None:
    parts = parts_of(scene())
    before = [part.out.clone() for part in parts]
    merge_partials(parts)
    assert all(torch.equal(part.out, old) for part, old in zip(parts, before, strict=True))


def test_no_parts_are_refused() -> None:
    with pytest.raises(ShapeError, match="at least one partial attention, got none"):
        merge_partials([])


@pytest.mark.parametrize("wrong", ["out", "lse"])
def test_parts_of_other_shapes_are_refused(wrong: str) -> None:
    a, b, *_ = parts_of(scene())
    bad = b._replace(out=b.out[..., :-1]) if wrong == "out" else b._replace(lse=b.lse[..., :-1])
    with pytest.raises(ShapeError, match=r"out \(2, 3, 5, 72\) and lse without its last axis"):
        merge_partials([a, bad])


def test_a_sink_is_one_more_logit_without_value(dtype: torch.dtype, tolerance: Tolerance) -> None:
    q, k, v = (x.to(dtype) for x in scene())
    sinks = torch.tensor([-2.0, 0.5, 3.0])
    part = reference.attend(q, k, v, scale=0.3)
    part = PartialAttention(part.out.to(dtype), part.lse)
    zero = torch.zeros(2, 3, 1, DIM)
    bias = torch.zeros(2, 3, 5, 38)
    bias[..., -1] = sinks[None, :, None]
    exact, _ = softmax_attention(
        q,
        torch.cat([k, zero.to(dtype)], 2),
        torch.cat([v, zero.to(dtype)], 2),
        scale=0.3,
        bias=bias,
    )
    torch.testing.assert_close(apply_sink(part, sinks).double(), exact, **tolerance)


def test_a_sink_keeps_an_empty_part_at_zero() -> None:
    empty = empty_partial(torch.randn(1, 3, 2, DIM))
    assert torch.equal(apply_sink(empty, torch.randn(3)), torch.zeros(1, 3, 2, DIM))


def test_an_empty_part_has_the_dtype_of_its_queries(dtype: torch.dtype) -> None:
    part = empty_partial(torch.randn(3, DIM).to(dtype))
    assert (part.out.dtype, part.lse.dtype) == (dtype, torch.float32)
    assert part.lse.tolist() == [-math.inf] * 3
