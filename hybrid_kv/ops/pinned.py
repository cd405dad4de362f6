"""Page-locked host memory: a GPU reads and writes it by itself, at the full rate of the bus.

Large arrays lie on huge pages, which CUDA's own allocation does not give, and are registered with
CUDA as they are. Small ones come from torch's pool.
"""

from __future__ import annotations

import math
import mmap
import os
import resource
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from threading import Event
from warnings import warn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_kv.errors import PinnedMemoryWarning
from hybrid_kv.ops.captures import after_captures, device_in_use
from hybrid_kv.ops.native.memory import HUGE_PAGE_BYTES, as_tensor, map_pages

_warned = Event()
_refused = Event()
"""CUDA has refused to lock an array, and nothing was unlocked since. Asking again would cost time,
and where all of a system's locked memory is limited (WSL2), take what staging buffers need.
"""


def pinned_array(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A host array of undefined content, page-locked where CUDA is there and grants it.

    All of it is committed at once, unlike that of `host_array`: ask for what will be written. It
    stays locked while any view of it lives; then its release waits for the current device.
    May be written inside and outside of inference mode.

    Raises:
        CapacityError: the system grants no such array.

    Warns:
        PinnedMemoryWarning: CUDA refuses, and the array is plain memory; once per process. CUDA is
            not asked again for arrays until one is unlocked.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    if num_bytes < HUGE_PAGE_BYTES:
        return pinned_empty(size, dtype)
    pages = map_pages(num_bytes)
    if torch.cuda.is_available() and not _refused.is_set() and (reason := _lock(pages)):
        _refused.set()
        _warn_once(num_bytes, reason)
    return as_tensor(pages, size, dtype)


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
                _warn_once(num_bytes, _first_line(error))
        return torch.empty(list(size), dtype=dtype)


def why_not_pinned() -> str | None:
    """What CUDA says against locking a few MB of host memory; None where it does lock them."""
    return _lock(map_pages(HUGE_PAGE_BYTES)) or None


def lock_limit_bytes() -> int | None:
    """How much memory this process may lock by the system's rules (`ulimit -l`); None: any."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def _lock(pages: npt.NDArray[np.uint8]) -> str:
    """Registers fresh pages until they are released; what CUDA says where it refuses, else ''."""
    address = pages.ctypes.data
    num_bytes = -(-pages.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        cudart = torch.cuda.cudart()
        with device_in_use():
            code = cudart.cudaHostRegister(address, num_bytes, 0)
        if int(code) == 0:
            # Of the array, not of the mapping below it, which is gone when its finalizers run. Not
            # at exit: CUDA may have ended by then, and the system takes everything back.
            weakref.finalize(pages, _unlock, address, os.getpid()).atexit = False
            return ""
        reason = f"{cudart.cudaGetErrorString(code)} ({int(code)})"
    except RuntimeError as error:  # CUDA cannot be initialised
        return _first_line(error)
    # CUDA reports the failure a second time to whoever launches the next kernel: that is this one.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return reason


def _unlock(address: int, process: int) -> None:
    if os.getpid() == process:  # a copy of the process has neither the locks nor CUDA
        after_captures(partial(_unlock_now, address))


def _unlock_now(address: int) -> None:
    with suppress(RuntimeError):  # CUDA has failed for good
        torch.cuda.synchronize()  # a copy or kernel may be at work on these pages
        torch.cuda.cudart().cudaHostUnregister(address)
        _refused.clear()


def _warn_once(num_bytes: int, reason: str) -> None:
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
        stacklevel=3,
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
