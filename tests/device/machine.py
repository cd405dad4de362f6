"""The emulated machine: streams as queues, memory that can run out, captures, and counts.

What the host tells a device is put into the queue of a stream and runs when the schedule lets it:

    "now"    at once, as if the device were infinitely fast
    "late"   only when somebody waits for it, and then no more than is needed
    "ahead"  at once on the default streams, on others only when somebody waits
    a seed   some of what streams and events allow, at random, each time something is told

A result that is right under all of them hangs on no event that is missing and on no buffer that is
used again too early. Freed memory is overwritten in the order of the stream that it belongs to,
which is the earliest that CUDA's caching allocator would hand it out again.
"""

from __future__ import annotations

import random
import sys
import threading
import warnings
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from tests.device.pinned import Borrowed, PinnedMemory

Schedule = Literal["now", "late", "ahead"] | int
_PACKAGES = ("hybrid_kv", "transformers")
_SYNCHRONIZES = "called a synchronizing CUDA operation"
_NOT_WARNED_OF = ("Event.synchronize", "torch.cuda.synchronize")
"""Waits that somebody asked for by name: torch's debug mode says nothing of them."""
_QUERIES_BEFORE_PROGRESS = 1000


class HostWaitsError(RuntimeError):
    """The host would wait for the device where it must not."""


class CaptureError(RuntimeError):
    """Something was asked for that a stream that is captured does not permit."""


def calling_line() -> str:
    """The innermost line of the package or of transformers: 'runtime/decode.py:94 attend'."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        for package in _PACKAGES:
            _, found, rest = name.rpartition(f"/{package}/")
            if found:
                return f"{rest}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def _warn_of_wait() -> None:
    """As torch warns: at the innermost line that is neither torch's nor the device's own."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    place = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(_SYNCHRONIZES, UserWarning, *place)


def _is_inside(name: str) -> bool:
    return ("/tests/device/" in name and "test_" not in name) or "/torch/" in name


@dataclass
class Counts:
    """What the host told the devices; views cost a device nothing and are not counted.

    kernels: by name. waits: by what waited and the line. to_device, to_host: bytes of copies over
    the bus. read: bytes of page-locked rows that kernels of selection read there, when they run.
    """

    launches: int = 0
    kernels: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    to_device: int = 0
    to_host: int = 0
    copies: int = 0
    captures: int = 0
    replays: int = 0
    read: int = 0

    @property
    def num_waits(self) -> int:
        return self.waits.total()

    def add(self, name: str, bus_bytes: int | None) -> None:
        """One launch, or one copy over the bus."""
        if bus_bytes is None:
            self.launches += 1
            self.kernels[name] += 1
            return
        self.copies += 1
        if name == "to_device":
            self.to_device += bus_bytes
        else:
            self.to_host += bus_bytes

    def since(self, before: Counts) -> Counts:
        """What was added to an earlier copy."""
        return Counts(
            self.launches - before.launches,
            self.kernels - before.kernels,
            self.waits - before.waits,
            self.to_device - before.to_device,
            self.to_host - before.to_host,
            self.copies - before.copies,
            self.captures - before.captures,
            self.replays - before.replays,
            self.read - before.read,
        )

    def plus(self, more: Counts) -> Counts:
        """Both together."""
        return Counts(
            self.launches + more.launches,
            self.kernels + more.kernels,
            self.waits + more.waits,
            self.to_device + more.to_device,
            self.to_host + more.to_host,
            self.copies + more.copies,
            self.captures + more.captures,
            self.replays + more.replays,
            self.read + more.read,
        )

    def copy(self) -> Counts:
        return Counts(
            self.launches,
            self.kernels.copy(),
            self.waits.copy(),
            self.to_device,
            self.to_host,
            self.copies,
            self.captures,
            self.replays,
            self.read,
        )


@dataclass(unsafe_hash=True)  # frozen takes long to make
class Launch:
    """One thing that a device was told: its name, what it gets, and the line that told it.

    operands: of tensors address, shape and dtype; numbers as they are.
    """

    name: str
    run: Callable[[], None] = field(compare=False, repr=False)
    operands: tuple[object, ...] = ()
    line: str = field(default="", compare=False)


