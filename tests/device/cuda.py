"""torch.cuda's names, for an emulated machine."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.device.machine import Capture, Machine, Point, Pool, Queue, poison
from tests.device.tensors import DeviceTensor, running


def _index(device: object) -> int:
    if device is None:
        return running().device
    if isinstance(device, int):
        return device
    found = torch.device(device)  # type: ignore[arg-type]
    return running().device if found.index is None else found.index


class Stream:
    """As `torch.cuda.Stream`."""

    def __init__(self, device: object = None, priority: int = 0, *, queue: Queue | None = None):
        self.queue = queue or running().new_queue(_index(device))

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.queue.device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.queue is self.queue

    def __hash__(self) -> int:
        return id(self.queue)

    def wait_stream(self, other: Stream) -> None:
        running().queue_waits(self.queue, other.queue.here())

    def wait_event(self, event: Event) -> None:
        if event.point is not None:
            running().queue_waits(self.queue, event.point)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        running().host_waits("Stream.synchronize", self.queue.here())

    def query(self) -> bool:
        return running().is_done(self.queue.here())


class Event:
    """As `torch.cuda.Event`; times are not emulated."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: object) -> None:
        self.point: Point | None = None

    def record(self, stream: Stream | None = None) -> None:
        told = running()
        queue = told.current(told.device) if stream is None else stream.queue
        self.point = queue.here()

    def query(self) -> bool:
        return self.point is None or running().is_done(self.point)

    def synchronize(self) -> None:
        if self.point is not None:
            running().host_waits("Event.synchronize", self.point)

    def wait(self, stream: Stream | None = None) -> None:
        told = running()
        queue = told.current(told.device) if stream is None else stream.queue
        if self.point is not None:
            told.queue_waits(queue, self.point)

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class CUDAGraph:
    """As `torch.cuda.CUDAGraph`: what is captured runs when it is replayed, and not before.

    Whatever the graph owns is undefined before a replay, and so is what nobody holds of the pool
    that it shares with other graphs.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self._capture: Capture | None = None

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        told = running()
        if told.capture is not None:
            raise told.capture.fail("a capture inside a capture")
        queue = told.current(told.device)
        if queue is told.default_queue(queue.device):
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        told.capture = Capture(queue, pool or Pool())
        told.counts.captures += 1

    def capture_end(self) -> None:
        told = running()
        capture, told.capture = told.capture, None
        if capture is None:
            raise RuntimeError("no capture is under way")
        if capture.failed:
            raise RuntimeError(capture.failed)
        if capture.unjoined:
            raise RuntimeError("capturing stream has unjoined work")
        self._capture = capture

    @property
    def launches(self) -> list[Any]:
        """What it holds, in the order told."""
        return [] if self._capture is None else list(self._capture.launches)

    def replay(self) -> None:
        told, capture = running(), self._capture
        if capture is None:
            raise RuntimeError("a graph must be captured before it is replayed")
        told.counts.replays += 1
        launches = capture.launches

        def run() -> None:
            for memory in capture.pool.overwritten_by(capture):
                poison(memory)
            for launch in launches:
                launch.run()

        told.launch("replay", capture.origin.device, run)

    def reset(self) -> None:
        self._capture = None

    def pool(self) -> Pool:
        assert self._capture is not None
        return self._capture.pool


@contextlib.contextmanager
def _on_stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with running().on(stream.queue):
        yield


@contextlib.contextmanager
def _on_device(device: object) -> Iterator[None]:
    told, before = running(), running().device
    told.device = _index(device)
    try:
        yield
    finally:
        told.device = before


def _properties(device: object = None) -> Any:
    return types.SimpleNamespace(
        total_memory=running().memory_bytes,
        name="Emulated GPU",
        multi_processor_count=128,
        major=8,
        minor=9,
    )


def _free(device: object = None) -> tuple[int, int]:
    told, index = running(), _index(device)
    told.arrive()
    return told.memory_bytes - told.allocated[index], told.memory_bytes


def _reset_peak(device: object = None) -> None:
    told, index = running(), _index(device)
    told.peak[index] = told.allocated[index]


def _set_device(device: object) -> None:
    running().device = _index(device)


def _cudart(machine: Machine) -> Any:
    def register(address: int, num_bytes: int, flags: int) -> int:
        machine.pin(address, num_bytes)
        return 0

    def unregister(address: int) -> int:
        machine.unpin(address)
        return 0

    return types.SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=unregister, cudaGetErrorString=str
    )


def names(machine: Machine) -> dict[str, Any]:
    """By name in torch.cuda, what stands in for it."""
    runtime = _cudart(machine)

    def synchronize(device: object = None) -> None:
        machine.host_waits("torch.cuda.synchronize")

    def stream_of(device: object = None) -> Stream:
        return Stream(queue=machine.current(_index(device)))

    def default_of(device: object = None) -> Stream:
        return Stream(queue=machine.default_queue(_index(device)))

    def nothing() -> Callable[..., None]:
        return lambda *_, **__: None  # one for each name: torch.compile has rules by function

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": nothing(),
        "_lazy_init": nothing(),
        "device_count": lambda: machine.num_devices,
        "current_device": lambda: machine.device,
        "set_device": _set_device,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "current_stream": stream_of,
        "default_stream": default_of,
        "stream": _on_stream,
        "device": _on_device,
        "graph_pool_handle": Pool,
        "synchronize": synchronize,
        "empty_cache": nothing(),
        "mem_get_info": _free,
        "memory_allocated": lambda device=None: machine.allocated[_index(device)],
        "memory_reserved": lambda device=None: machine.allocated[_index(device)],
        "max_memory_allocated": lambda device=None: machine.peak[_index(device)],
        "max_memory_reserved": lambda device=None: machine.peak[_index(device)],
        "reset_peak_memory_stats": _reset_peak,
        "get_device_capability": lambda device=None: (8, 9),
        "get_device_name": lambda device=None: "Emulated GPU",
        "get_device_properties": _properties,
        "is_current_stream_capturing": lambda: machine.capture is not None,
        "cudart": lambda: runtime,
        # Random numbers of a device are drawn by the host's generator, whose state is kept with it.
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": nothing(),
    }


def record_stream(tensor: DeviceTensor, stream: Stream) -> None:
    """As `Tensor.record_stream`: memory is in use until a stream has done what it was told."""
    tensor.block.users.append(stream.queue.here())


def values(tensor: Tensor) -> Tensor:
    """A copy of a tensor's values when all that was told is done; no wait is counted."""
    if not isinstance(tensor, DeviceTensor):
        return tensor
    running().arrive()
    return tensor.inner.clone()


__all__ = ["CUDAGraph", "Event", "Stream", "names", "record_stream", "values"]
