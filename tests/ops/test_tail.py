"""What is estimated from moments, held against integrals and against entries that are normal."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybrid_kv.ops import tail
from hybrid_kv.ops.tail import Tail, capped

HEADS, DIM = 2, 24


def entries(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Normal keys and values [Hkv, n, D] that depend on each other."""
    draw = torch.Generator().manual_seed(seed)
    mix, lean = torch.randn(2, HEADS, DIM, DIM, generator=draw) * DIM**-0.5
    k = torch.randn(HEADS, count, DIM, generator=draw) @ mix + 0.3
    return k, k @ lean + torch.randn(HEADS, count, DIM, generator=draw)


def moments(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Means and covariances in float64."""
    k, v = k.double(), v.double()
    both = torch.stack(
        [torch.cov(torch.cat(kv, -1).T, correction=0) for kv in zip(k, v, strict=True)]
    )
    return k.mean(1), v.mean(1), both[:, :DIM, :DIM], both[:, :DIM, DIM:]


def assert_moments(got: Tail, k: Tensor, v: Tensor) -> None:
    for one, other in zip(
        (got.keys, got.values, got.key_key, got.key_value), moments(k, v), strict=True
    ):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tail_is_means_and_covariances(dtype: torch.dtype) -> None:
    k, v = (t.to(dtype) for t in entries(333))
    assert Tail.of(k, v).count == 333
    assert_moments(Tail.of(k, v), k, v)


def test_of_many_entries_some_are_taken_from_all_over() -> None:
    k, v = entries(3 * tail.SAMPLES + 7)
    k += torch.linspace(0, 4, k.shape[1])[:, None]  # the last are not as the first
    got = Tail.of(k, v)
    assert got.count == k.shape[1]
    for one, other in zip((got.keys, got.key_key), moments(k, v)[::2], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0.1, atol=0.05)


def test_a_tail_grows_with_what_comes_and_not_with_every_token() -> None:
    k, v = entries(2000)
    k[:, 1000:] += 1
    first = Tail.of(k[:, :1000], v[:, :1000])
    assert not first.is_outgrown(1255)
    assert first.is_outgrown(1256)
    grown = first.grown(k[:, :1300], v[:, :1300]).grown(k, v)
    assert grown.count == 2000
    assert_moments(grown, k, v)
    long = Tail(16_000, *(torch.zeros(1) for _ in range(4)))
    assert not long.is_outgrown(16_999)
    assert long.is_outgrown(17_000)


def integral(
    mean: float, deviation: float, limit: float, softcap: float | None
) -> tuple[float, float]:
    """Log E[exp(f(s)) | s below], and the mean of s by that weight, as sums over a fine grid."""
    top = limit
    if softcap is not None and limit < math.inf:
        top = softcap * math.atanh(limit / softcap)
    low, high = mean - 12 * deviation, min(top, mean + 12 * deviation + deviation**2)
    low = min(low, high - 40)
    s = torch.linspace(low, high, 400_001, dtype=torch.float64)
    density = -0.5 * ((s - mean) / deviation) ** 2
    logits = s if softcap is None else softcap * torch.tanh(s / softcap)
    weights = (density + logits).softmax(0)
    lse = (density + logits).logsumexp(0) - density.logsumexp(0)
    return float(lse), float((weights * s).sum())


@pytest.mark.parametrize("size", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("cut", [-8.0, -1.0, 0.0, 2.0, math.inf])
def test_what_is_left_is_the_part_of_a_gaussian_below_the_limit(size: float, cut: float) -> None:
    known = Tail.of(*entries(500))
    q = size * torch.randn(HEADS, 3, DIM, generator=torch.Generator().manual_seed(4))
    scale = 0.37
    mean = scale * torch.einsum("hmd,hd->hm", q, known.keys).double()
    variance = scale**2 * torch.einsum("hmd,hde,hme->hm", q, known.key_key, q).double()
    limit = mean + cut * variance.sqrt()
    left = torch.tensor([[1, 20, 300]]).expand(HEADS, -1)
    out, lse = known.attend(q, left, limit.float(), scale=scale)
    lean = scale * torch.einsum("hmd,hde->hme", q, known.key_value).double()
    for h in range(HEADS):
        for m in range(3):
            at = float(mean[h, m]), float(variance[h, m].sqrt()), float(limit[h, m])
            expected, weighed = integral(*at, None)
            expected += math.log(int(left[h, m]))
            assert float(lse[h, m]) == pytest.approx(expected, abs=2e-3)
            along = lean[h, m] * (weighed - at[0]) / at[1] ** 2
            torch.testing.assert_close(
                out[h, m].double(), known.values[h].double() + along, rtol=2e-3, atol=2e-3
            )


def test_capped_logits_are_taken_as_normal_too() -> None:
    """Where the cap hardly bends them the estimate is that of the integral."""
    known = Tail.of(*entries(500))
    q = 0.5 * torch.randn(HEADS, 1, DIM, generator=torch.Generator().manual_seed(4))
    mean = torch.einsum("hmd,hd->hm", q, known.keys).double()
    deviation = torch.einsum("hmd,hde,hme->hm", q, known.key_key, q).double().sqrt()
    left = torch.full((HEADS, 1), 50)
    for limit in (torch.full((HEADS, 1), math.inf), (mean + deviation).float()):
        _, lse = known.attend(q, left, capped(limit, 30.0), scale=1.0, softcap=30.0)
        for h in range(HEADS):
            at = float(mean[h]), float(deviation[h]), float(capped(limit, 30.0)[h])
            assert float(lse[h]) == pytest.approx(integral(*at, 30.0)[0] + math.log(50), abs=0.1)


@pytest.mark.parametrize("limit", [-300.0, 0.0, math.inf])
def test_nothing_left_weighs_nothing(limit: float) -> None:
    known = Tail.of(*entries(40))
    out, lse = known.attend(
        torch.randn(HEADS, 2, DIM), torch.zeros(HEADS, 2), torch.full((HEADS, 2), limit), scale=1.0
    )
    assert bool((lse == -torch.inf).all())
    assert bool(out.isfinite().all())


def test_one_entry_and_entries_that_are_all_alike_are_no_error() -> None:
    k, v = entries(1)
    q = torch.randn(HEADS, 3, DIM)
    for count in (1, 300):
        known = Tail.of(k.expand(-1, count, -1), v.expand(-1, count, -1))
        limit = (0.2 * q @ k.mT)[..., 0] + 0.1
        out, lse = known.attend(q, torch.full((HEADS, 3), count), limit, scale=0.2)
        torch.testing.assert_close(out, v.expand(-1, 3, -1), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse, limit - 0.1 + math.log(count), rtol=1e-3, atol=1e-3)


def test_of_normal_entries_the_estimate_is_nearly_what_attention_gives() -> None:
    k, v = entries(20_000)
    q = torch.randn(HEADS, 5, DIM, generator=torch.Generator().manual_seed(4))
    logits = 0.4 * q @ k.mT
    best = logits.topk(200).values[..., -1]
    below = logits.masked_fill(logits >= best[..., None], -torch.inf)
    left = torch.full((HEADS, 5), 20_000 - 200)
    out, lse = Tail.of(k, v).attend(q, left, best, scale=0.4)
    torch.testing.assert_close(lse, below.logsumexp(-1), rtol=0, atol=0.05)
    exact = below.softmax(-1) @ v
    assert float((out - exact).norm() / exact.norm()) < 0.08
