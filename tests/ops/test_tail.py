"""What is estimated from moments, held against integrals and against entries that are normal."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.ops import tail
from hybrid_kv.ops.tail import AttendedSums, Tail, capped

HEADS, DIM = 2, 24
NEAR = {"rtol": 1e-4, "atol": 1e-4}


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


def total(known: Tail) -> tuple[Tensor, ...]:
    """Moments of all entries, as of one cluster, in float64."""
    shares, keys, values, key_key, key_value = (t.double() for t in known.tensors().values())
    shares = shares[..., None]
    mean, value = (shares * keys).sum(1), (shares * values).sum(1)
    between = shares * (keys - mean[:, None])
    return mean, value, key_key + between.mT @ keys, key_value + between.mT @ values


def one_cluster(k: Tensor, v: Tensor) -> Tail:
    """The moments of entries as of one cluster."""
    keys, values, *covariances = (t.float() for t in total(Tail.of(k, v)))
    return Tail(k.shape[1], torch.ones(HEADS, 1), keys[:, None], values[:, None], *covariances)


def assert_moments(got: Tail, k: Tensor, v: Tensor) -> None:
    assert got.clusters == tail.clusters_of(k.shape[1])
    for one, other in zip(total(got), moments(k, v), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


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
    assert got.clusters == tail.MOST_CLUSTERS
    for one, other in zip(total(got)[::2], moments(k, v)[::2], strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.05)


def test_a_tail_grows_with_what_comes_and_not_with_every_token() -> None:
    k, v = entries(2000)
    k[:, 1000:] += 1
    first = Tail.of(k[:, :1000], v[:, :1000])
    assert not first.is_outgrown(1255)
    assert first.is_outgrown(1256)
    grown = first.grown(k[:, :1300], v[:, :1300]).grown(k, v)
    assert grown.count == 2000
    assert_moments(grown, k, v)
    long = Tail(16_000, *(torch.zeros(1) for _ in range(5)))
    assert not long.is_outgrown(16_999)
    assert long.is_outgrown(17_000)


def nothing(rows: int) -> AttendedSums:
    """No entry is attended exactly."""
    return AttendedSums(torch.zeros(HEADS, rows), torch.zeros(HEADS, rows))


def integral(
    mean: float, deviation: float, limit: float, softcap: float | None
) -> tuple[float, float, float]:
    """Log E[exp(f(s)) | s below], and the means of s by that weight and without, as sums over a
    fine grid.
    """
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
    return float(lse), float((weights * s).sum()), float((density.softmax(0) * s).sum())


@pytest.mark.parametrize("size", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("cut", [-8.0, -1.0, 0.0, 2.0, math.inf])
def test_what_is_left_is_the_part_of_a_gaussian_below_the_limit(size: float, cut: float) -> None:
    known = one_cluster(*entries(500))
    q = size * torch.randn(HEADS, 3, DIM, generator=torch.Generator().manual_seed(4))
    scale = 0.37
    mean = scale * torch.einsum("hmd,hd->hm", q, known.keys[:, 0]).double()
    variance = scale**2 * torch.einsum("hmd,hde,hme->hm", q, known.key_key, q).double()
    limit = mean + cut * variance.sqrt()
    left = torch.tensor([[1, 20, 300]]).expand(HEADS, -1)
    out, lse, _ = known.attend(q, left, nothing(3), limit.float(), scale=scale)
    lean = scale * torch.einsum("hmd,hde->hme", q, known.key_value).double()
    for h in range(HEADS):
        for m in range(3):
            at = float(mean[h, m]), float(variance[h, m].sqrt()), float(limit[h, m])
            expected, weighed, plain = integral(*at, None)
            expected += math.log(int(left[h, m]))
            assert float(lse[h, m]) == pytest.approx(expected, abs=2e-3)
            # Nothing is attended, so that the plain mean is that of all entries.
            plain = math.exp(-(at[1] ** 2) / 2) * (plain - at[0])
            along = lean[h, m] * (weighed - at[0] - plain) / at[1] ** 2
            torch.testing.assert_close(
                out[h, m].double(), known.values[h, 0].double() + along, rtol=2e-3, atol=2e-3
            )


def test_capped_logits_are_taken_as_normal_too() -> None:
    """Where the cap hardly bends them the estimate is that of the integral."""
    known = one_cluster(*entries(500))
    q = 0.5 * torch.randn(HEADS, 1, DIM, generator=torch.Generator().manual_seed(4))
    mean = torch.einsum("hmd,hd->hm", q, known.keys[:, 0]).double()
    deviation = torch.einsum("hmd,hde,hme->hm", q, known.key_key, q).double().sqrt()
    left = torch.full((HEADS, 1), 50)
    for limit in (torch.full((HEADS, 1), math.inf), (mean + deviation).float()):
        _, lse, _ = known.attend(q, left, nothing(1), capped(limit, 30.0), scale=1.0, softcap=30.0)
        for h in range(HEADS):
            at = float(mean[h]), float(deviation[h]), float(capped(limit, 30.0)[h])
            assert float(lse[h]) == pytest.approx(integral(*at, 30.0)[0] + math.log(50), abs=0.1)


@pytest.mark.parametrize("limit", [-300.0, 0.0, math.inf])
def test_nothing_left_weighs_nothing(limit: float) -> None:
    known = Tail.of(*entries(40))
    attended = AttendedSums(torch.full((HEADS, 2), 40), torch.randn(HEADS, 2))
    part = known.attend(
        torch.randn(HEADS, 2, DIM), 40, attended, torch.full((HEADS, 2), limit), scale=1.0
    )
    assert bool((part.lse == -torch.inf).all())
    assert bool((part.discount == -torch.inf).all())
    assert bool(part.without(torch.randn(HEADS, 2, DIM)).out.isfinite().all())


def test_one_entry_and_entries_that_are_all_alike_are_no_error() -> None:
    k, v = entries(1)
    q = torch.randn(HEADS, 3, DIM)
    for count in (1, 300):
        known = Tail.of(k.expand(-1, count, -1), v.expand(-1, count, -1))
        limit = (0.2 * q @ k.mT)[..., 0] + 0.1
        out, lse, _ = known.attend(q, count, nothing(3), limit, scale=0.2)
        torch.testing.assert_close(out, v.expand(-1, 3, -1), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse, limit - 0.1 + math.log(count), rtol=1e-3, atol=1e-3)


def test_of_normal_entries_the_estimate_is_nearly_what_attention_gives() -> None:
    k, v = entries(20_000)
    q = torch.randn(HEADS, 5, DIM, generator=torch.Generator().manual_seed(4))
    logits = 0.4 * q @ k.mT
    best = logits.topk(200).values[..., -1]
    below = logits.masked_fill(logits >= best[..., None], -torch.inf)
    taken = (below == -torch.inf).float()
    attended = AttendedSums(taken.sum(-1), (taken * logits).sum(-1) / 0.4)
    part = Tail.of(k, v).attend(q, 20_000, attended, best, scale=0.4)
    out, lse = part.without(taken @ v)
    torch.testing.assert_close(lse, below.logsumexp(-1), rtol=0, atol=0.08)
    exact = below.softmax(-1) @ v
    assert float((out - exact).norm() / exact.norm()) < 0.08


@pytest.mark.parametrize("form", ["gaussian", "first_order"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("found", [0, 1, 37, 90])
def test_of_equal_keys_it_is_what_attention_gives(
    form: Any, softcap: float | None, found: int
) -> None:
    """What was found was once counted twice: the unread got the mean value of all."""
    k = torch.randn(HEADS, 1, DIM).expand(-1, 91, -1)
    v, q = torch.randn(HEADS, 91, DIM), torch.randn(HEADS, 3, DIM)
    dots = (q @ k.mT)[..., 0]
    logits = capped(0.3 * dots, softcap)
    attended = AttendedSums(torch.full((HEADS, 3), found), found * dots)
    limit = logits if found else torch.full((HEADS, 3), torch.inf)
    part = Tail.of(k, v).attend(*(q, 91, attended, limit), scale=0.3, softcap=softcap, form=form)
    out, lse = part.without(v[:, :found].sum(1, keepdim=True).expand(-1, 3, -1))
    torch.testing.assert_close(lse, logits + math.log(91 - found), **NEAR)
    torch.testing.assert_close(out, v[:, found:].mean(1, keepdim=True).expand(-1, 3, -1), **NEAR)


def test_to_first_order_entries_never_weigh_more_than_they_do() -> None:
    """Whatever was found, in any order: chunks, samples, or the worst of all."""
    k, v = entries(400)
    q = 2 * torch.randn(HEADS, 5, DIM)
    dots = q @ k.mT
    for ids in (slice(0, 40), slice(100, 399), slice(7, 399, 7)):
        left = torch.ones(400, dtype=torch.bool)
        left[ids] = False
        attended = AttendedSums(
            torch.full((HEADS, 5), int((~left).sum())), dots[..., ~left].sum(-1)
        )
        limit = torch.full((HEADS, 5), -100.0)  # of no meaning here
        part = Tail.of(k, v).attend(q, 400, attended, limit, scale=0.3, form="first_order")
        exact = (0.3 * dots[..., left]).logsumexp(-1)
        assert bool((part.lse <= exact + 1e-4).all())
        mean = 0.3 * dots[..., left].mean(-1) + left.sum().log()
        torch.testing.assert_close(part.lse, mean, rtol=1e-3, atol=1e-3)


def test_entries_that_are_left_out_leave_all_moments() -> None:
    k, v = entries(333)
    without = torch.rand(HEADS, 333) < 0.4
    k[without] += 9
    got = Tail.of(k, v, without)
    assert got.count == 333
    for head in range(HEADS):
        own = slice(head, head + 1)
        kept = ~without[head]
        exact = moments(k[own, kept].expand(HEADS, -1, -1), v[own, kept].expand(HEADS, -1, -1))
        for one, other in zip(total(got), exact, strict=True):
            torch.testing.assert_close(one[head], other[head], rtol=1e-4, atol=1e-4)


def test_of_many_entries_those_that_are_left_out_are_in_no_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tail, "SAMPLES", 64)
    k, v = entries(200)
    hidden = torch.rand(HEADS, 200, generator=torch.Generator().manual_seed(0)) < 0.3
    k, v = (t.masked_fill(hidden[..., None], 100.0) for t in (k, v))
    means = total(Tail.of(k, v, hidden))[:2]
    assert all(float(mean.abs().max()) < 3 for mean in means)


def test_where_all_entries_are_left_out_nothing_is_estimated() -> None:
    k, v = entries(90)
    known = Tail.of(k, v, torch.ones(HEADS, 90, dtype=torch.bool))
    q, limit = torch.randn(HEADS, 2, DIM), torch.zeros(HEADS, 2)
    part = known.attend(q, torch.zeros(HEADS, 1), nothing(2), limit, scale=0.3)
    assert bool((part.lse == -torch.inf).all())
    assert bool(part.out.isfinite().all())


def test_moments_of_a_block_without_gradients_are_renewed_outside_of_it() -> None:
    """A prompt is read under inference_mode, and steps follow under no_grad."""
    with torch.inference_mode():
        known = Tail.of(torch.randn(2, 70, 8), torch.randn(2, 70, 8))
    before = {name: tensor.data_ptr() for name, tensor in known.tensors().items()}
    with torch.no_grad():
        new = Tail.of(torch.randn(2, 79, 8), torch.randn(2, 79, 8))
        filled = known.filled(new)
    assert filled.count == 79
    for name, tensor in filled.tensors().items():
        assert tensor.data_ptr() == before[name]
        assert torch.equal(tensor, new.tensors()[name])


def clustered(count: int) -> tuple[Tensor, Tensor]:
    """Keys in eight groups far apart, and values that differ by group."""
    draw = torch.Generator().manual_seed(2)
    centres, values = 2 * torch.randn(2, 8, DIM, generator=draw)
    group = torch.arange(count) % 8
    noise = torch.randn(2, HEADS, count, DIM, generator=draw)
    return centres[group] + 0.4 * noise[0], values[group] + 0.4 * noise[1]


def test_of_keys_in_groups_clusters_know_what_one_gaussian_does_not() -> None:
    k, v = clustered(4000)
    q = torch.randn(HEADS, 9, DIM, generator=torch.Generator().manual_seed(4))
    logits = 0.5 * q @ k.mT
    best = logits.topk(40).values[..., -1]
    taken = (logits >= best[..., None]).float()
    attended = AttendedSums(taken.sum(-1), (taken * logits).sum(-1) / 0.5)
    below = logits.masked_fill(taken.bool(), -torch.inf)
    exact, errors = below.softmax(-1) @ v, []
    for known in (one_cluster(k, v), Tail.of(k, v)):
        out, lse = known.attend(q, 4000, attended, best, scale=0.5).without(taken @ v)
        off = (lse - below.logsumexp(-1)).abs().mean()
        errors.append((float((out - exact).norm() / exact.norm()), float(off)))
    assert errors[1][0] < 0.15 < 0.3 < errors[0][0], errors
    assert errors[1][1] < 0.1 < errors[0][1], errors


def test_what_grows_has_clusters_of_its_own_as_long_as_there_may_be_more() -> None:
    """A context that began with one cluster would have kept it for good."""
    k, v = entries(3000)
    k[:, 1000:] += 3 * torch.randn(1, DIM)
    known = Tail.of(k[:, :30], v[:, :30])
    assert known.clusters == 1
    for count in (400, 1000, 2000, 3000):
        known = known.grown(k[:, :count], v[:, :count])
        assert_moments(known, k[:, :count], v[:, :count])
    torch.testing.assert_close(known.shares.sum(-1), torch.ones(HEADS))


def test_moments_of_more_clusters_take_memory_of_their_own() -> None:
    small, large = (Tail.of(*entries(count)) for count in (40, 700))
    assert small.filled(large) is large
