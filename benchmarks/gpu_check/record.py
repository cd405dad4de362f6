"""How a job's process hands over what it measures."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

import torch

from benchmarks.gpu_check.jobs import MARK
from benchmarks.gpu_check.limits import checked
from hybrid_kv.errors import BackendUnavailable

_WHY_CHARS = 300


class NotHere(Exception):  # noqa: N818 (a state of the machine, not an error)
    """What a row needs is not on this machine; the message says what."""


def need_cuda(device: torch.device) -> None:
    """Raises NotHere on the CPU."""
    if device.type != "cuda":
        raise NotHere("CUDA only: this runs on the CPU")


@dataclass
class Recorder:
    """Prints rows as they are measured, and keeps none."""

    out: TextIO

    def measure(self, name: str, work: Callable[[], dict[str, Any]], **settings: Any) -> None:
        """A row with what `work` returns, or with the reason why it returned nothing.

        It has failed, too, where a `Difference` is beyond its limit; its values are kept.
        """
        status, why, values = "ok", None, dict[str, Any]()
        try:
            values, beyond = checked(work())
            if beyond is not None:
                status, why = "failed", beyond
        except (NotHere, BackendUnavailable) as reason:
            status, why = "skipped", str(reason)
        except Exception as error:  # one row must not end the others
            status, why = "failed", sentence(error)
        self.write(name, status, why, settings, values)
        if status != "ok":
            gc.collect()  # what an exception held on to
        if torch.cuda.is_available():
            with suppress(RuntimeError):  # a lost device: the rows to come will say so
                torch.cuda.empty_cache()

    def write(
        self,
        name: str,
        status: str,
        why: str | None,
        settings: dict[str, Any],
        values: dict[str, Any],
    ) -> None:
        row = {"name": name, "status": status, "why": why, "settings": settings, "values": values}
        print(MARK + json.dumps(row), file=self.out, flush=True)


def sentence(error: BaseException) -> str:
    """The kind of an error and its first line."""
    kind = type(error).__name__
    if isinstance(error, torch.OutOfMemoryError):
        kind = "out of device memory"
    lines = str(error).strip().splitlines()
    return f"{kind}: {lines[0] if lines else 'no message'}"[:_WHY_CHARS]
