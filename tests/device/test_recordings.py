"""Recordings of a step on an emulated device."""

from __future__ import annotations

import gc

import pytest
import torch

from hybrid_kv.transfer.graph_cache import CudaRecorder
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


@pytest.mark.parametrize("moves", [False, True])
def test_entries_that_move_from_step_to_step_are_a_difference(moves: bool) -> None:
    """As sliding layers of transformers: no wait and no number tells that a replay would be wrong;
    what a step takes for itself is no difference.
    """
    with emulated() as machine:
        keys, new, traces = torch.zeros(5, 3, device="cuda"), torch.ones(1, 3, device="cuda"), []
        for _ in range(2):
            before = keys  # of this step, so that its memory is not taken again
            with machine.recorded() as trace:
                if moves:
                    keys = torch.cat([before[1:], new * 2])
                else:
                    keys[4:] = new * 2
                (keys + 1).sum()
            traces.append(trace)
    assert bool(differences(*(one.by_allocation() for one in traces))) is moves
