"""The audit against brute force over every head of every step."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
import torch

import hybrid_kv as hkv
from hybrid_kv.eval.filling import FilledKV, SyntheticContext
from hybrid_kv.eval.needle import make_sample
from hybrid_kv.runtime.decode import decode
from hybrid_kv.runtime.step import Step
from hybrid_kv.transfer import SyncExecutor
from hybrid_kv.types import LayerShape, ModelInfo, PartialAttention
from hybrid_kv.watch.audit import Audit
from tests.kit import held

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::hybrid_kv.errors.RecallWarning"),
]

STEPS = 200
COLD: dict[str, Any] = {"top_k": 50, "index": {"kind": "ivf", "nlist": 40, "nprobe": 6}}
"""Recall is far from 1, and differs by head and step."""


class Truth:
    """Looks at all heads of all steps that pass through a cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recalls: list[float] = []
        self.missed: list[float] = []

        def watched(step: Step, sets: Any, calls: Any) -> PartialAttention:
            if step.q.shape[2] > 1:
                return decode(step, sets, calls)
            all_found: dict[int, Any] = {} if step.found is None else step.found
            object.__setattr__(step, "found", all_found)
            part = decode(step, sets, calls)
            for head in range(step.layer.shape.num_kv_heads):
                self.note(step, head, part)
            return part

        monkeypatch.setattr("hybrid_kv.runtime.decode.decode", watched)
        # Every turn is taken, however busy the machine is.
        monkeypatch.setattr("hybrid_kv.runtime.cache.ThreadExecutor", lambda _: SyncExecutor())

    def note(self, step: Step, head: int, part: PartialAttention) -> None:
        """In float64 and in one piece, unlike the audit."""
        group = step.layer.shape.group_size
        q = step.q[0, head * group : (head + 1) * group, 0].double()
        row = held(step.layer)
        cold = q @ row.extents[0].k[head].double().T
        near = q @ row.k[head].double().T
        assert step.found is not None
        ids = step.found[0][1].parts[0][1][head]
        best = cold.topk(COLD["top_k"], -1).indices
        self.recalls.append(float((best[:, :, None] == ids[:, None]).any(-1).double().mean()))
        weights = (torch.cat([cold, near], -1) * step.scale).softmax(-1)
        attended = weights[:, : cold.shape[1]].gather(1, ids.clamp_min(0)) * (ids >= 0)
        kept = attended.sum(-1) + weights[:, cold.shape[1] :].sum(-1)
        self.missed.append(float((1 - kept).mean()))


def test_it_agrees_with_brute_force_on_synthetic_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    info = ModelInfo(tuple(LayerShape(idx, 6, 2, 72) for idx in range(2)))
    config = hkv.HybridConfig(
        method="retrieval_attention", cold=COLD, index_build="wait", audit_every=1
    )
    truth = Truth(monkeypatch)
    with torch.inference_mode():
        context = SyntheticContext(info, 3000, max_steps=STEPS)
        kv = FilledKV(info, config, context)
        for shape in info.layers:
            kv.load(shape.layer_idx, *context.kv(shape.layer_idx, torch.float32))
        new = torch.ones(1, 2, 1, 72)
        for _ in range(STEPS):
            for layer_idx in range(2):
                kv.attend(layer_idx, torch.ones(1, 6, 1, 72), (new, new), None, scale=72**-0.5)
    assert kv.auditor is not None
    kv.auditor.settle()
    check(kv.auditor.audit, truth)
    kv.close()


def test_it_agrees_with_brute_force_on_needle(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = make_sample("key_value", 2048, num_records=8, seed=0)
    ids = [*sample.context.tolist(), *sample.questions[0].ids]
    config = hkv.HybridConfig(
        method="retrieval_attention",
        window_tokens=64,
        sink_tokens=16,
        cold=COLD,
        index_build="wait",
        audit_every=1,
    )
    truth = Truth(monkeypatch)
    with hkv.load("needle", config=config) as llm:
        llm.model.generation_config.eos_token_id = None
        answer = llm.generate(ids, max_new_tokens=STEPS + 1)
    assert answer.audit is not None
    check(answer.audit, truth)


def check(audit: Audit, truth: Truth) -> None:
    recall, missed = audit.recall(), audit.missed_mass()
    assert recall is not None
    assert missed is not None
    assert recall.looks == STEPS
    assert 0.2 < fmean(truth.recalls) < 0.97
    assert recall.mean == pytest.approx(fmean(truth.recalls), abs=0.01)
    assert missed.mean == pytest.approx(fmean(truth.missed), abs=0.01)
