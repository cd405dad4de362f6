"""What the machine is, beyond its name: which memory is free, and what can be locked."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.gpu_check.record import NotHere, Recorder, need_cuda
from benchmarks.gpu_check.sizes import Sizes
from hybrid_kv.ops.host_memory import host_array
from hybrid_kv.ops.pinned import lock_limit_bytes, pinned_array, why_not_pinned

_SMI = ("driver_version", "pcie.link.gen.current", "pcie.link.width.current", "memory.used")


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    device = torch.device(settings["device"])
    record.measure("versions", versions)
    record.measure("host", host)
    record.measure("device memory", partial(device_memory, device))
    record.measure("driver and bus", partial(driver, device))
    record.measure("locking host memory", partial(locking, device, sizes))


def versions() -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("triton", "transformers", "flashinfer-python"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def host() -> dict[str, Any]:
    """What the process may run on, and what the system says of threads and huge pages."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "smt": _text("/sys/devices/system/cpu/smt/active"),
        "huge_pages": _text("/sys/kernel/mm/transparent_hugepage/enabled"),
        "lock_limit_bytes": lock_limit_bytes(),
    }


def device_memory(device: torch.device) -> dict[str, Any]:
    """Free is what is left when the context is made: a display is what is missing."""
    need_cuda(device)
    torch.zeros(1, device=device)
    free, total = torch.cuda.mem_get_info(device)
    reported = torch.cuda.get_device_properties(device).total_memory
    return {"total_memory": reported, "free_bytes": free, "total_bytes": total}


def driver(device: torch.device) -> dict[str, Any]:
    need_cuda(device)
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotHere(f"nvidia-smi does not answer: {error}") from None
    return dict(zip(_SMI, ended.stdout.splitlines()[0].split(", "), strict=False))


def locking(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """An array as large as a layer's keys; whether a kernel reaches it by the address it has."""
    need_cuda(device)
    begin = perf_counter()
    plain = host_array([sizes.locked_bytes], torch.uint8).fill_(1)
    touched = perf_counter()
    array = pinned_array([sizes.locked_bytes], torch.uint8)
    locked = perf_counter()
    return {
        "bytes": plain.nbytes,
        "touch_ms": 1e3 * (touched - begin),
        "lock_ms": 1e3 * (locked - touched),
        "is_pinned": array.is_pinned(),
        "refusal": why_not_pinned(),
    }


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return "not told"
