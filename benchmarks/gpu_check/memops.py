"""The shortest round trip: the device waits for a word in host memory, and answers with another.

Wait and answer are enqueued by the driver's stream memory operations, so no kernel and no copy is
launched while the host waits. Whether PyTorch's streams bear it is what this finds out.
"""

from __future__ import annotations

import ctypes
from functools import partial
from time import perf_counter
from typing import Any

import torch

from benchmarks.gpu_check.record import NotHere, Recorder, need_cuda
from benchmarks.gpu_check.sizes import Sizes
from benchmarks.gpu_check.timing import wall_us

_WAIT_GEQ, _WRITE_DEFAULT = 0, 0
_PATIENCE_S = 2.0
_RELEASE = 2**30


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    device = torch.device(settings["device"])
    record.measure("memop round trip", partial(memop_round_trip, device, sizes.small_rounds))


def memop_round_trip(device: torch.device, rounds: int) -> dict[str, Any]:
    """The host sets `go`; the device sees it and sets `done`; the host sees that."""
    need_cuda(device)
    words = torch.zeros(32, dtype=torch.int32).pin_memory()
    stream = torch.cuda.Stream(device)
    trip = RoundTrip(find_driver(), stream.cuda_stream, words.data_ptr())
    try:
        return wall_us(trip.run, rounds=rounds)
    finally:
        trip.release()  # whatever still waits must end, or the stream never does
        stream.synchronize()


class RoundTrip:
    """Two words of pinned memory at an address, one a cache line from the other."""

    def __init__(self, driver: Any, stream: int, address: int) -> None:
        self._driver, self._stream, self._address = driver, ctypes.c_void_p(stream), address
        self._go = ctypes.c_uint32.from_address(address)
        self._done = ctypes.c_uint32.from_address(address + 64)
        self._turn = 0

    def run(self) -> None:
        """Raises RuntimeError: the driver refuses, or no answer comes."""
        self._turn += 1
        self._call("cuStreamWaitValue32", 0, _WAIT_GEQ)
        self._call("cuStreamWriteValue32", 64, _WRITE_DEFAULT)
        self._go.value = self._turn
        deadline = perf_counter() + _PATIENCE_S
        while self._done.value != self._turn:
            if perf_counter() > deadline:
                raise RuntimeError(f"no answer from the device within {_PATIENCE_S} s")

    def release(self) -> None:
        self._go.value = _RELEASE

    def _call(self, name: str, offset: int, flags: int) -> None:
        address = ctypes.c_uint64(self._address + offset)
        turn = ctypes.c_uint32(self._turn)
        code = getattr(self._driver, name)(self._stream, address, turn, ctypes.c_uint(flags))
        if code:
            raise RuntimeError(f"{name} returned CUDA error {code}")


class _Driver:
    """The second version of the two calls, as CUDA 12 and later have them."""

    def __init__(self, library: Any) -> None:
        self.cuStreamWaitValue32 = library.cuStreamWaitValue32_v2
        self.cuStreamWriteValue32 = library.cuStreamWriteValue32_v2


def find_driver() -> Any:
    try:
        return _Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError) as error:
        raise NotHere(f"the driver has no stream memory operations: {error}") from None
