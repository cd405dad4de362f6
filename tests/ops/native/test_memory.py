"""Host arrays."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest
import torch

from hybrid_kv.ops.host_memory import host_array, host_zeros

MIB = 2**20


@pytest.mark.parametrize("size", [[0], [3, 0], [7], [5, 333], [3, MIB + 5]])
def test_arrays_are_aligned_and_can_be_written(size: list[int], dtype: torch.dtype) -> None:
    array = host_array(size, dtype)
    assert (list(array.shape), array.dtype) == (size, dtype)
    assert array.is_contiguous()
    assert array.data_ptr() % (2 * MIB if array.numel() > MIB else 64) == 0
    array.fill_(1.5)
    assert (array == 1.5).all()


@pytest.mark.parametrize("size", [[3, 0], [5, 333], [3, MIB + 5]])
def test_zeros_are_zeros_in_memory_that_was_used_before(
    size: list[int], dtype: torch.dtype
) -> None:
    host_zeros(size, dtype).fill_(1.5)
    zeros = host_zeros(size, dtype)
    assert (list(zeros.shape), zeros.dtype) == (size, dtype)
    assert not zeros.any()


def test_a_large_array_is_private_memory_which_huge_pages_are_granted_to() -> None:
    # Shared memory, which an anonymous mapping of Python is by default, gets small pages.
    array = host_array([4 * MIB], torch.uint8).fill_(1)
    address = array.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, kind = line.split()[:2]
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            assert kind == "rw-p"
            return
    pytest.fail("the array lies nowhere")


def test_arrays_of_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        arrays = host_array([8], torch.float32), host_array([4 * MIB], torch.uint8)
    for array in arrays:
        array.fill_(1)


def test_what_was_not_written_is_not_committed_and_what_is_unused_is_returned() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    array = host_array([512 * MIB], torch.uint8)
    assert process.memory_info().rss - before < 16 * MIB
    array[: 64 * MIB] = 1
    assert process.memory_info().rss - before > 60 * MIB
    del array
    gc.collect()
    assert process.memory_info().rss - before < 16 * MIB
