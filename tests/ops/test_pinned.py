"""Page-locked host memory: taken once, given back before it is unmapped, plain where refused."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import warnings
from collections.abc import Iterator
from threading import Event

import pytest
import torch

from hybrid_kv.errors import PinnedMemoryWarning
from hybrid_kv.ops.pinned import lock_limit_bytes, pinned_array, pinned_empty, why_not_pinned
from tests.ops.fake_cudart import Code, FakeCudart, fake_cuda, is_mapped

MIB = 2**20
LARGE = [3, MIB + 5]  # not whole system pages in any dtype


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudart]:
    with fake_cuda(monkeypatch) as made:
        yield made


def test_an_array_is_locked_once_and_wholly(cuda: FakeCudart, dtype: torch.dtype) -> None:
    array = pinned_array(LARGE, dtype)
    assert (list(array.shape), array.dtype) == (LARGE, dtype)
    assert array.data_ptr() % (2 * MIB) == 0
    ((address, num_bytes),) = cuda.locked.items()
    assert address == array.data_ptr()
    assert array.nbytes <= num_bytes < array.nbytes + mmap.PAGESIZE
    array.fill_(1.5)
    assert (array == 1.5).all()
    assert cuda.calls == ["register"]


def test_an_array_is_unlocked_with_its_last_view_and_before_it_is_unmapped(
    cuda: FakeCudart,
) -> None:
    """The finalizers of a mapping run when it is gone: CUDA would unlock somebody else's memory."""
    array = pinned_array(LARGE, torch.float16)
    address, view = array.data_ptr(), array[1:, 7:].view(torch.int16)
    del array
    gc.collect()
    assert cuda.calls == ["register"]
    view.fill_(1)
    del view
    gc.collect()
    assert cuda.calls == ["register", "synchronize", "unregister"]
    assert not cuda.locked
    assert not is_mapped(address)


def test_each_array_has_a_lock_of_its_own(cuda: FakeCudart) -> None:
    arrays = [pinned_array(LARGE, torch.float16) for _ in range(3)]
    assert set(cuda.locked) == {array.data_ptr() for array in arrays}
    kept = arrays.pop(1)
    arrays.clear()
    gc.collect()
    assert list(cuda.locked) == [kept.data_ptr()]


def test_a_refusal_leaves_plain_memory_and_warns_once(cuda: FakeCudart) -> None:
    cuda.refuses = Code.out_of_memory
    with pytest.warns(PinnedMemoryWarning) as caught:
        arrays = [make(LARGE, torch.float16) for make in [pinned_array] * 3 + [pinned_empty]]
    (warning,) = caught
    assert warning.filename == __file__
    text = str(warning.message)
    assert f"{arrays[0].nbytes:,} bytes were asked for, CUDA says 'out of memory (2)'" in text
    assert "slower transfers" in text
    assert "shorten the context, free host memory" in text
    for array in arrays:
        array.fill_(2)
        assert (array == 2).all()
    # CUDA tells a failure again to the next kernel, which must not be one of the model's.
    assert cuda.calls == ["register", "kernel on cuda", "pool"], "and is not asked for more arrays"
    del array
    arrays.clear()
    gc.collect()
    assert "unregister" not in cuda.calls


def test_after_a_refusal_arrays_are_plain_until_one_is_given_back(cuda: FakeCudart) -> None:
    """Where a system locks 1 GiB in all (WSL2), what is left of it is for staging."""
    first = pinned_array(LARGE, torch.float16)
    cuda.refuses = Code.out_of_memory
    with pytest.warns(PinnedMemoryWarning):
        pinned_array(LARGE, torch.float16)
    cuda.refuses = None
    pinned_array(LARGE, torch.float16)
    assert list(cuda.locked) == [first.data_ptr()]
    pinned_empty([5], torch.float16)
    assert cuda.calls[-1] == "pool"
    del first
    gc.collect()
    array = pinned_array(LARGE, torch.float16)
    assert list(cuda.locked) == [array.data_ptr()]


def test_a_finite_lock_limit_is_named(cuda: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.refuses = Code.out_of_memory
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, resource.RLIM_INFINITY))
    with pytest.warns(PinnedMemoryWarning, match=r"raise `ulimit -l` \(now 65,536 bytes\)"):
        pinned_array(LARGE, torch.float16)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert lock_limit_bytes() is None


@pytest.mark.parametrize("size", [[0], [3, 0], [3, 0, 4 * MIB]])
def test_an_empty_array_asks_for_nothing(cuda: FakeCudart, size: list[int]) -> None:
    for make in (pinned_array, pinned_empty):
        assert list(make(size, torch.bfloat16).shape) == size
    assert cuda.calls == []


def test_small_arrays_come_from_torch_s_pool(cuda: FakeCudart) -> None:
    assert list(pinned_array([5, 333], torch.float32).shape) == [5, 333]
    assert list(pinned_empty(LARGE, torch.float32).shape) == LARGE
    assert cuda.calls == ["pool", "pool"]


def test_without_cuda_memory_is_plain_and_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in ([5], LARGE):
            for make in (pinned_array, pinned_empty):
                make(size, torch.float16).fill_(1)


def test_arrays_of_inference_mode_can_be_written_outside_of_it(cuda: FakeCudart) -> None:
    with torch.inference_mode():
        arrays = [
            make(size, torch.float32)
            for make in (pinned_array, pinned_empty)
            for size in ([5], LARGE)
        ]
    for array in arrays:
        array.fill_(1)


def test_a_copy_of_the_process_unlocks_nothing(cuda: FakeCudart) -> None:
    array = pinned_array(LARGE, torch.float16)
    if (child := os.fork()) == 0:
        del array
        gc.collect()
        os._exit(len(cuda.calls))  # the registration alone
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert list(cuda.locked) == [array.data_ptr()]


def test_a_probe_says_what_cuda_says_and_locks_nothing_for_good(cuda: FakeCudart) -> None:
    assert why_not_pinned() is None
    gc.collect()
    assert not cuda.locked
    cuda.refuses = Code.out_of_memory
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert why_not_pinned() == "out of memory (2)"


@pytest.mark.gpu
def test_a_gpu_reads_a_locked_array_by_itself() -> None:
    array = pinned_array(LARGE, torch.float16).fill_(1.5)
    assert array.is_pinned()
    assert array[1:].is_pinned()
    assert (array.to("cuda", non_blocking=True) == 1.5).all()
    assert pinned_empty([5], torch.float16).is_pinned()


@pytest.mark.gpu(real=True)
def test_kernels_run_after_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid_kv.ops import pinned

    monkeypatch.setattr(pinned, "_warned", Event())
    real = torch.cuda.cudart()

    class Twice:
        """Registers everything twice, which CUDA refuses."""

        cudaGetErrorString = real.cudaGetErrorString  # noqa: N815

        def cudaHostRegister(self, *words: int) -> object:  # noqa: N802
            real.cudaHostRegister(*words)
            return real.cudaHostRegister(*words)

    monkeypatch.setattr(torch.cuda, "cudart", Twice)
    with pytest.warns(PinnedMemoryWarning, match=r"\(712\)"):
        array = pinned_array(LARGE, torch.float16)
    assert torch.ones(5, device="cuda").sum() == 5
    real.cudaHostUnregister(array.data_ptr())
