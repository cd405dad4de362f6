"""How much host memory this process may still take, and who says so.

The machine is not the only one that sets a limit: `ulimit -v` and containers (cgroups, versions 1
and 2) do too, and neither shows in what the system calls available.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self")


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
    found = [FreeMemory(psutil.virtual_memory().available), *_of_process(), *_of_container()]
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


def _of_container() -> Iterator[FreeMemory]:
    for folder, names in _groups():
        limit, used = (_number(folder / name) for name in names[:2])
        if limit is not None and used is not None:
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
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                yield folder, names


def _number(file: Path) -> int | None:
    """What a file says; None for "max", and where it is not there."""
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
