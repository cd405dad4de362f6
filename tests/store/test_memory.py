"""How stores take memory."""

from __future__ import annotations

import psutil
import pytest
import torch

from hybrid_kv.store.memory import allocate, enlarge

HOST = torch.device("cpu")


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.parametrize("fill", [None, 0])
def test_host_memory_is_committed_only_when_it_is_written(fill: float | None) -> None:
    # `torch.zeros` once took the place of the zero pages and committed a whole reserved context.
    before = resident_bytes()
    tensor = allocate([64, 2**20], torch.float32, HOST, fill)
    assert resident_bytes() - before < 2**25, "256 MiB were reserved, and committed at once"
    tensor[:32].fill_(1)
    assert resident_bytes() - before > 2**26, "the figure does not see what was written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("size", [[3, 37, 72], [0, 4], [1]])
def test_zeros_are_zeros_of_the_shape_and_aligned(size: list[int], dtype: torch.dtype) -> None:
    tensor = allocate(size, dtype, HOST, 0)
    assert list(tensor.shape) == size
    assert tensor.dtype == dtype
    assert not tensor.any()
    assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0


@pytest.mark.parametrize("fill", [None, 0, 7])
def test_memory_taken_in_inference_mode_may_be_written_outside(fill: float | None) -> None:
    with torch.inference_mode():
        tensor = allocate([5], torch.float32, HOST, fill)
    tensor.fill_(1)
    assert tensor.sum() == 5


def test_enlarging_keeps_the_old_places_first() -> None:
    old = torch.arange(6).reshape(2, 3)
    new = enlarge(old, 1, 5, fill=9)
    assert new.tolist() == [[0, 1, 2, 9, 9], [3, 4, 5, 9, 9]]
