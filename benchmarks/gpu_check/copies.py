"""Copies between host and device, small and large, pinned or not; what waiting for one costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.record import Recorder, need_cuda
from benchmarks.gpu_check.sizes import Sizes
from benchmarks.gpu_check.timing import gbps, wall_us


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    device = torch.device(settings["device"])
    small = sizes.small_rounds
    for size in (*sizes.small_copies_bytes, sizes.large_copy_bytes):
        rounds = sizes.rounds if size == sizes.large_copy_bytes else small
        for pinned in (True, False):
            for direction in ("d2h", "h2d"):
                record.measure(
                    f"copy {direction}",
                    partial(copied, device, size, pinned, direction, rounds),
                    bytes=size,
                    pinned=pinned,
                )
    record.measure("event round trip", partial(event_round_trip, device, small))
    for size in sizes.small_copies_bytes:
        record.measure(
            "query out, result in",
            partial(hand_over, device, size, small),
            bytes=size,
        )


def copied(
    device: torch.device, size: int, pinned: bool, direction: str, rounds: int
) -> dict[str, Any]:
    """One copy, waited for."""
    host, near = _pair(device, size, pinned)
    source, target = (near, host) if direction == "d2h" else (host, near)
    wait = _waiter(device)

    def work() -> None:
        target.copy_(source, non_blocking=True)
        wait()

    return gbps(wall_us(work, rounds=rounds), size)


def event_round_trip(device: torch.device, rounds: int) -> dict[str, Any]:
    """An event is recorded on an idle stream and waited for."""
    need_cuda(device)
    event = torch.cuda.Event()

    def work() -> None:
        event.record()
        event.synchronize()

    return wall_us(work, rounds=rounds)


def hand_over(device: torch.device, size: int, rounds: int) -> dict[str, Any]:
    """What a layer's step does around its search: a query leaves, an event, a result comes in."""
    need_cuda(device)
    host, near = _pair(device, size, True)
    event = torch.cuda.Event()

    def work() -> None:
        host.copy_(near, non_blocking=True)
        event.record()
        event.synchronize()
        near.copy_(host, non_blocking=True)

    values = wall_us(work, rounds=rounds)
    torch.cuda.synchronize(device)
    return values


def _pair(device: torch.device, size: int, pinned: bool) -> tuple[Tensor, Tensor]:
    host = torch.ones(size, dtype=torch.uint8)
    if pinned:
        need_cuda(device)
        host = host.pin_memory()
    return host, torch.ones(size, dtype=torch.uint8, device=device)


def _waiter(device: torch.device) -> Callable[[], object]:
    if device.type != "cuda":
        return lambda: None
    return torch.cuda.current_stream(device).synchronize
