"""Memory that runs out is said in one sentence: where, how much, what is free, the way out."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from hybrid_kv.errors import CapacityError, DeviceMemoryError
from hybrid_kv.runtime import Stage, memory_errors
from hybrid_kv.store.memory import allocate

TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of "
    "which 1.12 GiB is free. Including non-PyTorch memory, this process has 22.52 GiB memory in "
    "use. 22.00 GiB allowed; Of the allocated memory 21.3 GiB is allocated by PyTorch, and 0 bytes "
    "is reserved by PyTorch but unallocated."
)
LOAD, PREFILL, DECODE = "weights='int4'", "lower prefill_chunk_tokens", "fewer new tokens"


@pytest.mark.parametrize(
    ("stage", "way_out"), [("load", LOAD), ("prefill", PREFILL), ("decode", DECODE)]
)
def test_a_gpu_s_memory_that_runs_out_is_said_with_the_way_out(stage: Stage, way_out: str) -> None:
    cause = torch.OutOfMemoryError(TORCH_SAYS)
    with pytest.raises(DeviceMemoryError) as caught, memory_errors(lambda: stage):
        raise cause
    text = str(caught.value)
    assert text.startswith(
        f"GPU memory ran out at {stage}: 2.00 GiB were asked for, 1.12 GiB of 23.65 GiB are free, "
        "22.00 GiB may be used; "
    )
    assert way_out in text
    assert "\n" not in text
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize(
    ("says", "figures"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB.", "20.00 MiB were asked for; "),
        ("Allocation on device 0 would exceed\nallowed memory", "would exceed allowed memory; "),
        ("", "no size was told; "),
    ],
)
def test_what_torch_does_not_tell_is_left_out(says: str, figures: str) -> None:
    with pytest.raises(DeviceMemoryError, match=figures), memory_errors(lambda: "decode"):
        raise torch.OutOfMemoryError(says)


@pytest.mark.parametrize(
    ("stage", "way_out"), [("load", LOAD), ("prefill", PREFILL), ("decode", DECODE)]
)
def test_host_memory_that_torch_does_not_get_is_said_too(stage: Stage, way_out: str) -> None:
    asked = (
        rf"host memory ran out at {stage}: {2**60:,} bytes were asked for, [\d,]+ bytes are free"
    )
    with pytest.raises(CapacityError, match=asked) as caught, memory_errors(lambda: stage):
        torch.empty(2**60, dtype=torch.uint8)
    assert way_out in str(caught.value)
    assert not isinstance(caught.value, DeviceMemoryError)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_what_python_says_of_memory_is_passed_on() -> None:
    with (
        pytest.raises(CapacityError, match="ran out at decode: the lists do not fit, "),
        memory_errors(lambda: "decode"),
    ):
        raise MemoryError("the lists\ndo not fit")


def test_a_sentence_that_is_there_already_is_kept() -> None:
    with (
        pytest.raises(CapacityError, match=r"^host memory ran out: the system grants no array"),
        memory_errors(lambda: "decode"),
    ):
        allocate([2**60], torch.uint8, torch.device("cpu"))


def test_other_errors_pass() -> None:
    for error in (RuntimeError("shapes differ"), ValueError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, memory_errors(lambda: "decode"):
            raise error
        assert caught.value is error


def test_an_error_that_is_kept_keeps_no_activations() -> None:
    """Its traceback would hold the tensors of the forward that failed while one tries again."""
    held: list[weakref.ref[torch.Tensor]] = []

    def forward() -> None:
        hidden = torch.zeros(5)
        held.append(weakref.ref(hidden))
        raise torch.OutOfMemoryError(TORCH_SAYS)

    with pytest.raises(DeviceMemoryError) as caught, memory_errors(lambda: "prefill"):
        forward()
    gc.collect()
    assert caught.value.__cause__ is not None
    assert held[0]() is None
