"""The audit's figures against brute force, and whose turn it is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.runtime import KVCache
from hybrid_kv.runtime.step import Step
from hybrid_kv.store import LayerStore, Retrieved
from hybrid_kv.transfer import Executor, SyncExecutor
from hybrid_kv.transfer.cuda import CudaExecutor
from hybrid_kv.types import LayerShape, ModelInfo, PartialAttention, TokenBudget
from hybrid_kv.watch import audit
from hybrid_kv.watch.audit import Audit, Estimate, Finding, Look, Target
from tests.kit import held
from tests.store.scene import append, offload
from tests.transfer.late import LateLane

SHAPE = LayerShape(3, 6, 2, 72)
SHAPES = [LayerShape(i, 6, 2, 72) for i in range(3)]


def layer_of(near: int, *far: int) -> tuple[LayerStore, Tensor, Tensor]:
    """A layer with resident entries and extents of cold ones; all k, v [Hkv, N, D], cold first."""
    layer = LayerStore(SHAPE, 4, 1, torch.float32, torch.device("cpu"))
    total = near + sum(far)
    k, v = torch.randn(2, 2, total, 72)
    start = 0
    for count in far:
        offload(layer, k[:, start : start + count], v[:, start : start + count], apart=True)
        start += count
    append(layer, k[None, :, start:], v[None, :, start:])
    return layer, k, v


def attention(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, softcap: float | None
) -> PartialAttention:
    """Of q [Hkv, M, D] over the kept entries [Hkv, M, N]; in float64."""
    logits = torch.einsum("hmd,hnd->hmn", q.double(), k.double()) * 0.3
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~kept, -torch.inf)
    lse = logits.logsumexp(-1)
    return PartialAttention((logits - lse[..., None]).exp() @ v.double(), lse)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("far", [(49,), (30, 21)])
def test_findings_are_those_of_brute_force(
    softcap: float | None, late: bool, far: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_BLOCK", 16)
    layer, k, v = layer_of(9, *far)
    q, cold = torch.randn(2, 3, 72), sum(far)
    kept = torch.rand(2, 3, cold + 9) < 0.3
    kept[..., cold:] = True
    part = attention(q, k, v, kept, softcap)
    parts, start = [], 0
    for extent in held(layer).extents:
        here = kept[..., start : start + extent.length]
        ids = torch.arange(extent.length).expand(here.shape).masked_fill(~here, -1)
        parts.append(extent.found(ids))
        start += extent.length
    found = TokenBudget(7), Retrieved(parts)
    lane = LateLane() if late else None
    executor = CudaExecutor(SyncExecutor(), lambda device: lane)
    whole = attention(q, k, v, torch.ones_like(kept), softcap)
    step = step_of(layer, q, executor, softcap, found={0: found})
    shaped = PartialAttention(part.out.reshape(1, 6, 1, 72), part.lse.reshape(1, 6, 1))
    for head in range(2):
        finding = Look(step, 0, Target(3, head), shaped).finding()
        assert finding is not None
        missed = 1 - (part.lse - whole.lse)[head].exp()
        assert finding.missed_mass == pytest.approx(float(missed.mean()), abs=1e-5)
        error = (part.out - whole.out)[head].norm(dim=-1) / whole.out[head].norm(dim=-1)
        assert finding.output_error == pytest.approx(float(error.mean()), rel=1e-4)
        scores = torch.einsum("md,nd->mn", q[head], k[head, :cold])
        best = scores.topk(7, -1).indices
        assert finding.recall == pytest.approx(float(kept[head].gather(1, best).float().mean()))


def step_of(
    layer: LayerStore,
    q: Tensor,
    executor: Executor | None = None,
    softcap: float | None = None,
    **found: Any,
) -> Step:
    """A step of one new token with grouped queries q [Hkv, M, D]."""
    kv = KVCache(ModelInfo((SHAPE,)), HybridConfig(method="full"), executor)
    return kv.layers[SHAPE.layer_idx].steps.make(
        layer, q.reshape(1, 6, 1, 72), 0.3, softcap, **found
    )


def look(layer: LayerStore, q: Tensor, budget: TokenBudget | None, ids: Tensor | None) -> Look:
    found = {}
    if budget is not None and ids is not None:
        found[0] = budget, Retrieved([held(layer).extents[0].found(ids.expand(2, 3, -1))])
    part = PartialAttention(torch.ones(1, 6, 1, 72), torch.zeros(1, 6, 1))
    return Look(step_of(layer, q, found=found), 0, Target(3, 1), part)


def test_an_index_that_finds_less_than_it_was_asked_for_is_not_excused() -> None:
    layer, _, _ = layer_of(9, 50)
    finding = look(layer, torch.randn(2, 3, 72), TokenBudget(10), torch.tensor([-1, -1])).finding()
    assert finding is not None
    assert finding.recall == 0
    assert finding.missed_by_index == 0, "as many of the best as were attended are none"


def test_what_was_ranked_and_left_out_is_the_budgets_loss() -> None:
    layer, k, _ = layer_of(9, 50)
    q = k[:, :1].expand(2, 3, 72).clone()
    (extent,) = held(layer).extents
    exact = torch.einsum("hmd,hnd->hmn", q, extent.k).topk(10).indices
    ranked = Retrieved([extent.found(exact[..., :3])], 0, [exact])
    found = {0: (TokenBudget(10, shared=True), ranked)}
    part = PartialAttention(torch.ones(1, 6, 1, 72), torch.zeros(1, 6, 1))
    finding = Look(step_of(layer, q, found=found), 0, Target(3, 1), part).finding()
    assert finding is not None
    assert finding.recall == 1
    assert finding.missed_by_index == pytest.approx(0, abs=1e-6)


def test_what_a_better_index_would_have_found_is_the_indexs_loss() -> None:
    layer, k, _ = layer_of(9, 50)
    q = k[:, :1].expand(2, 3, 72).clone()
    best = torch.einsum("hmd,hnd->hmn", q, k[:, :50]).argmax(-1)
    ids = torch.arange(50).repeat(2, 3, 1)
    worse = ids[ids != best[..., None]].view(2, 3, 49)[..., :1]
    lost = look(layer, q, TokenBudget(1), worse).finding()
    assert lost is not None
    cold, logits = (0.3 * q[1].double() @ k[1].double().T).split([50, 9], 1)
    shares = (cold - torch.cat([logits, cold], 1).logsumexp(1)[:, None]).exp()
    expected = shares.amax(1) - shares.gather(1, worse[1])[:, 0]
    assert lost.missed_by_index == pytest.approx(float(expected.mean()), abs=1e-5)
    assert lost.recall == 0


def test_copies_that_a_method_keeps_are_for_no_search_to_find() -> None:
    layer, k, _ = layer_of(9, 50)
    q, copied = torch.randn(2, 3, 72), torch.rand(2, 50) < 0.4
    layer.rows[0].copied = copied
    scores = torch.einsum("hmd,hnd->hmn", q, k[:, :50]).masked_fill(copied[:, None], -torch.inf)
    finding = look(layer, q, TokenBudget(10), scores.topk(10).indices).finding()
    assert finding is not None
    assert (finding.recall, finding.missed_by_index) == (1, pytest.approx(0, abs=1e-6))


def test_of_samples_that_stand_for_others_what_was_not_drawn_is_missed() -> None:
    """Their weights say nothing of it: the step's sum may be right, whatever was read."""
    layer, k, _ = layer_of(9, 50)
    q, drawn = torch.randn(2, 3, 72), torch.arange(0, 50, 3).expand(2, 3, -1)
    part = held(layer).extents[0].found(drawn)._replace(bias=torch.full(drawn.shape, 1.1))
    found = {0: (TokenBudget(10), Retrieved([part]))}
    whole = PartialAttention(torch.ones(1, 6, 1, 72), torch.zeros(1, 6, 1))
    finding = Look(step_of(layer, q, found=found), 0, Target(3, 1), whole).finding()
    assert finding is not None
    logits = 0.3 * q[1].double() @ k[1].double().T
    shares = (logits - logits.logsumexp(1)[:, None]).exp()
    shares[:, drawn[0, 0]], shares[:, 50:] = 0, 0
    assert finding.missed_mass == pytest.approx(float(shares.sum(1).mean()), abs=1e-5)


