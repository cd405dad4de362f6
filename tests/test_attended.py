"""Exact attention weights for methods, against the softmax written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybrid_kv.entries import Attended, Entries
from hybrid_kv.errors import MethodError
from hybrid_kv.masses import causal_masses
from hybrid_kv.types import HIDDEN, Evidence
from tests.oracle import causal, spread
from tests.tolerances import TOLERANCES

HQ, HKV, DIM, SCALE = 6, 2, 72, 0.11
CLOSE = TOLERANCES[torch.float32]


def weights(q: Tensor, k: Tensor, softcap: float | None, visible: Tensor) -> Tensor:
    """[Hq, M, N] float64."""
    logits = q.double() @ spread(k[None], HQ)[0].double().transpose(1, 2) * SCALE
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.masked_fill(~visible, -torch.inf).softmax(-1)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("new", [1, 5, 37])
def test_masses_of_the_last_queries_are_column_sums_of_the_softmax(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None, new: int
) -> None:
    monkeypatch.setattr("hybrid_kv.masses._BLOCK_BYTES", 4 * HQ * 37 * 3)  # 3 queries at a time
    q, k = torch.randn(HQ, 37, DIM), torch.randn(HKV, 37, DIM)
    expected = weights(q, k, softcap, causal(37, 37))[:, 37 - new :].sum(1).float()
    seen = Evidence(37, last_queries=q, scale=SCALE, softcap=softcap, keys=k)
    torch.testing.assert_close(seen.mass(new), expected, **CLOSE)
    torch.testing.assert_close(seen.mass().sum(), torch.tensor(37.0 * HQ), **CLOSE)


def test_masses_by_a_known_lse_are_the_same() -> None:
    q, k = torch.randn(HQ, 5, DIM), torch.randn(HKV, 37, DIM)
    logits = q @ spread(k[None], HQ)[0].transpose(1, 2) * SCALE
    lse = logits.masked_fill(~causal(5, 37), -torch.inf).logsumexp(-1)
    found = causal_masses(q, k, scale=SCALE, lse=lse)
    torch.testing.assert_close(found, causal_masses(q, k, scale=SCALE), **CLOSE)


def test_masses_without_queries_or_keys_say_what_to_declare() -> None:
    with pytest.raises(MethodError, match="without last_queries; declare Needs"):
        Evidence(37, keys=torch.zeros(HKV, 37, DIM)).mass()
    with pytest.raises(MethodError, match="without keys"):
        Evidence(37, last_queries=torch.zeros(HQ, 5, DIM)).mass()


@pytest.mark.parametrize("lengths", [(9, 9), (9, 2), (0, 4)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("new", [1, 3])
def test_weights_of_a_step_are_those_of_the_softmax(
    lengths: tuple[int, int], biased: bool, new: int
) -> None:
    total, window = 25, torch.arange(9, 25)
    q = torch.randn(HQ, new, DIM)
    k = torch.randn(HKV, total, DIM)
    bias = torch.randn(HKV, 9) if biased else None
    whole = Entries.of(k[:, :9], k[:, :9], torch.arange(9), bias=bias)
    kept = whole.select([torch.arange(n) for n in lengths], room=4)
    visible = causal(new, total).expand(HKV, 3, -1, -1).clone()
    for h, n in enumerate(lengths):
        visible[h, :, :, n:9] = False
    logits = q.double() @ spread(k[None], HQ)[0].double().transpose(1, 2) * SCALE
    if bias is not None:
        logits[..., :9] += bias.double().repeat_interleave(3, 0)[:, None]
    logits = logits.masked_fill(~visible.flatten(0, 1), -torch.inf)
    expected = logits.softmax(-1).unflatten(0, (HKV, 3)).sum((1, 2)).float()
    hidden = torch.cat([window, torch.full((3,), HIDDEN)])
    attended = Attended(
        q[None], logits.logsumexp(-1)[None].float(), [kept], [total], SCALE, None,
        lambda _: (torch.cat([k[:, 9:], torch.ones(HKV, 3, DIM)], 1), hidden),
    )  # fmt: skip
    for h, mass in enumerate(kept.split(attended.mass(0))):
        torch.testing.assert_close(mass, expected[h, : lengths[h]], **CLOSE)
    assert (attended.mass(0) != 0).sum() == sum(lengths)
    mass, positions = attended.window_mass(0)
    torch.testing.assert_close(mass[:, :16], expected[:, 9:], **CLOSE)
    assert mass[:, 16:].abs().sum() == 0
    assert positions is hidden
