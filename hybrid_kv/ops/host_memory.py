"""Host memory: arrays for the engine, aligned and on huge pages, and how much may still be taken.

The machine is not the only one that sets a limit: `ulimit -v` and containers (cgroups, versions 1
and 2) do too, and neither shows in what the system calls available.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from hybrid_kv.errors import CapacityError

HUGE_PAGE_BYTES = 2 * 2**20
"""Arrays of this size on have a mapping of their own."""
_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self")


def host_array(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the host, aligned to 64 bytes at least, of undefined content.

    A search reads rows all over a large array, and with small pages most of these reads also miss
    the TLB; so a large one lies on huge pages if the system grants them. Memory that is never
    written is not committed. May be written inside and outside of inference mode.

    Raises:
        CapacityError: the system grants no such array.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    if num_bytes >= HUGE_PAGE_BYTES:
        return as_tensor(map_pages(num_bytes), size, dtype)
    with torch.inference_mode(False):
        return torch.empty(list(size), dtype=dtype)


def host_zeros(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `host_array`, of zeros; these take no memory either before they are written."""
    num_bytes = math.prod(size) * dtype.itemsize
    if num_bytes >= HUGE_PAGE_BYTES:
        return as_tensor(map_pages(num_bytes), size, dtype)
    with torch.inference_mode(False):
        return torch.zeros(list(size), dtype=dtype)


def as_tensor(pages: npt.NDArray[np.uint8], size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The memory of `pages`, which lives as long as the tensor and its views, under a shape."""
    with torch.inference_mode(False):
        return torch.from_numpy(pages).view(dtype).view(list(size))


def map_pages(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Fresh zeros [num_bytes] from the system, on huge pages and aligned to them.

    Raises:
        CapacityError: the system refuses.
    """
    pages = mapped(num_bytes)
    with suppress(AttributeError, OSError):  # not every system knows them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return aligned(pages, num_bytes)


def mapped(num_bytes: int, flags: int = 0) -> mmap.mmap:
    """A mapping of so many bytes, and of a huge page more, so that its start can be aligned."""
    # Private, as huge pages are seldom granted to shared memory, which is the default here. A
    # copy of the process sees its own memory from then on.
    flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        return mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=flags)
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        raise CapacityError(
            f"host memory ran out: the system grants no array of {num_bytes:,} bytes, "
            f"{free_memory()}; shorten the context or free memory"
        ) from error


def aligned(pages: mmap.mmap, num_bytes: int) -> npt.NDArray[np.uint8]:
    """The first bytes of a mapping that begin a huge page; they keep it alive."""
    raw = np.frombuffer(pages, dtype=np.uint8)
    skip = -raw.ctypes.data % HUGE_PAGE_BYTES
    return raw[skip : skip + num_bytes]


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes, and the limit that is met first; "" where that is the machine's memory."""

    num_bytes: int
    limit: str = ""

    def __str__(self) -> str:
        """'5,000 bytes are free', with the limit."""
        return f"{self.num_bytes:,} bytes are free{self.limit}"


def free_memory() -> FreeMemory:
    """The least of what machine, container and process leave."""
    machine = psutil.virtual_memory()
    found = [FreeMemory(machine.available), *_of_process(), *_of_container(machine.total)]
    return min(found, key=lambda free: free.num_bytes)


def give_back_freed() -> None:
    """Lets the system have the memory that was freed here, which the C library keeps for later, for
    each thread apart. Nothing where the library has no such call.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found


def _of_process() -> Iterator[FreeMemory]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        used = psutil.Process().memory_info().vms
        yield FreeMemory(max(0, limit - used), " within the limit of this process (ulimit -v)")


def _of_container(total_bytes: int) -> Iterator[FreeMemory]:
    for folder, names in _groups():
        limit = _number(folder / names[0])
        if limit is None or limit >= total_bytes:  # the machine's memory is met before
            continue
        used = _number(folder / names[1])
        if used is not None:
            # Pages of files that nobody writes are given back when memory is asked for.
            cached = _stat(folder / "memory.stat", names[2])
            free = max(0, limit - used + min(cached, used))
            yield FreeMemory(free, " within the limit of the container (cgroup)")


def _groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The folders of this process's group and those above it, with the names of their files."""
    try:
        lines = (_OWN / "cgroup").read_text().splitlines()
    except OSError:  # no Linux, or none of /proc
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = _CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = _CGROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        while folder != root:
            yield folder, names
            folder = folder.parent
        yield root, names


def _number(file: Path) -> int | None:
    """Number in a file; None for "max", and where there is no file."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(file: Path, name: str) -> int:
    try:
        pairs = (line.split() for line in file.read_text().splitlines())
        return int(dict(pairs).get(name, 0))
    except (OSError, ValueError):
        return 0
