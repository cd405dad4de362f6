"""What a device did while torch's profiler watched: its own events alone.

The rows of CPU operators have the device time of the kernels that they launched, and the kernels
have rows as well: a sum over both counts each kernel twice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """Of some work: kernels and copies that ran, and the host's calls.

    num_kernels, num_copies: as the device ran them, those of a graph one by one. busy_us: in which
    any of them ran. kernel_us: of each kernel by name, in order. num_launches: calls that launch a
    kernel. num_graphs: calls that launch a graph.
    """

    num_kernels: int
    num_copies: int
    busy_us: float
    kernel_us: dict[str, list[float]] = field(repr=False)
    num_launches: int
    num_graphs: int


def profiled(work: Callable[[], object]) -> DeviceWork:
    """Runs some work on a CUDA device under the profiler, to its end."""
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=kinds) as profiler:
        work()
        torch.cuda.synchronize()
    return device_work(profiler.events())


def device_work(events: Iterable[Any]) -> DeviceWork:
    """Of a profiler's events."""
    calls: Counter[str] = Counter()
    spans, kernels, copies = list[tuple[float, float]](), defaultdict[str, list[float]](list), 0
    for event in events:
        if event.device_type == DeviceType.CPU:
            calls[event.name] += 1
            continue
        if event.is_user_annotation:  # a range that somebody named, around kernels
            continue
        spans.append((event.time_range.start, event.time_range.end))
        if event.name.startswith(("Memcpy", "Memset")):
            copies += 1
        else:
            kernels[event.name].append(event.time_range.elapsed_us())
    return DeviceWork(
        num_kernels=sum(map(len, kernels.values())),
        num_copies=copies,
        busy_us=_covered(spans),
        kernel_us=dict(kernels),
        num_launches=sum(n for name, n in calls.items() if name.startswith(_LAUNCHES)),
        num_graphs=calls["cudaGraphLaunch"],
    )


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length that intervals cover together, those that overlap once."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
