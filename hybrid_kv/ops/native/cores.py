"""How many threads a search may keep busy."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_SPARED_FROM = 4
"""Cores from which on one is left to the device's driver, to builds and to everybody else."""


def default_threads() -> int:
    """One per core that this process may use, less one where there are four and more.

    The threads of one core share its loads and its memory, which searches are made of.
    """
    cores = num_cores(os.sched_getaffinity(0))
    if (quota := cpu_quota()) is not None:
        cores = min(cores, max(1, int(quota)))
    return cores - 1 if cores >= _SPARED_FROM else cores


def num_cores(cpus: Iterable[int], system: Path = Path("/sys/devices/system/cpu")) -> int:
    """Physical cores of some CPUs; one per CPU where the system does not say."""
    cores = set()
    for cpu in cpus:
        siblings = f"{cpu}"
        with suppress(OSError):
            siblings = (system / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        cores.add(siblings)
    return len(cores)


def cpu_quota(control: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """CPUs' worth of time that a container grants (cgroup v2); None for no limit."""
    try:
        quota, period = control.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
