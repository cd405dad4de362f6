"""The backend for CUDA inside vLLM on a CPU: its Triton kernels are interpreted, all else is real.

vLLM schedules, preempts, shares prefixes and mixes prompts with decodes; no GPU is needed or used.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("vllm") is None or find_spec("triton") is None:  # not imported yet: see `interpreted`
    pytest.skip("vLLM is not installed; run scripts/check_engines", allow_module_level=True)

from tests.vllm import interpreted  # noqa: F401  # before vLLM's kernels

# ruff: isort: split
import torch
from vllm import LLM
from vllm.plugins import load_general_plugins
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from hybrid_kv.errors import ConfigError
from hybrid_kv.vllm.counters import FIELDS, process_counts
from hybrid_kv.vllm.cuda import NEVER_RUN
from hybrid_kv.vllm.page_step import BlockChoice
from hybrid_kv.vllm.settings import VllmSettings
from tests.vllm.test_engine import engine, folders, prompts, tokens

_ = folders  # a fixture

SIZES = {"block_size": 32, "max_num_batched_tokens": 64, "max_model_len": 512}
STOCK = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
OURS = "hybrid_kv.vllm.cuda.TritonPageBackend"


def attended_by(backend: str, folder: Path, settings: dict[str, Any] | None, **options: Any) -> LLM:
    """An engine on the CPU whose attention is that of a backend."""
    load_general_plugins()  # vLLM does once, and would put the one for CPUs in its place
    gc.collect()  # an engine that ends later takes the process groups of the next
    register_backend(AttentionBackendEnum.CPU_ATTN, backend)
    selector._cached_get_attn_backend.cache_clear()
    made = engine(folder, settings, **SIZES | options)
    executor = made.llm_engine.engine_core.engine_core.model_executor
    runner = executor.driver_worker.worker.model_runner
    for layer in runner.compilation_config.static_forward_context.values():
        sinks = getattr(getattr(layer, "impl", None), "sinks", None)
        if sinks is not None:  # random ones are too small beside logits of random weights
            sinks.data.copy_(torch.linspace(0, 40, len(sinks)))
    return made


@pytest.fixture
def every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding sequences of three blocks and more choose all of them, in an order of their own."""

    def every(settings: VllmSettings, length: int, size: int) -> BlockChoice | None:
        blocks = -(-length // size)
        return BlockChoice(blocks, 1, 1, blocks - 2) if blocks > 2 else None

    monkeypatch.setattr(BlockChoice, "of", every)


Counted = Callable[[], dict[str, float]]


@pytest.fixture
def counted() -> Counted:
    before = {name: process_counts()[name] for name in FIELDS}
    return lambda: {name: process_counts()[name] - before[name] for name in FIELDS}


@pytest.mark.usefixtures("every_block")
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_tokens_are_vllms_where_every_block_is_chosen(
    folders: dict[str, Path], name: str, counted: Counted
) -> None:
    """Mixed steps, chunks, windows beside full attention, and sinks that are weights."""
    asked = prompts([66, 70], seed=3)
    stock = tokens(attended_by(STOCK, folders[name], None), asked, count=3)
    settings = {"budget": "1", "audit_every": 1}
    ours = tokens(attended_by(OURS, folders[name], settings), asked, count=3)
    assert ours == stock
    full = 2 if name == "llama" else 1
    counts = counted()
    assert counts["decodes"] == full * 4
    assert counts["searched_decodes"] == full * 4
    assert counts["audit_looks"] > 0
    assert counts["audit_output_error"] < 1e-4 * counts["audit_looks"]


@pytest.mark.usefixtures("every_block")
def test_preempted_and_shared_blocks_are_chosen_by_their_new_keys(
    folders: dict[str, Path], counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted, stock = [], Scheduler._preempt_request

    def preempt(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        preempted.append(args)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", preempt)
    few = {"num_gpu_blocks_override": 6, "max_model_len": 128}
    asked = prompts([62, 63], seed=4)
    again = [{"prompt_token_ids": asked[0]["prompt_token_ids"][:32] + [3] * 40}]
    both = []
    for backend, settings in ((STOCK, None), (OURS, {})):
        llm = attended_by(backend, folders["llama"], settings, **few)
        both.append(tokens(llm, asked, count=6) + tokens(llm, again, count=3))
        del llm
    assert both[1] == both[0]
    assert len(preempted) >= 2
    assert counted()["searched_decodes"] > 12


def test_less_is_read_and_the_audit_says_what_is_missed(
    folders: dict[str, Path],
    counted: Counted,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("hybrid_kv.vllm.settings.LEAST_SEARCHED", 64)
    settings = {"budget": "32", "sink_tokens": 32, "window_tokens": 32, "audit_every": 1}
    with caplog.at_level("WARNING", logger="vllm.hybrid_kv"):
        llm = attended_by(OURS, folders["llama"], settings)
    tokens(llm, prompts([200], seed=5), count=3)
    counts = counted()
    assert counts["searched_decodes"] == 4
    assert counts["context_entries"] == 2 * (201 + 202)
    assert counts["read_entries"] == counts["context_entries"] - 4 * (128 - 32)
    assert counts["audit_looks"] == 2
    assert 0 < counts["audit_missed_mass"] / 2 < 1
    assert [one.message for one in caplog.records].count(NEVER_RUN) <= 1


def test_a_method_of_the_cpu_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="method 'sketch' does not run inside vLLM on cuda"):
        attended_by(OURS, folders["llama"], {"method": "sketch"})
