"""Counters where engine and front end are one process."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; run scripts/check_engines")

from vllm import LLM

from hybrid_kv.vllm.counters import process_counts
from tests.vllm.test_engine import engine, folders, prompts, tokens

_ = folders  # a fixture


def counts_of(llm: LLM) -> dict[str, float]:
    """Our counters as vLLM shows them."""
    shown = llm.get_metrics()
    return {
        one.name.removeprefix("vllm:hybrid_kv_"): one.value
        for one in shown
        if one.name.startswith("vllm:hybrid_kv_")
    }


def test_vllm_shows_what_was_counted(folders: dict[str, Path]) -> None:
    """Two layers, a prompt of 5,600 tokens, and 7 of its 8 tokens decoded, each looked at by one.

    vLLM's snapshot cuts counters to whole numbers.
    """
    settings = {"budget": "64", "window_tokens": 128, "audit_every": 1}
    llm = engine(folders["llama"], settings, max_model_len=8192, disable_log_stats=False)
    before, missed = counts_of(llm), process_counts()["audit_missed_mass"]
    tokens(llm, prompts([5600], seed=7), count=8)
    after = counts_of(llm)
    found = {name: after[name] - before[name] for name in after}
    assert found["prompt_tokens"] == 2 * 5600
    assert found["decodes"] == found["searched_decodes"] == found["estimated_decodes"] == 2 * 7
    assert found["context_entries"] == 2 * sum(range(5601, 5608))
    assert 0 < found["read_entries"] < 0.3 * found["context_entries"]
    assert found["audit_looks"] == 7
    assert 0 < process_counts()["audit_missed_mass"] - missed < 7 * 0.5
