"""What a result was measured on, for its JSON document."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch


def surroundings() -> dict[str, Any]:
    """Threads of torch, cores, machine and torch's version."""
    return {
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
