"""The process of one job: `python -m benchmarks.gpu_check.child '{"kind": ..., "settings": ...}'`.

Settings that every kind takes: `device`, and `sizes`, a name of `SIZES`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.sizes import SIZES, Sizes

_SET_PARENT_DEATH_SIGNAL = 1
Measure = Callable[[Recorder, Sizes, dict[str, Any]], None]

KINDS = {
    "probe": "probe",
    "tests": "testing",
    "facts": "facts",
    "kernels": "kernels",
    "right": "right",
    "constants": "constants",
    "steps": "steps",
    "prompt": "prompt",
    "copies": "copies",
    "memops": "memops",
    "host_gather": "host_gather",
    "page_gather": "page_gather",
    "decode_attention": "decode_attention",
    "selection": "selection",
    "device_select": "device_select",
    "nearest_keys": "nearest",
    "prefill_attention": "prefill_attention",
    "decoder_layer": "decoder_layer",
    "end_to_end": "end_to_end",
    "fault": "faults",
}
"""The module of each kind; its function `measure` does the work."""


def main() -> None:
    _end_with(os.getppid())
    request = json.loads(sys.argv[1])
    # Libraries print to stdout at will; rows go where they cannot be mixed up with that.
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    measure(request["kind"], request["settings"], Recorder(rows))


def measure(kind: str, settings: dict[str, Any], record: Recorder) -> None:
    """Measures all rows of a job."""
    module = import_module(f"benchmarks.gpu_check.{KINDS[kind]}")
    work: Measure = module.measure
    work(record, SIZES[settings["sizes"]], settings)


def _end_with(parent: int) -> None:
    """This process ends when the one that began it does, however that ends (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended meanwhile
        os._exit(1)


if __name__ == "__main__":
    main()