class Recording(list[Launch]):
    """Launches in the order told, and the memory that was made meanwhile.

    Both are kept, so that no address in a recording stands for two allocations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[Tensor] = []

    def by_allocation(self) -> list[Launch]:
        """The launches, with what was allocated meanwhile named by its number and an offset.

        An address that is left is of memory from before: a graph of these launches would read and
        write it there at each replay.
        """
        places = sorted(
            (one.untyped_storage().data_ptr(), one.untyped_storage().nbytes(), number)
            for number, one in enumerate(self.memory)
        )

        def renamed(operand: object) -> object:
            if not isinstance(operand, tuple):
                return operand
            if len(operand) == 4 and isinstance(operand[3], torch.dtype):
                return _named(operand[0], places), *operand[1:]
            return tuple(renamed(one) for one in operand)

        return [replace(one, operands=tuple(map(renamed, one.operands))) for one in self]


def _named(address: int, places: list[tuple[int, int, int]]) -> object:
    found = bisect_right(places, address, key=lambda place: place[0]) - 1
    if found < 0:
        return address
    begin, num_bytes, number = places[found]
    return (number, address - begin) if address - begin < max(1, num_bytes) else address


class _Local(threading.local):
    """What a thread has chosen: its device, the streams of devices, and a capture under way."""

    def __init__(self) -> None:
        self.device = 0
        self.queues: dict[int, Queue] = {}
        self.capture: Capture | None = None


Point = tuple["Queue", int]
"""A queue, and how many of its launches are over."""
DeadBlock = tuple[Tensor, "Queue", "Pool | None", list[Point]]
"""Memory that is free: whose it was, and where other streams must have got to."""


class Queue:
    """What one stream of a device was told and has not done yet, in order.

    freed: memory of the stream, which its next allocation may get; until then it is as it was.
    """

    def __init__(self, device: int, timelines: list[Timeline]) -> None:
        self.device, self._timelines = device, timelines
        self.waiting: deque[Launch | Point] = deque()
        self.done = self.told = 0
        self.freed: list[Tensor] = []

    def here(self) -> Point:
        return self, self.told

    def tell(self, what: Launch | Point) -> None:
        self.waiting.append(what)
        self.told += 1

    def run_one(self) -> None:
        self.run_until(self.done + 1)

    def perform(self, launch: Launch) -> None:
        """Runs a launch, and notes when it did."""
        if not self._timelines:
            launch.run()
            return
        begin = perf_counter()
        launch.run()
        for timeline in self._timelines:
            timeline.done.append((launch.name, self.device, begin, perf_counter()))

    def run_until(self, number: int) -> None:
        if self.done >= number or not self.waiting:
            return
        # In inference mode, which alone may write to the tensors that are made in it.
        with (
            torch._C.DisableTorchFunction(),
            torch._C._DisableTorchDispatch(),
            torch._C._InferenceMode(True),
        ):
            while self.done < number and self.waiting:
                what = self.waiting.popleft()
                self.done += 1
                if isinstance(what, Launch):
                    self.perform(what)
                else:
                    other, there = what
                    other.run_until(there)


class Timeline:
    """What devices did while somebody profiled them, in seconds of `perf_counter`.

    done: name, device, begin and end of launches, in the order in which they ran; those of a replay
    one by one. told: name, begin and end of the calls by which the host told it.
    """

    def __init__(self) -> None:
        self.done: list[tuple[str, int, float, float]] = []
        self.told: list[tuple[str, float, float]] = []


class Block:
    """One allocation, shared by all views of it; when the last of them is gone it is free.

    memory: all of it, flat. pool: that of a capture that made it, which keeps it for replays.
    """

    def __init__(
        self, memory: Tensor, queue: Queue, pool: Pool | None, dead: deque[DeadBlock]
    ) -> None:
        self.memory, self.queue, self.pool = memory, queue, pool
        self.users: list[Point] = []  # other streams that use it, as record_stream told
        self._dead = dead

    def __del__(self) -> None:
        # In any thread at any time: it is noted, and the next call acts.
        self._dead.append((self.memory, self.queue, self.pool, self.users))


class Pool:
    """The memory that captures share.

    A capture may be given what an earlier one has freed, so a replay may overwrite all that later
    captures own, and whatever is free.
    """

    def __init__(self) -> None:
        self.freed: list[Tensor] = []
        self.captures: list[Capture] = []

    def overwritten_by(self, capture: Capture) -> list[Tensor]:
        """All that a replay leaves undefined before its launches run."""
        later = self.captures[self.captures.index(capture) :]
        return [*(memory for one in later for memory in one.memory), *self.freed]


class Capture:
    """A capture under way: its launches, in the order told, and the streams that belong to it."""

    def __init__(self, origin: Queue, pool: Pool) -> None:
        self.origin, self.pool = origin, pool
        self.launches: list[Launch] = []
        self.streams = {origin}
        self.unjoined: set[Queue] = set()
        pool.captures.append(self)
        self.memory: list[Tensor] = []
        self.failed = ""

    def fail(self, what: str) -> CaptureError:
        self.failed = f"operation not permitted when stream is capturing: {what}"
        return CaptureError(self.failed)


class Machine:
    """Devices, what they were told, and how far they are.

    Args:
        num_devices: of them.
        memory_bytes: of each.
        schedule: when what was told is done; see above.
        strict: a wait of the host is an error, with its line.
    """

    def __init__(
        self,
        num_devices: int = 1,
        memory_bytes: int = 24 << 30,
        schedule: Schedule = "now",
        strict: bool = False,
    ) -> None:
        self.num_devices, self.memory_bytes = num_devices, memory_bytes
        self.schedule, self.strict = schedule, strict
        self.counts = Counts()
        self.lock = threading.RLock()
        self.allocated = [0] * num_devices
        self.peak = [0] * num_devices
        self.limits = [memory_bytes] * num_devices  # of the process
        self.trace: Recording | None = None
        self.faults: list[str] = []
        self._pinned = PinnedMemory()
        self.timelines: list[Timeline] = []
        self.sync_debug = 0
        self._queues = [Queue(device, self.timelines) for device in range(num_devices)]
        self._all: list[Queue] = list(self._queues)
        self._local = _Local()
        self._random = random.Random(schedule if isinstance(schedule, int) else 0)
        self._queried: Counter[int] = Counter()
        self._dead: deque[DeadBlock] = deque()

    # Streams and events.

    def new_queue(self, device: int) -> Queue:
        with self.lock:
            self._all.append(Queue(device, self.timelines))
            return self._all[-1]

    def default_queue(self, device: int) -> Queue:
        return self._queues[device]

    @property
    def device(self) -> int:
        """The current device of this thread."""
        return self._local.device

    @device.setter
    def device(self, device: int) -> None:
        self._local.device = device

    def current(self, device: int) -> Queue:
        """The current stream of this thread on a device."""
        return self._local.queues.get(device, self._queues[device])

    @contextmanager
    def on(self, queue: Queue) -> Iterator[None]:
        """A stream is the current one of its device, and its device the current one."""
        before, device = self._local.queues, self.device
        self._local.queues = {**before, queue.device: queue}
        self._local.device = queue.device
        try:
            yield
        finally:
            self._local.queues, self._local.device = before, device

    def queue_waits(self, queue: Queue, point: Point) -> None:
        """What a stream is told from now on comes after a point of another one."""
        with self.lock:
            capture, other = self.capture, point[0]
            if capture is not None and (queue in capture.streams or other in capture.streams):
                if other not in capture.streams:
                    raise capture.fail("a wait for what is no part of the capture")
                if queue not in capture.streams:
                    capture.streams.add(queue)
                    capture.unjoined.add(queue)
                elif other is not capture.origin:
                    capture.unjoined.discard(other)
                return
            queue.tell(point)
            self._progress()

    def is_done(self, point: Point) -> bool:
        """Whether a point is reached, which a host may ask without waiting."""
        with self.lock:
            self._forbid_in_capture("a query of an event")
            queue, number = point
            self._progress()
            if queue.done < number:
                self._queried[id(queue)] += 1
                if self._queried[id(queue)] % _QUERIES_BEFORE_PROGRESS == 0:
                    queue.run_until(number)  # it is late, but not for ever
            return queue.done >= number

    def host_waits(self, what: str, *points: Point) -> None:
        """The host waits for some points; for all that was told where none is given.

        Raises:
            HostWaitsError: waits are forbidden.
            CaptureError: the stream is captured.
        """
        with self.lock:
            self._forbid_in_capture(what)
            where = f"{what} in {calling_line()}"
            self.counts.waits[where] += 1
            if self.strict:
                raise HostWaitsError(where)
            if self.sync_debug and what not in _NOT_WARNED_OF:
                if self.sync_debug == 2:
                    raise RuntimeError(_SYNCHRONIZES)
                _warn_of_wait()
            self.arrive(*points)

    @contextmanager
    def no_waits(self) -> Iterator[None]:
        """A block in which a wait of the host is an error with its line."""
        before, self.strict = self.strict, True
        try:
            yield
        finally:
            self.strict = before

    def arrive(self, *points: Point) -> None:
        """What was told up to some points is done, or all, without a wait being counted."""
        with self.lock:
            self._bury()
            for queue, number in points or [queue.here() for queue in self._all]:
                queue.run_until(number)

    def _progress(self) -> None:
        self._bury()
        if self.schedule in ("now", "ahead"):
            for queue in self._all if self.schedule == "now" else self._queues:
                queue.run_until(queue.told)
        elif self.schedule != "late":
            ready = [queue for queue in self._all if queue.waiting]
            for _ in range(self._random.choice((0, 0, 1, 3)) if ready else 0):
                queue = self._random.choice(ready)
                if queue.waiting:
                    queue.run_one()

    # Launches.

    def launch(self, name: str, device: int, run: Callable[[], None], *operands: object) -> None:
        """A device is told to do something, on the current stream."""
        with self.lock:
            self._tell(self.current(device), name, run, operands)

    def copy_over_bus(
        self, name: str, device: int, run: Callable[[], None], num_bytes: int, *operands: object
    ) -> None:
        """A copy between host and device, on the current stream."""
        with self.lock:
            self._tell(self.current(device), name, run, operands, num_bytes)

    def _tell(
        self,
        queue: Queue,
        name: str,
        run: Callable[[], None],
        operands: Sequence[object],
        bus_bytes: int | None = None,
    ) -> None:
        self._bury()
        begin, capture = perf_counter(), self._local.capture
        noted = capture is not None or self.trace is not None
        line = calling_line() if noted else ""
        described = tuple(_described(one) for one in operands) if noted else ()
        told = Launch(name, run, described, line)
        if self.trace is not None:
            self.trace.append(told)
        if capture is not None and queue in capture.streams:
            capture.launches.append(told)
            return
        self.counts.add(name, bus_bytes)
        queue.tell(told)
        for timeline in self.timelines:
            timeline.told.append((name, begin, perf_counter()))
        self._progress()

    def mark(self, queue: Queue, run: Callable[[], None]) -> Point:
        """A stream calls `run` when it gets there, which is no work; the point behind it."""
        with self.lock:
            if self.capture is None or queue not in self.capture.streams:
                queue.tell(Launch("mark", run))
                self._progress()
            return queue.here()

    @contextmanager
    def recorded(self) -> Iterator[Recording]:
        """Notes each launch, in order, and what is allocated meanwhile."""
        with self.lock:
            self.trace, before = Recording(), self.trace
        try:
            yield self.trace
        finally:
            self.trace = before

    # Captures.

    @property
    def capture(self) -> Capture | None:
        """The capture that this thread has under way."""
        return self._local.capture

    @capture.setter
    def capture(self, capture: Capture | None) -> None:
        self._local.capture = capture

    def forbid_in_capture(self, what: str) -> None:
        with self.lock:
            self._forbid_in_capture(what)

    def _forbid_in_capture(self, what: str) -> None:
        if (capture := self.capture) is not None:
            raise capture.fail(what)

    # Memory.

    def allocate(self, like: Tensor, device: int) -> tuple[Tensor, Block]:
        """Memory of undefined content for a tensor such as `like` (on "meta").

        Raises:
            OutOfMemoryError: the device has less.
        """
        with self.lock, torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            self._bury()
            if torch.is_inference_mode_enabled():
                with torch._C._InferenceMode(False):
                    memory = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
            else:
                memory = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
            return memory, self.own(memory, device)

    def own(self, memory: Tensor, device: int) -> Block:
        """Counts memory as the device's, and fills it with what undefined memory may hold."""
        with self.lock, torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            num_bytes = memory.untyped_storage().nbytes()
            if self.allocated[device] + num_bytes > self.limits[device]:
                self.arrive()
                self._bury()
            if self.allocated[device] + num_bytes > self.limits[device]:
                raise torch.OutOfMemoryError(self._ran_out(num_bytes, device))
            self.allocated[device] += num_bytes
            self.peak[device] = max(self.peak[device], self.allocated[device])
            if memory.nbytes == num_bytes:
                whole = memory.detach()
            else:
                whole = torch.empty(0, dtype=memory.dtype).set_(memory.untyped_storage())
            poison(whole)
            if self.trace is not None:
                self.trace.memory.append(whole)
            capture, queue = self.capture, self.current(device)
            pool = None
            if capture is not None and queue in capture.streams:
                pool = capture.pool
                capture.memory.append(whole)
            elif freed := queue.freed:
                queue.tell(Launch("freed", partial(_poison_all, freed)))
                queue.freed = []
            return Block(whole, queue, pool, self._dead)

    def _ran_out(self, num_bytes: int, device: int) -> str:
        """In torch's words, which others read."""
        mib = 1 << 20
        free = self.limits[device] - self.allocated[device]
        return (
            f"CUDA out of memory. Tried to allocate {num_bytes / mib:.2f} MiB. GPU {device} has a "
            f"total capacity of {self.memory_bytes / mib:.2f} MiB of which {free / mib:.2f} MiB is "
            "free."
        )

    def _bury(self) -> None:
        while self._dead:
            memory, queue, pool, users = self._dead.popleft()
            self.allocated[queue.device] -= memory.untyped_storage().nbytes()
            if pool is not None:
                pool.freed.append(memory)
                continue
            for point in users:
                queue.tell(point)
            queue.freed.append(memory)

    # Page-locked memory.

    def pin(self, address: int, num_bytes: int, *, of_torch: bool = False) -> None:
        """Locks a range of host memory; `of_torch`: it belongs to torch's pool."""
        with self.lock:
            self._forbid_in_capture("page-locking host memory")
            self._pinned.lock(address, num_bytes, of_torch=of_torch)

    def unpin(self, address: int) -> None:
        """Unlocks it. A fault where a device has yet to use it, which is told when all has ended:
        finalizers come here, whose errors nobody sees.
        """
        with self.lock:
            if (found := self._pinned.unlock(address)) is None:
                return
            late = [(queue, number) for queue, number in found.users if queue.done < number]
            if late:
                self.faults.append(
                    f"{found.num_bytes} bytes of page-locked memory were given up while "
                    f"{len(late)} launches had yet to use them"
                )
                found.is_locked = True  # it is still there in a finalizer, and gone afterwards
                self.arrive(*late)
                found.is_locked = False

    def is_pinned(self, tensor: Tensor) -> bool:
        with self.lock:
            return self._pinned.of(tensor) is not None

    def borrow(self, tensor: Tensor, device: int, *, is_copy: bool) -> Borrowed:
        """What the next launch on a device's current stream reaches a host tensor by.

        Plain memory is kept until then, as what torch copies from its own pool is.
        """
        with self.lock:
            found = self._pinned.of(tensor)
            if found is None or (found.of_torch and is_copy):
                return Borrowed(tensor.detach(), None)
            if self.capture is None:
                queue = self.current(device)
                found.users = [user for user in found.users if user[0].done < user[1]]
                found.users.append((queue, queue.told + 1))
            return Borrowed(tensor, found, is_copy=is_copy)


def poison(memory: Tensor) -> None:
    """Overwrites the whole of an allocation with what nobody can have meant."""
    memory.fill_(_undefined(memory.dtype))


def _poison_all(memory: Sequence[Tensor]) -> None:
    for one in memory:
        poison(one)


@cache
def _undefined(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max // 2


def _described(operand: Any) -> object:
    if isinstance(operand, Tensor):
        return operand.data_ptr(), tuple(operand.shape), operand.stride(), operand.dtype
    if isinstance(operand, (list, tuple)):
        return tuple(_described(one) for one in operand)
    return operand


def differences(first: Sequence[Launch], second: Sequence[Launch]) -> list[str]:
    """Where two steps told a device something else, a line each; addresses and numbers included."""
    found = []
    for number, (one, two) in enumerate(zip(first, second, strict=False)):
        if one != two:
            found.append(f"{number}: {one.name} at {one.line} became {two.name} at {two.line}")
    if len(first) != len(second):
        found.append(f"{len(first)} launches became {len(second)}")
    return found
