"""How stores take memory."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from hybrid_kv.errors import CapacityError
from hybrid_kv.ops import host_memory
from hybrid_kv.store.memory import allocate, enlarge
from tests.ops.fake_cudart import fake_cuda

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


@pytest.mark.parametrize("fill", [None, 0, 7])
@pytest.mark.parametrize("size", [[3, 2**20], [3, 37]])
def test_memory_for_a_gpu_is_locked(
    monkeypatch: pytest.MonkeyPatch, size: list[int], fill: float | None
) -> None:
    with fake_cuda(monkeypatch) as cuda:
        tensor = allocate(size, torch.float16, HOST, fill, pinned=True)
        assert cuda.calls == ["register" if size[1] > 37 else "pool"]
        assert fill is None or (tensor == fill).all()
        del tensor
        assert not cuda.locked


def test_an_array_that_the_system_does_not_grant_is_a_capacity_error() -> None:
    for num_bytes in (2**60, 2**70):
        with pytest.raises(CapacityError, match=rf"no array of {num_bytes:,} bytes, .* are free"):
            allocate([num_bytes], torch.uint8, HOST)


def test_other_errors_of_a_mapping_are_not_taken_for_a_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "not here")

    monkeypatch.setattr(host_memory.mmap, "mmap", refuse)
    with pytest.raises(PermissionError, match="not here"):
        allocate([2**22], torch.uint8, HOST)


def test_memory_that_would_be_committed_is_there_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system grants more than it has, and kills the process that writes to it."""
    old = allocate([3, 2**20], torch.float16, HOST, 1)
    empty = SimpleNamespace(available=5 * 2**20, total=2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: empty)
    with pytest.raises(
        CapacityError, match=r"grows by 6,291,456 bytes, 5,242,880 bytes are free; shorten"
    ):
        enlarge(old, 1, 2**21)
    with pytest.raises(CapacityError, match="grows by 6,291,456 bytes"):
        allocate([3, 2**20], torch.float16, HOST, pinned=True)
    assert (old == 1).all()
    allocate([3, 2**20], torch.float16, HOST)  # commits nothing yet
    assert (enlarge(old[:, : 2**19], 1, 2**21)[:, : 2**19] == 1).all()
    empty.available += 2**20
    assert enlarge(old, 1, 2**21).shape == (3, 2**21)
