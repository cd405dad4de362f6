"""Page-locked host memory: a GPU reads and writes it by itself, at the full rate of the bus.

Large arrays lie on huge pages, which CUDA's own allocation does not give, and are registered with
CUDA as they are. Small ones come from torch's pool. Rows may grow where they lie:

    [..., capacity, D]   address space of this process, of which nothing is committed
     ├─ locked ─┤        the first rows of each array: a GPU reads and writes them by itself

More rows are locked behind those that are: nothing is copied, and nothing that was told an address
(descriptors, captured graphs) is told another. A copy over the bus keeps within what was locked at
once, see `bus_copies`. Captures of CUDA graphs exclude what another thread may tell the device
meanwhile, such as to register memory.
"""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import os
import resource
import sys
import threading
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from threading import Event, Lock, RLock
from warnings import warn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_kv.errors import PinnedMemoryWarning
from hybrid_kv.ops.host_memory import HUGE_PAGE_BYTES, aligned, as_tensor, map_pages, mapped


class CaptureBusyError(RuntimeError):
    """No capture can begin now: others use the device. Try again later."""


class _Turns:
    """Turns of using the devices of this process: any number of users, or one capture."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._users = 0
        self._capturing: int | None = None  # the thread whose capture is under way
        self._after: list[Callable[[], None]] = []

    @contextmanager
    def used(self) -> Iterator[None]:
        with self._changed:
            if self._capturing == threading.get_ident():
                raise RuntimeError("operation not permitted while this thread captures a graph")
            self._changed.wait_for(lambda: self._capturing is None)
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1

    @contextmanager
    def captured(self) -> Iterator[None]:
        with self._changed:
            if self._users or self._capturing is not None:
                raise CaptureBusyError("another thread uses the device")
            self._capturing = threading.get_ident()
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()
            with self._changed:
                self._capturing = None
                waiting, self._after = self._after, []
                self._changed.notify_all()
            for work in waiting:
                work()

    def after(self, work: Callable[[], None]) -> None:
        with self._changed:
            if self._capturing is not None:
                self._after.append(work)
                return
        work()


_turns = _Turns()


def device_in_use() -> AbstractContextManager[None]:
    """A block of work that no capture may run beside; waits for one that is under way.

    Raises:
        RuntimeError: this thread's own capture is under way.
    """
    return _turns.used()


def captures() -> AbstractContextManager[None]:
    """A block in which a graph is captured; Python's collector is paused in all threads, since it
    may free memory that waits for the device.

    Raises:
        CaptureBusyError: somebody uses the device, or captures.
    """
    return _turns.captured()


def after_captures(work: Callable[[], None]) -> None:
    """Does something that waits for the device now, or when the capture under way has ended."""
    _turns.after(work)


_warned = Event()
_refused = Event()
"""CUDA has refused to lock an array, and nothing was unlocked since. Asking again would cost time,
and where all of a system's locked memory is limited (WSL2), take what staging buffers need.
"""
_starts: list[int] = []
_ends: dict[int, int] = {}
_ranges_lock = RLock()  # a finalizer may come in between
"""The ranges that are locked: their addresses in order, and by address where they end."""
PAGE_BYTES = mmap.PAGESIZE
"""Of the system; what is locked is whole ones."""
_DEVICE_POINTER = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER


def pinned_array(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A host array of undefined content, page-locked where CUDA is there and grants it.

    All of it is committed at once, unlike that of `host_array`: ask for what will be written. It
    stays locked while any view of it lives; then its release waits for the current device.
    May be written inside and outside of inference mode.

    Raises:
        CapacityError: the system grants no such array.

    Warns:
        PinnedMemoryWarning: see `lock_ranges`; the array is plain memory then.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    if num_bytes < HUGE_PAGE_BYTES:
        return pinned_empty(size, dtype)
    pages = map_pages(num_bytes)
    lock_ranges(pages, [(pages.ctypes.data, num_bytes)])
    return as_tensor(pages, size, dtype)


def lock_ranges(pages: npt.NDArray[np.uint8], ranges: Sequence[tuple[int, int]]) -> bool:
    """Locks ranges (address, bytes) of `pages`, each from a page on, all or none of them, until
    `pages` are given up. False where there is no CUDA, or it refuses.

    Warns:
        PinnedMemoryWarning: CUDA refuses; once per process. It is not asked again for ranges until
            some are unlocked.
    """
    if not torch.cuda.is_available() or _refused.is_set():
        return False
    reason, done = "", list[int]()
    for address, num_bytes in ranges:
        if reason := _lock(address, num_bytes):
            break
        done.append(address)
    if reason:
        _forget(done)
        _unregister(done)
        _refused.set()
        _warn_once(sum(num_bytes for _, num_bytes in ranges), reason, stacklevel=4)
        return False
    # Of the array, not of the mapping below it, which is gone when its finalizers run. Not at exit:
    # CUDA may have ended by then, and the system takes everything back.
    weakref.finalize(pages, _unlock, done, os.getpid()).atexit = False
    return True


def device_address(address: int) -> int | None:
    """Address by which kernels reach locked host memory; None where CUDA's driver does not say.

    On most systems that is where the host has it, and ranges that follow one another do so there
    as well.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    found = ctypes.c_uint64()
    given = ctypes.c_int(_DEVICE_POINTER), ctypes.c_uint64(address)
    return None if driver.cuPointerGetAttribute(ctypes.byref(found), *given) else found.value


