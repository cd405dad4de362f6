"""Recordings of a step on an emulated device."""

from __future__ import annotations

import gc

import torch

from hybrid_kv.transfer.recorded import CudaRecorder
from hybrid_kv.types import PartialAttention
from tests.device import emulated


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