def test_where_nothing_was_searched_there_is_no_recall() -> None:
    layer, _, _ = layer_of(9, 50)
    finding = look(layer, torch.randn(2, 3, 72), None, None).finding()
    assert finding is not None
    assert finding.recall is None


def test_entries_that_were_written_over_meanwhile_are_no_finding() -> None:
    layer, _, _ = layer_of(9, 50)
    pending = look(layer, torch.randn(2, 3, 72), None, None)
    layer.crop(9 + 10)
    new = torch.randn(2, 5, 72)
    offload(layer, new, new)
    assert pending.finding() is None


def test_pages_that_are_written_over_meanwhile_change_no_finding() -> None:
    layer, _, _ = layer_of(9, 50)
    q = torch.randn(2, 3, 72)
    expected, pending = look(layer, q, None, None).finding(), look(layer, q, None, None)
    layer.crop(9)
    append(layer, *torch.randn(2, 1, 2, 9, 72))
    assert pending.finding() == expected != look(layer, q, None, None).finding()


def test_every_head_has_its_turn() -> None:
    turns, seen = Audit(2, SHAPES), []
    for _ in range(24):
        seen += [target for shape in SHAPES if (target := turns.due(shape.layer_idx))]
    assert len(seen) == 12
    heads = {Target(layer, head) for layer in range(3) for head in range(2)}
    assert set(seen[:6]) == set(seen[6:]) == heads
    assert [t.layer_idx for t in seen[:6]] != sorted(t.layer_idx for t in seen[:6])


def test_estimates_have_their_confidence() -> None:
    looks = Audit(1, SHAPES)
    assert looks.recall() is None
    for layer, recall in ((0, 0.5), (0, 0.7), (1, None), (2, 0.9)):
        looks.findings.append(Finding(Target(layer, 0), recall, 0.25, 0.1))
    estimate = looks.recall()
    assert estimate is not None
    assert estimate == pytest.approx((0.7, 1.96 * 0.2 / math.sqrt(3), 3))
    assert looks.recall(0) == pytest.approx((0.6, 1.96 * math.sqrt(0.02 / 2), 2))
    assert looks.recall(1) is None
    single = looks.missed_mass(2)
    assert single is not None
    assert single.mean == 0.25
    assert math.isnan(single.half_width)
    assert Estimate.of([]) is None
