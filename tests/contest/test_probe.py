"""The probe knows what was dropped: its missed mass is that of the whole context."""

from __future__ import annotations

import pytest
import torch

from hybrid_kv.config import HybridConfig
from hybrid_kv.contest.measure import ProbedKV
from hybrid_kv.contest.prompts import PrefilledPrompt
from hybrid_kv.types import LayerShape, ModelInfo
from tests.kit import held

SHAPE = LayerShape(0, 6, 2, 72)
N, SCALE = 237, 0.2


def looked(method: str, **settings: object) -> tuple[float, float, float, float]:
    """Missed mass and output error by the probe, and by a softmax over everything."""
    k, v = (torch.randn(1, 2, N, 72) for _ in range(2))
    kv = ProbedKV(ModelInfo((SHAPE,)), HybridConfig(method=method, **settings))
    kv.load(0, k, v)
    prompt = PrefilledPrompt(torch.zeros(1, N), ((k, v),), ())
    missed, errors = [], []
    with kv.probed(prompt) as probe:
        for step in (3, 1, 1):
            q = torch.randn(1, 6, step, 72)
            new = torch.randn(1, 2, step, 72), torch.randn(1, 2, step, 72)
            before = held(kv)
            resident = torch.tensor(before.resident)
            part = kv.attend(0, q, new, None, scale=SCALE)
            k, v = torch.cat([k, new[0]], 2), torch.cat([v, new[1]], 2)
            keys, values = (t[0].repeat_interleave(3, 0).double() for t in (k, v))
            weights = (SCALE * q[0, :, -1:].double() @ keys.mT).softmax(-1)[:, 0]
            kept = torch.ones(keys.shape[1], dtype=torch.bool)
            kept[:-step] = False
            kept[resident] = True
            missed.append(float(weights[:, ~kept].sum(-1).mean()))
            exact = (weights[:, None] @ values)[:, 0]
            off = (part.out[0, :, -1].double() - exact).norm(dim=-1) / exact.norm(dim=-1)
            errors.append(float(off.mean()))
    means = probe.means()
    assert means is not None
    if method != "hybrid":
        assert means.mass_error == pytest.approx(-means.missed_mass, abs=1e-5)
    return (means.missed_mass, means.output_error, sum(missed) / 3, sum(errors) / 3)


def test_full_attention_misses_nothing() -> None:
    missed, error, truth, true_error = looked("full")
    assert truth == 0
    assert missed < 1e-5
    assert error == pytest.approx(true_error, abs=1e-5)


def test_what_was_dropped_is_missed() -> None:
    missed, error, truth, true_error = looked("streaming_llm", sink_tokens=16, window_tokens=32)
    assert truth > 0.3
    assert missed == pytest.approx(truth, rel=1e-3)
    assert error == pytest.approx(true_error, rel=1e-3)


def test_what_is_estimated_was_not_read() -> None:
    figures = []
    for estimate in ("none", "gaussian"):
        torch.manual_seed(1)
        cold = {"top_k": 9, "estimate": estimate, "index": "flat"}
        sizes = {"sink_tokens": 16, "window_tokens": 32}
        figures.append(looked("hybrid", cold=cold, **sizes)[:2])
    (plain, plain_error), (missed, error) = figures
    assert missed == pytest.approx(plain, abs=1e-5)
    assert plain > 0.2
    assert error < plain_error


def test_nobody_looks_outside_the_block() -> None:
    kv = ProbedKV(ModelInfo((SHAPE,)), HybridConfig(method="full"))
    k, v = (torch.randn(1, 2, N, 72) for _ in range(2))
    kv.load(0, k, v)
    with kv.probed(PrefilledPrompt(torch.zeros(1, N), ((k, v),), ())) as probe:
        pass
    kv.attend(0, torch.randn(1, 6, 1, 72), (k[:, :, :1], v[:, :, :1]), None, scale=SCALE)
    assert probe.means() is None
