"""What the machine is. A process of its own asks, as asking makes a context that takes memory."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.sizes import Sizes
from hybrid_kv.report.run import probe_environment


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    record.measure("machine", machine)


def machine() -> dict[str, Any]:
    """The environment, and the GPU; "device" is None where torch sees none."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    environment = probe_environment(device).model_dump(mode="json")
    versions = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    if not torch.cuda.is_available():
        return {"environment": environment, **versions, "device": None}
    found = torch.cuda.get_device_properties(0)
    return {
        "environment": environment,
        **versions,
        "device": {
            "name": found.name,
            "memory_bytes": found.total_memory,
            "capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
        },
    }
