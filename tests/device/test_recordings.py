"""Recordings of a step on an emulated device."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import hybrid_kv as hkv
from hybrid_kv.models.cache_argument import passing
from hybrid_kv.transfer.recorded import CudaRecorder
from hybrid_kv.types import PartialAttention
from tests.device import emulated
from tests.device.machine import differences


class Locked:
    """Memory in a cycle, that waits for the device when the collector frees it."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        torch.cuda.synchronize()


def test_the_collector_does_not_end_a_recording() -> None:
    """Page-locked memory that is freed waits for the device, which a capture does not permit."""

    def work(given: torch.Tensor) -> PartialAttention:
        [Locked() for _ in range(50)]
        return PartialAttention(given * 2, given.sum(-1))

    before = gc.get_threshold()
    with emulated():
        recorder = CudaRecorder.of(torch.device("cuda", 0))
        assert recorder is not None
        gc.set_threshold(1)
        try:
            recording = recorder.record(work, torch.ones(2, 3, device="cuda"))
        finally:
            gc.set_threshold(*before)
            gc.collect()
        recording.given.copy_(torch.full((2, 3), 4.0, device="cuda"))
        recording.play()
        assert recording.part.out.cpu().tolist() == [[8.0] * 3] * 2


@pytest.mark.parametrize("sliding", [False, True])
def test_what_differs_between_two_steps_is_found_by_its_line(sliding: bool) -> None:
    """A layer whose entries move to new memory each step would be replayed wrongly: it is named."""
    config = Gemma3TextConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=24,
        layer_types=["sliding_attention" if sliding else "full_attention", "full_attention"],
    )
    with emulated(kernels="defined") as machine, torch.no_grad():
        model = Gemma3ForCausalLM(config).eval().to("cuda")  # type: ignore[arg-type]
        ids, traces = torch.ones(1, 1, dtype=torch.long, device="cuda"), []
        with hkv.attach(model, hkv.HybridConfig(method="full")) as runtime:
            cache = runtime.cache()
            model(ids.expand(1, 37), **passing(cache), use_cache=True)
            for _ in range(3):  # the first of them takes memory that the others keep
                with machine.recorded() as trace:
                    model(ids, **passing(cache), use_cache=True)
                traces.append(trace)
    found = differences(*traces[1:])
    assert found
    assert any("SlidingLayer" in line or "cache_utils.py" in line for line in found) is sliding
