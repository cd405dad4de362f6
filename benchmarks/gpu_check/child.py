"""The process of one job: `python -m benchmarks.gpu_check.child '{"kind": ..., "settings": ...}'`.

Settings that every kind takes: `device`, and `rehearse` for tiny sizes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.sizes import FULL, REHEARSAL, Sizes

Measure = Callable[[Recorder, Sizes, dict[str, Any]], None]

KINDS = {
    "probe": "probe",
    "tests": "testing",
    "facts": "facts",
    "kernels": "kernels",
    "first_run": "first_run",
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
    request = json.loads(sys.argv[1])
    # Libraries print to stdout at will; rows go where they cannot be mixed up with that.
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = import_module(f"benchmarks.gpu_check.{KINDS[request['kind']]}")
    measure: Measure = module.measure
    settings = request["settings"]
    measure(Recorder(rows), REHEARSAL if settings.get("rehearse") else FULL, settings)


if __name__ == "__main__":
    main()
