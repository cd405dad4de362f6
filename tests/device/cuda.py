"""torch.cuda's names, for an emulated machine."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.ops import pinned
from tests.device.machine import Capture, Machine, Point, Pool, Queue, poison
from tests.device.profile import profiler_of
from tests.device.tensors import DeviceTensor, running


def _index(device: object) -> int:
    if device is None:
        return running().device
    if isinstance(device, int):
        return device
    found = torch.device(device)  # type: ignore[arg-type]
    return running().device if found.index is None else found.index


class Stream:
    """As `torch.cuda.Stream`, and as `torch.Stream` of the current device."""

    def __init__(self, device: object = None, priority: int = 0, *, queue: Queue | None = None):
        self.queue = queue or running().new_queue(_index(device))
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> Stream:
        self._entered.append(running().on(self.queue))
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.pop().__exit__(None, None, None)

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
    """As `torch.cuda.Event`; its time is when the stream gets there, on the host's clock."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: object) -> None:
        self.point: Point | None = None
        self._is_timed = enable_timing
        self._passed_s: list[float] = []  # a new one each time that it is recorded

    def record(self, stream: Stream | None = None) -> None:
        told = running()
        queue = told.current(told.device) if stream is None else stream.queue
        if not self._is_timed:
            self.point = queue.here()
            return
        passed_s = self._passed_s = []
        self.point = told.mark(queue, lambda: passed_s.append(perf_counter()))

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

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds between two events that have passed."""
        both = self, end_event
        if not all(one._is_timed for one in both):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if any(one.point is None for one in both):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not all(one._passed_s for one in both):
            raise RuntimeError("CUDA error: device not ready")
        return 1e3 * (end_event._passed_s[0] - self._passed_s[0])


class CUDAGraph:
    """As `torch.cuda.CUDAGraph`: what is captured runs when it is replayed, and not before.

    Whatever the graph owns is undefined before a replay, and so is what nobody holds of the pool
    that it shares with other graphs.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self._capture: Capture | None = None

    def capture_begin(self, pool: Pool | None = None, **_: object) -> None:
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
                capture.origin.perform(launch)

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


def _memory_stats(device: object = None) -> dict[str, int]:
    told, index = running(), _index(device)
    return {
        f"{kind}_bytes.all.{when}": figures[index]
        for kind in ("allocated", "reserved", "active")
        for when, figures in (("current", told.allocated), ("peak", told.peak))
    }


def _set_fraction(fraction: float, device: object = None) -> None:
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    told = running()
    told.limits[_index(device)] = int(fraction * told.memory_bytes)


_SYNC_DEBUG = ("default", "warn", "error")


def _set_sync_debug(mode: int | str) -> None:
    running().sync_debug = mode if isinstance(mode, int) else _SYNC_DEBUG.index(mode)


def _sleep(cycles: int) -> None:
    told = running()
    told.launch("spin_kernel", told.device, lambda: None, cycles)


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
        "memory_stats": _memory_stats,
        "set_per_process_memory_fraction": _set_fraction,
        "set_sync_debug_mode": _set_sync_debug,
        "get_sync_debug_mode": lambda: machine.sync_debug,
        "_sleep": _sleep,
        "get_device_capability": lambda device=None: (8, 9),
        "get_device_name": lambda device=None: "Emulated GPU",
        "get_device_properties": _properties,
        "is_current_stream_capturing": lambda: machine.capture is not None,
        "cudart": lambda: runtime,
        # Random numbers of a device are drawn by the host's generator, whose state is kept with it.
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": nothing(),
    }


class _Ranges:
    """As torch's library of nvtx: ranges that are pushed and popped."""

    def __init__(self) -> None:
        self._depth = 0

    def rangePushA(self, message: str) -> int:  # noqa: N802
        self._depth += 1
        return self._depth - 1

    def rangePop(self) -> int:  # noqa: N802
        self._depth -= 1
        return self._depth

    def rangeStartA(self, message: str) -> int:  # noqa: N802
        return 0

    def rangeEnd(self, number: int) -> None:  # noqa: N802
        pass

    def markA(self, message: str) -> None:  # noqa: N802
        pass


def others(machine: Machine) -> list[tuple[object, str, object]]:
    """What stands in outside of torch.cuda's own names: owner, name, stand-in."""
    return [
        (torch, "Stream", Stream),
        (torch.cuda.nvtx, "_nvtx", _Ranges()),
        (torch.cuda.graph, "default_capture_stream", None),  # made when it is asked for
        (torch.profiler, "profile", profiler_of(machine)),
        (torch._C, "_host_emptyCache", lambda: None),
        (pinned, "device_address", lambda address: address),
    ]


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
