"""Jobs that end badly on purpose: a rehearsal shows that the others go on."""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.sizes import Sizes


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    record.write("before the fault", "ok", None, {}, {})
    if settings["fault"] == "crash":
        os.abort()
    time.sleep(3600)
