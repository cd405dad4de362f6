"""Where kernels run: on a GPU, or by the interpreter on the CPU, as TRITON_INTERPRET says first."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def needs_kernels() -> None:
    """Skips the module that calls it, as a whole, where kernels run nowhere."""
    pytest.importorskip("triton", reason="Triton is not installed: scripts/check --triton")
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("kernels need TRITON_INTERPRET=1 or a GPU", allow_module_level=True)
