"""`hybrid-kv demo`, with a random model in the place of the shipped one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaAttention
from typer.testing import Result

from hybrid_kv.cli import comparison
from hybrid_kv.cli import comparison as layer_module
from hybrid_kv.models import load
from hybrid_kv.ops.host_memory import FreeMemory
from hybrid_kv.report.schema import DemoReport, parse_report, to_json
from tests.cli.support import MAX_CONTEXT, call, report_of
from tests.report import profiles

SHORT = ("demo", "--context", 700, "--records", 8)
WORDS = (*SHORT, "--no-layer")
LAYER = (*SHORT, "--layer-context", 1700)


@pytest.fixture
def _untrained(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "NEEDLE_PATH", model)


def demo_of(result: Result) -> DemoReport:
    report = report_of(result)
    assert isinstance(report, DemoReport)
    return report


@pytest.mark.usefixtures("_untrained")
def test_wrong_answers_are_a_failure() -> None:
    result = call(*WORDS, "--set", "top_k=9")
    assert result.exit_code == 1, result.output
    for text in ("question", "expected", "full attention", "hybrid", "KV on host", "KV on device"):
        assert text in result.stdout


@pytest.mark.usefixtures("_untrained")
def test_right_and_equal_answers_are_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "is_correct", lambda *_: True)
    result = call(*WORDS, "--set", "top_k=all", "--dtype", "float32", "--json", "-")
    assert result.exit_code == 0, result.output
    report = parse_report(result.stdout)
    assert isinstance(report, DemoReport)
    assert report.agree
    assert report.attended_ratio == 1.0
    assert [run.method for run in report.runs] == ["full", "hybrid"]
    assert report.runs[0].memory_bytes.host_kv == 0 < (report.runs[1].memory_bytes.host_kv or 0)


@pytest.mark.usefixtures("_untrained")
def test_answers_that_differ_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "is_correct", lambda *_: True)
    monkeypatch.setattr(comparison.Comparison, "agree", False)
    result = call(*WORDS)
    assert result.exit_code == 1
    assert "The answers differ" in result.stdout


@pytest.mark.usefixtures("_untrained")
def test_the_text_is_computed_once_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each method read it for itself, which was most of the demo's time."""
    read = []
    attend = LlamaAttention.forward

    def watched(self: LlamaAttention, hidden_states: torch.Tensor, **rest: Any) -> Any:
        read.append(hidden_states.shape[1])
        return attend(self, hidden_states, **rest)

    monkeypatch.setattr(LlamaAttention, "forward", watched)
    monkeypatch.setattr(comparison, "is_correct", lambda *_: True)
    result = call(*WORDS, "--set", "top_k=all", "--dtype", "float32", "--json", "-")
    report = demo_of(result)
    assert sum(size for size in read if size > 20) == 2 * 700  # of two layers
    assert report.layer is None
    assert all((run.context_tokens - 700) in range(1, 20) for run in report.runs)


@pytest.mark.usefixtures("_untrained")
def test_settings_of_the_method_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "is_correct", lambda *_: True)
    words = ("--method", "retrieval_attention", "--set", "top_k=all", "--set", "page_size=8")
    report = demo_of(call(*WORDS, "--dtype", "float32", *words, "--json", "-"))
    assert [run.config["page_size"] for run in report.runs] == [8, 8]
    assert [run.method for run in report.runs] == ["full", "retrieval_attention"]
    assert report.runs[1].config["index_build"] == "wait"
    assert (report.runs[1].index_build_s or 0) > 0


@pytest.mark.usefixtures("_untrained")
def test_a_layer_of_a_large_model_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "is_correct", lambda *_: True)
    monkeypatch.setattr(layer_module, "_STEPS", 3)
    words = ("--set", "top_k=all", "--dtype", "float32")
    layer = demo_of(call(*LAYER, *words, "--json", "-")).layer
    assert layer is not None
    full, tiered = layer.runs
    assert (layer.context_tokens, layer.kv_bytes) == (1700, 1700 * 2 * 8 * 128 * 2)
    assert [full.method, full.attended_ratio, full.mass] == ["full", 1.0, 1.0]
    assert tiered.method == "hybrid"
    assert 0.5 < tiered.mass < 1.0
    assert 0.3 < tiered.attended_ratio < 0.6
    assert full.host_bytes == 0 < tiered.host_bytes
    assert tiered.device_kv_bytes < full.device_kv_bytes
    text = call(*LAYER, *words).stdout
    assert "One attention layer of Llama-3-8B at 1,700 tokens" in text
    assert "█" in text
    assert "of the attention's mass" in " ".join(text.split())


@pytest.mark.usefixtures("_untrained")
def test_a_layer_that_does_not_fit_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "is_correct", lambda *_: True)
    monkeypatch.setattr(layer_module, "free_memory", lambda: FreeMemory(10**6, " in the box"))
    result = call(*LAYER, "--set", "top_k=all", "--dtype", "float32", "--json", "-")
    assert demo_of(result).layer is None
    assert "1,000,000 bytes are free in the box; --layer-context takes a" in result.stderr


@pytest.mark.usefixtures("_untrained")
def test_ctrl_c_in_the_layer_keeps_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "is_correct", lambda *_: True)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(layer_module, "make_context", interrupted)
    result = call(*LAYER, "--set", "top_k=all", "--dtype", "float32", "--json", "-")
    assert result.exit_code == 130
    report = parse_report(result.stdout)
    assert isinstance(report, DemoReport)
    assert report.layer is None
    assert report.agree


def test_a_report_of_an_older_demo_is_read() -> None:
    """Keys that came later may be absent."""
    data = json.loads(to_json(profiles.demo()))
    for name in ("read_s", "layer"):
        data.pop(name)
    report = parse_report(json.dumps(data))
    assert isinstance(report, DemoReport)
    assert report.layer is None


def test_a_text_longer_than_the_model_is_refused_before_it_is_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "NEEDLE_PATH", model)
    monkeypatch.setattr(comparison, "prefill", lambda *_: pytest.fail("read"))
    result = call("demo", "--context", MAX_CONTEXT + 1, "--records", 8)
    assert result.exit_code == 2
    assert f"{MAX_CONTEXT}" in result.stderr


def test_missing_model_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "NEEDLE_PATH", tmp_path / "absent")
    result = call(*WORDS)
    assert result.exit_code == 2
    assert "does not exist" in result.stderr