def locked_end(address: int) -> int | None:
    """End of the locked range that an address lies in; None where it lies in none of ours."""
    with _ranges_lock:
        place = bisect_right(_starts, address) - 1
        if place < 0:
            return None
        end = _ends[_starts[place]]
    return end if address < end else None


def pinned_empty(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `pinned_array`, for staging buffers of KBs to MBs: torch's pool rounds sizes up to powers
    of two, and gives released memory out again.
    """
    with torch.inference_mode(False):
        num_bytes = math.prod(size) * dtype.itemsize
        if num_bytes and torch.cuda.is_available():
            try:
                return torch.empty(list(size), dtype=dtype, pin_memory=True)
            except RuntimeError as error:
                _warn_once(num_bytes, _first_line(error), stacklevel=3)
        return torch.empty(list(size), dtype=dtype)


def why_not_pinned() -> str | None:
    """Reason of CUDA against locking a few MB of host memory; None where it does lock them."""
    pages = map_pages(HUGE_PAGE_BYTES)
    address = pages.ctypes.data
    reason = _lock(address, HUGE_PAGE_BYTES)
    if not reason:
        _forget([address])
        _unregister([address])
    return reason or None


def lock_limit_bytes() -> int | None:
    """Bytes that this process may lock by the system's rules (`ulimit -l`); None: any."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def _lock(address: int, num_bytes: int) -> str:
    """Registers pages until they are unregistered; what CUDA says where it refuses, else ''."""
    num_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    try:
        cudart = torch.cuda.cudart()
        with device_in_use():
            code = cudart.cudaHostRegister(address, num_bytes, 0)
        if int(code) == 0:
            with _ranges_lock:
                insort(_starts, address)
                _ends[address] = address + num_bytes
            return ""
        reason = f"{cudart.cudaGetErrorString(code)} ({int(code)})"
    except RuntimeError as error:  # CUDA cannot be initialised
        return _first_line(error)
    # CUDA reports the failure a second time to whoever launches the next kernel: that is this one.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return reason


def _unlock(addresses: Sequence[int], process: int) -> None:
    _forget(addresses)
    if os.getpid() == process:  # a copy of the process has neither the locks nor CUDA
        after_captures(partial(_unlock_now, addresses))


def _unlock_now(addresses: Sequence[int]) -> None:
    if not torch.cuda.is_initialized():  # shut down before the memory, and the locks with it
        return
    with suppress(RuntimeError):  # CUDA has failed for good
        torch.cuda.synchronize()  # a copy or kernel may be at work on these pages
        _unregister(addresses)
        _refused.clear()


def _unregister(addresses: Sequence[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)


def _forget(addresses: Sequence[int]) -> None:
    with _ranges_lock:
        for address in addresses:
            _starts.remove(address)
            del _ends[address]


def _warn_once(num_bytes: int, reason: str, *, stacklevel: int) -> None:
    if _warned.is_set():
        return
    _warned.set()
    limit = lock_limit_bytes()
    raise_it = "" if limit is None else f" or raise `ulimit -l` (now {limit:,} bytes)"
    warn(
        f"host memory cannot be pinned: {num_bytes:,} bytes were asked for, CUDA says '{reason}'; "
        "everything works, with slower transfers to and from the GPU; shorten the context, free "
        f"host memory{raise_it}",
        PinnedMemoryWarning,
        stacklevel=stacklevel,
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


class ReservedPages:
    """Address space of the process whose memory is committed as it is written, on small pages.

    array: [num_bytes] zeros, aligned to huge pages.

    Raises:
        CapacityError: the system refuses.
    """

    def __init__(self, num_bytes: int) -> None:
        self._pages = mapped(num_bytes, _NO_RESERVE)
        self.array = aligned(self._pages, num_bytes)
        self._skip = self.array.ctypes.data - np.frombuffer(self._pages, np.uint8).ctypes.data

    def use_huge(self, start: int, stop: int) -> None:
        """Lets whole huge pages within some bytes be huge; before these are written."""
        first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        last = stop // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if first < last:
            with suppress(AttributeError, OSError):  # not every system knows them
                self._pages.madvise(mmap.MADV_HUGEPAGE, self._skip + first, last - first)


_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, which `mmap` has no name for: swap is not set aside for all of it."""


class PinnedRows:
    """Arrays of rows in host memory, of which the first are page-locked; plain memory where there
    is no CUDA, or it refuses the first of them.

    May be used by several threads. The memory lives, locked, as long as a view of `rows`.

    rows: [..., capacity, D], writable below `locked` of the second to last axis. grows: whether
    more may be locked.

    Args:
        size: [..., n, D]; the capacity is n or some more.

    Raises:
        CapacityError: the system has no such address space.
    """

    def __init__(self, size: Sequence[int], dtype: torch.dtype) -> None:
        *arrays, count, width = size
        self._row_bytes = width * dtype.itemsize
        is_large = count * self._row_bytes >= HUGE_PAGE_BYTES
        whole = self._rows_of(HUGE_PAGE_BYTES if is_large else PAGE_BYTES)
        self._num_arrays, self.capacity = math.prod(arrays), -(-count // whole) * whole
        self._array_bytes = self.capacity * self._row_bytes
        self._pages = ReservedPages(max(1, self._num_arrays * self._array_bytes))
        self.rows = as_tensor(self._pages.array, [*arrays, self.capacity, width], dtype)
        self.locked, self.grows = 0, True
        self._lock = Lock()

    def _rows_of(self, page_bytes: int) -> int:
        """The least number of rows that is whole pages."""
        return math.lcm(self._row_bytes, page_bytes) // self._row_bytes

    def bytes_to(self, count: int) -> int:
        """Bytes that the first `count` rows of each array commit beyond what is."""
        return max(0, count - self.locked) * self._row_bytes * self._num_arrays

    def lock(self, count: int) -> bool:
        """Locks the first `count` rows of each array; whether they may be written.

        False beyond the capacity, where CUDA refuses more, and where kernels would not reach more
        in the place behind.
        """
        with self._lock:
            if count <= self.locked:
                return True
            if count > self.capacity or not self.grows:
                return False
            return self._lock_to(count)

    def _lock_to(self, count: int) -> bool:
        whole = self._rows_of(PAGE_BYTES)
        stop = min(self.capacity, -(-count // whole) * whole) * self._row_bytes
        start, ranges = self.locked * self._row_bytes, list[tuple[int, int]]()
        for first in range(0, self._num_arrays * self._array_bytes, self._array_bytes):
            self._pages.use_huge(first + start, first + stop)
            ranges.append((self.rows.data_ptr() + first + start, stop - start))
        is_locked = lock_ranges(self._pages.array, ranges)
        if self.locked:
            self.grows = is_locked
        elif is_locked:
            address = self.rows.data_ptr()
            self.grows = device_address(address) == address
        if is_locked:
            self.locked = stop // self._row_bytes
        elif not self.locked:
            self.locked = self.capacity  # plain
        return count <= self.locked


def bus_copies(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of a target with those of its source, one of which is host memory: a copy each.

    A part is contiguous on the host, since torch would copy anything else into plain memory first,
    and wait; and it lies within one locked range, since CUDA refuses what lies in several.
    """
    host = source if source.is_cpu else target
    here = _num_in_one_range(host)
    if (host.ndim > 1 and not host.is_contiguous()) or (host.ndim > 2 and here < len(host)):
        for part, from_ in zip(target, source, strict=True):
            yield from bus_copies(part, from_)
    elif host.ndim == 0 or here == len(host):
        yield target, source.contiguous() if source.is_cpu else source
    else:
        yield target[:here], source[:here]
        yield from bus_copies(target[here:], source[here:])


def _num_in_one_range(host: Tensor) -> int:
    """The number of first rows of a contiguous host tensor that lie in one locked range."""
    if not host.numel():
        return len(host)
    address, row_bytes = host.data_ptr(), host.nbytes // len(host) if host.ndim else host.nbytes
    end = locked_end(address)
    count = len(host) if host.ndim else 1
    return count if end is None else min(count, (end - address) // row_bytes)


def free_bytes(device: torch.device) -> int:
    """Memory of a CUDA device for tensors: what nobody has, and what torch keeps ready."""
    free = int(torch.cuda.mem_get_info(device)[0])
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
