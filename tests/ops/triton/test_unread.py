"""The estimate of what a search left: the kernel against the definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybrid_kv.ops.dispatch import Ops
from hybrid_kv.ops.tail import Form, Tail, UnreadPart, attend_unread
from tests.ops.triton.where import needs_kernels

needs_kernels()
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log")
HEADS, ROWS, ENTRIES, FOUND = 2, 3, 700, 40
NEAR = {"rtol": 2e-5, "atol": 2e-5}


class Scene:
    """Entries of two KV heads, and what a search for 3 queries of each has found of them."""

    def __init__(self, device: str, dim: int, *, size: float = 1.0) -> None:
        draw = torch.Generator().manual_seed(dim)
        mix, lean = torch.randn(2, HEADS, dim, dim, generator=draw) * dim**-0.5
        self.k = torch.randn(HEADS, ENTRIES, dim, generator=draw) @ mix + 0.3
        self.v = self.k @ lean + torch.randn(HEADS, ENTRIES, dim, generator=draw)
        self.q = size * torch.randn(HEADS, ROWS, dim, generator=draw)
        exact = self.q @ self.k.mT
        self.scores = exact[..., :: ENTRIES // FOUND][..., :FOUND].clone()
        self.limit = self.scores.topk(7).values[..., -1]
        self.known = Tail.of(self.k, self.v).to(torch.device(device))
        self.seen = torch.tensor(ENTRIES)
        self.device = device

    def expect(
        self,
        ops: Ops,
        own: slice,
        *,
        scale: float,
        softcap: float | None = None,
        form: Form = "gaussian",
        off: float = 2e-5,
    ) -> UnreadPart:
        """What both say, held together, but for `off`."""
        there = [t.to(self.device) for t in (self.q, self.scores, self.limit)]
        asked = self.known, *there, own, self.seen.to(self.device)
        got = ops.attend_unread(*asked, scale=scale, softcap=softcap, form=form)
        assert ops.served["attend_unread"] == "triton"
        exact = attend_unread(*asked, scale=scale, softcap=softcap, form=form)
        assert {t.dtype for t in got} == {torch.float32}
        torch.testing.assert_close(got.lse, exact.lse, rtol=off, atol=off)
        torch.testing.assert_close(got.discount, exact.discount, rtol=off, atol=off)
        torch.testing.assert_close(got.out, exact.out, rtol=10 * off, atol=10 * off)
        return got


@pytest.mark.parametrize("form", ["gaussian", "first_order"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("dim", "size"), [(72, 0.2), (72, 6.0), (16, 1.0), (33, 1.0)])
def test_it_is_that_of_the_definition(
    ops: Ops, device: str, dim: int, size: float, softcap: float | None, form: Form
) -> None:
    scene = Scene(device, dim, size=size)
    scene.expect(ops, slice(0, FOUND), scale=dim**-0.5, softcap=softcap, form=form)


def test_queries_in_16_bit_are_taken_as_they_are(ops: Ops, device: str) -> None:
    scene = Scene(device, 24)
    scene.q = scene.q.bfloat16()
    scene.expect(ops, slice(0, FOUND), scale=0.2)


def test_an_extent_counts_what_is_attended_of_its_own(ops: Ops, device: str) -> None:
    """The lowest that is attended is that of all extents."""
    scene = Scene(device, 24)
    scene.limit[0, 0] = scene.scores[0, 0].amin()
    scene.scores[0, 1, 5:] = -math.inf
    scene.limit[0, 1] = -math.inf
    whole, first, second = (
        scene.expect(ops, own, scale=0.2).lse
        for own in (slice(0, FOUND), slice(0, 15), slice(15, FOUND))
    )
    assert (whole <= torch.minimum(first, second)).all()
    left = torch.tensor([ENTRIES - FOUND, ENTRIES - 15, ENTRIES - (FOUND - 15)])
    weights = torch.stack([whole, first, second]).cpu()[:, 0, 0] - left.log()
    torch.testing.assert_close(weights, weights[:1].expand(3), **NEAR)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("deviations", [-300.0, -9.0, -1.0, -1e-3, 0.0, 1.0, 4.0, 9.0, 300.0])
def test_wherever_the_limit_lies(
    ops: Ops, device: str, deviations: float, softcap: float | None
) -> None:
    scene = Scene(device, 24)
    q = scene.q
    dots = q @ scene.k.mT
    mean, spread = dots.mean(-1), dots.std(-1)
    scene.scores[..., 0] = scene.limit = mean + deviations * spread
    scene.scores[..., 1:] = -math.inf
    off = 2e-3 if deviations < -100 else 2e-5  # squares of the clusters' distances differ there
    for scale in (0.05, 0.5, 3.0):
        scene.expect(ops, slice(0, FOUND), scale=scale, softcap=softcap, off=off)


def test_of_nothing_found_all_is_left_and_of_nothing_left_nothing(ops: Ops, device: str) -> None:
    scene = Scene(device, 24)
    scene.scores.fill_(-math.inf)
    lse = scene.expect(ops, slice(0, FOUND), scale=0.2).lse
    exact = (0.2 * scene.q @ scene.k.mT).logsumexp(-1)
    torch.testing.assert_close(lse.cpu(), exact, rtol=0, atol=0.1)
    scene.seen = torch.tensor(0)
    part = scene.expect(ops, slice(0, FOUND), scale=0.2)
    assert bool((part.lse == -math.inf).all())
    assert bool(part.out.isfinite().all())


def test_entries_that_are_all_alike_are_no_error(ops: Ops, device: str) -> None:
    scene = Scene(device, 24)
    k, v = (t[:, :1].round().expand(-1, ENTRIES, -1) for t in (scene.k, scene.v))
    scene.known = Tail.of(k, v).to(torch.device(device))
    scene.scores.fill_(-math.inf)
    scene.expect(ops, slice(0, FOUND), scale=0.2)
    scene.scores[..., 0] = scene.limit = (scene.q @ k.mT)[..., 0] + 0.01
    part = scene.expect(ops, slice(0, FOUND), scale=0.2)
    expected: Tensor = v[:, :1].expand(-1, ROWS, -1)
    torch.testing.assert_close(part.out.cpu(), expected, rtol=1e-2, atol=1e-2)
