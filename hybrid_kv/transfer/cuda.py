"""Beside a CUDA device: copies on a stream of their own, results staged in pinned memory.

No thread waits for the device. A decode step sends its queries, enqueues the resident attention,
and by the time that is done (some 100 us of launches) the queries lie on the host; the search then
runs while the device attends. Pinned staging comes from torch's caching host allocator, which hands
the same blocks out again and knows, by events, which of them a copy still reads or writes.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from hybrid_kv.ops.native.library import work_beside
from hybrid_kv.ops.pinned import bus_copies, device_in_use, pinned_array, pinned_empty
from hybrid_kv.store import all_finite
from hybrid_kv.store.index_builder import run_into
from hybrid_kv.transfer import Executor, SyncExecutor, Transfer, Work
from hybrid_kv.transfer.graph_cache import CudaRecorder, GraphCache, WorkRecorder
from hybrid_kv.types import PartialAttention

Copies: TypeAlias = Sequence[tuple[Tensor, Tensor]]
"""Targets with their sources."""

_STAGED_BYTES = 2**20
"""Up to here what is not page-locked goes through staging; a plain copy would be waited for."""


class QueueEvent(Protocol):
    """A point in a lane's work; a `torch.cuda.Event` is one."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class CopyStream(Protocol):
    """Copies between one device and the host, on streams of their own."""

    def out(self, copies: Copies) -> QueueEvent:
        """Copies to the host, after what the device was told so far and beside what comes next."""
        ...

    def back(self, target: Tensor, source: Tensor) -> None:
        """Copies to the device, before what it is told next."""
        ...

    def stage(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory for one copy; when the tensor is given up it is used again, not too early."""
        ...


class CudaLane:
    """A stream for what leaves the device; what comes back goes by the device's current one."""

    @classmethod
    def of(cls, device: torch.device) -> CudaLane | None:
        """The lane of a CUDA device; None for the host."""
        return cls(device) if device.type == "cuda" else None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def out(self, copies: Copies) -> QueueEvent:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            mark = torch.cuda.Event()
            mark.record(self._stream)
        return mark

    def back(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def stage(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        return pinned_empty(size, dtype)


class _UnderWay:
    """A parcel between device and host; keeps what is read until it has been read."""

    def __init__(self, mark: QueueEvent, target: Tensor, source: Tensor) -> None:
        self._mark, self._target = mark, target
        self._source: Tensor | None = source

    @property
    def arrived(self) -> bool:
        if self._source is not None and self._mark.query():
            self._source = None
        return self._source is None

    def open(self) -> Tensor:
        if not self.arrived:
            self._mark.synchronize()
            self._source = None
        return self._target


class _Offloaded:
    """Entries that are written to their places when their parcel [2, H, n, D] is opened."""

    def __init__(self, parcel: Transfer, into: tuple[Tensor, Tensor]) -> None:
        self._parcel, self._into = parcel, into
        self._is_finite: Tensor | None = None

    @property
    def arrived(self) -> bool:
        return self._parcel.arrived

    def open(self) -> Tensor:
        if self._is_finite is None:
            both = self._parcel.open()
            for target, source in zip(self._into, both, strict=True):
                target.copy_(source)
            self._is_finite = all_finite(both)
        return self._is_finite


class _Kept:
    """A parcel that is copied out of the staging area when it is opened, once."""

    def __init__(self, parcel: Transfer, area: StagingArea) -> None:
        self._parcel = parcel
        self._tensor: Tensor | None = None
        self._give_back = weakref.finalize(self, area.give_back)  # opened or not

    @property
    def arrived(self) -> bool:
        return self._parcel.arrived

    def open(self) -> Tensor:
        if self._tensor is None:
            self._tensor = self._parcel.open().clone()
            self._give_back()
        return self._tensor


class CudaExecutor(SyncExecutor):
    """Moves tensors of CUDA devices beside what they compute; those on the host stay in place.

    Args:
        builds: runs index builds.
        lane: makes the lane of a device when the first of its tensors travels; None for the host.
        recorder: makes what records the work of a device; None where nothing is recorded.
    """

    at_once = False

    def __init__(
        self,
        builds: Executor,
        lane: Callable[[torch.device], CopyStream | None] = CudaLane.of,
        recorder: Callable[[torch.device], WorkRecorder | None] = CudaRecorder.of,
    ) -> None:
        self._builds, self._make_lane, self._make_recorder = builds, lane, recorder
        self._recordings: dict[torch.device, GraphCache] = {}
        self._lanes: dict[torch.device, CopyStream | None] = {}
        self._under_way: deque[_UnderWay] = deque()
        self._area = StagingArea()
        self._thread: ThreadPoolExecutor | None = None  # of the searches that run ahead

    def send(self, tensor: Tensor, into: Tensor | None = None) -> Transfer:
        """See `Executor.send`.

        A parcel that nobody opens is kept until it has arrived: the copy writes to its memory.
        """
        if (lane := self._lane(tensor.device)) is None:
            return super().send(tensor, into)
        if into is None:
            tensor = tensor.contiguous()  # else torch would copy in several steps, and wait
            into = lane.stage(tensor.shape, tensor.dtype)
            mark = lane.out([(into, tensor)])
        else:
            heads = zip(into, tensor, strict=True)
            mark = lane.out([copy for own in heads for copy in bus_copies(*own)])
        while self._under_way and self._under_way[0].arrived:
            self._under_way.popleft()
        parcel = _UnderWay(mark, into, tensor)
        self._under_way.append(parcel)
        return parcel

    def offload(self, k: Tensor, v: Tensor, into: tuple[Tensor, Tensor]) -> Transfer:
        """See `Executor.offload`.

        A few pages, as they leave in a step, go as one copy through staging and are looked at on
        the host; else each head of K and V would be a copy, and their look six launches.
        """
        if self._lane(k.device) is None:
            return super().offload(k, v, into)
        if k.nbytes + v.nbytes > _STAGED_BYTES:
            self.send(k, into[0])
            self.send(v, into[1])
            return self.send(all_finite(k, v))  # what arrives last says that all is there
        return _Offloaded(self.send(torch.stack([k, v])), into)

    def keep(self, tensor: Tensor) -> Transfer:
        """See `Executor.keep`; page-locked memory is only passed through, the same each time."""
        if self._lane(tensor.device) is None:
            return super().keep(tensor)
        return _Kept(self.send(tensor, self._area.take(tensor.shape, tensor.dtype)), self._area)

    def deliver(self, part: PartialAttention, device: torch.device) -> PartialAttention:
        """See `Executor.deliver`; output and log-sum-exp travel as one."""
        if (lane := self._lane(device)) is None:
            return super().deliver(part, device)
        both = lane.stage([part.lse.nbytes + part.out.nbytes], torch.uint8)
        for packed, values in zip(_unpacked(both, part), part, strict=True):
            packed.copy_(values)
        return _unpacked(self._back(lane, both, device), part)

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        if (lane := self._lane(device)) is None:
            return super().to_device(tensor, device)
        if tensor.nbytes <= _STAGED_BYTES and not tensor.is_pinned():
            tensor = lane.stage(tensor.shape, tensor.dtype).copy_(tensor)
        return self._back(lane, tensor, device)

    def _back(self, lane: CopyStream, tensor: Tensor, device: torch.device) -> Tensor:
        there = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        for target, source in bus_copies(there, tensor):
            lane.back(target, source)
        return there

    def repeat(
        self, owner: object, signature: Hashable, work: Work, given: Tensor
    ) -> PartialAttention:
        device = given.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return work(given)  # a part of what somebody captures
        if device not in self._recordings:
            self._recordings[device] = GraphCache(self._make_recorder(device))
        return self._recordings[device].run(owner, signature, work, given)

    def background(self, work: Callable[[], None]) -> Future[None]:
        return self._builds.background(work)

    def ahead(self, work: Callable[[], None]) -> Future[None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "hybrid-kv-ahead", work_beside)
        future: Future[None] = Future()
        self._thread.submit(run_into, future, work, BaseException)
        return future

    def building(self) -> AbstractContextManager[None]:
        return device_in_use()

    def close(self) -> None:
        """See `Executor.close`; also waits for what is under way."""
        self._builds.close()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        while self._under_way:
            self._under_way.popleft().open()

    def _lane(self, device: torch.device) -> CopyStream | None:
        if device not in self._lanes:
            self._lanes[device] = self._make_lane(device)
        return self._lanes[device]


def _unpacked(both: Tensor, like: PartialAttention) -> PartialAttention:
    """Views of bytes [lse.nbytes + out.nbytes]; lse comes first, so that both are aligned."""
    lse, out = both.split([like.lse.nbytes, like.out.nbytes])
    return PartialAttention(
        out.view(like.out.dtype).view(like.out.shape), lse.view(like.lse.dtype).view(like.lse.shape)
    )


_ALIGNMENT = 256


class StagingArea:
    """Hands out parts of one array, from its beginning again when all parts have come back.

    It grows to what is needed at once and is given to each layer in turn. Torch's pool would round
    every part up to a power of two, make new ones while old ones are in use, and keep them all.
    """

    def __init__(self) -> None:
        self._area = torch.empty(0, dtype=torch.uint8)
        self._used = self._out = self._wanted = 0

    @property
    def num_bytes(self) -> int:
        """Page-locked now."""
        return self._area.nbytes

    def take(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of undefined content, until `give_back`.

        Raises:
            CapacityError: host memory does not suffice.
        """
        count = math.prod(size) * dtype.itemsize
        room = -(-count // _ALIGNMENT) * _ALIGNMENT
        if not self._out:
            self._wanted = max(self._wanted, self._used)
            self._used = 0
        if self._used + room > self._area.nbytes:
            self._wanted = max(self._wanted, self._used + room)
            self._area = pinned_array([self._wanted], torch.uint8)  # parts keep the old one alive
            self._used = 0
        part = self._area[self._used : self._used + count]
        self._used += room
        self._out += 1
        return part.view(dtype).view(list(size))

    def give_back(self) -> None:
        """One part is not needed any more."""
        self._out -= 1
