"""Medians of device times and of the time the host takes to issue the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from statistics import median
from time import perf_counter
from typing import Any

import torch

Calls = Sequence[Callable[[], object]]

_CYCLES_PER_S = 2.0e9
_LONGEST_SLEEP_S = 0.25


def timed(calls: Calls, device: torch.device, *, rounds: int, least: int) -> dict[str, Any]:
    """Microseconds per call; the calls are made in turn, as a model goes from layer to layer.

    Args:
        least: so many calls stand behind one timing at least.

    Returns:
        us: on the device, or wall time on the CPU. issue_us: what the host needs to launch, None on
        the CPU. A step that issues more slowly than the device works is bound by the host.
    """
    batch = list(islice(cycle(calls), max(least, len(calls))))
    for call in calls:
        call()  # compiles, and touches all memory
    if device.type != "cuda":
        return {"us": 1e6 * median(_wall_s(batch) for _ in range(rounds)), "issue_us": None}
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        issue = median(_issue_s(batch) for _ in range(rounds))
        spans = [_device_s(batch, issue * len(batch)) for _ in range(rounds)]
    return {"us": 1e6 * median(spans), "issue_us": 1e6 * issue}


def wall_us(work: Callable[[], object], *, rounds: int) -> dict[str, Any]:
    """Microseconds of work that waits for the device by itself: median, and 90th percentile."""
    for _ in range(3):
        work()
    times = sorted(_wall_s([work]) for _ in range(rounds))
    return {"us": 1e6 * median(times), "p90_us": 1e6 * times[int(0.9 * len(times))]}


def gbps(values: dict[str, Any], size: int) -> dict[str, Any]:
    """The values with the rate at which `size` bytes a call were read, in 1e9 bytes per second."""
    return {**values, "gbps": size / values["us"] / 1e3}


def _wall_s(batch: Calls) -> float:
    begin = perf_counter()
    for call in batch:
        call()
    return (perf_counter() - begin) / len(batch)


def _issue_s(batch: Calls) -> float:
    seconds = _wall_s(batch)
    torch.cuda.synchronize()
    return seconds


def _device_s(batch: Calls, issue_s: float) -> float:
    """Between events, with the device kept busy until all is issued: no gaps of the host's."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(min(1.5 * issue_s, _LONGEST_SLEEP_S) * _CYCLES_PER_S))
    begin.record()
    for call in batch:
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / len(batch)
