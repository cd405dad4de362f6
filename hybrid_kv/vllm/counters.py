"""Counters of attention inside vLLM, from the processes that attend to the one that shows them.

    engine, workers   layers count ─► FOLDER/<process>, a few numbers in mapped memory
    front end         vLLM's /metrics and `LLM.get_metrics` ─► sums over FOLDER

vLLM's own numbers travel with the answers, in types that a plug-in cannot add to. The process that
loads the plug-in first names the folder, in the environment of those it starts, and removes it.
Where several servers share one port, vLLM shows a registry of its own, which lacks these.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily

FOLDER = "HYBRID_KV_VLLM_COUNTERS"
"""Variable that names the folder; made by `publish`, not by users."""

FIELDS = MappingProxyType(
    {
        "decodes": "Tokens decoded, each counted in every layer of full attention",
        "searched_decodes": "Those of them whose contexts were searched",
        "estimated_decodes": "Those of them whose unread entries were estimated",
        "context_entries": "Entries of the contexts of decoded tokens",
        "searched_entries": "Entries of them whose codes were searched",
        "read_entries": "Entries of them that a query head attended exactly",
        "prompt_tokens": "Tokens of prompts, each counted in every layer of full attention",
        "indexes": "Indexes that layers learned",
        "audit_looks": "Decoded tokens of a layer that the audit compared with exact attention",
        "audit_missed_mass": "Sum over looks of the share of the softmax that was not read",
        "audit_output_error": "Sum over looks of the relative distance of the output",
    }
)


class StepCounts:
    """Sums by field of `FIELDS`, in memory or in a file.

    Args:
        path: a new file; None for memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.begin(path)

    def begin(self, path: Path | None) -> None:
        """Begin at zero, in another file; None for memory."""
        shape = (len(FIELDS),)
        self._values = (
            np.zeros(shape)
            if path is None
            else np.memmap(path, dtype=np.float64, mode="w+", shape=shape)
        )

    def add(self, **more: float) -> None:
        """Count on."""
        for name, value in more.items():
            self._values[_PLACES[name]] += value

    def __getitem__(self, name: str) -> float:
        return float(self._values[_PLACES[name]])


_PLACES = {name: place for place, name in enumerate(FIELDS)}


@cache
def process_counts() -> StepCounts:
    """Counts of this process, in the folder where there is one."""
    counts = StepCounts(_own_file())
    # Layers hold it, and a forked process would write to its parent's file: two who add at once.
    os.register_at_fork(after_in_child=lambda: counts.begin(_own_file()))
    return counts


def _own_file() -> Path | None:
    folder = os.environ.get(FOLDER)
    if folder is None:
        return None
    Path(folder).mkdir(mode=0o700, exist_ok=True)
    return Path(folder) / f"{os.getpid()}-{secrets.token_hex(4)}"


def totals(folder: Path) -> dict[str, float]:
    """Sums over the processes that have counted in a folder; empty where none has."""
    found = [np.fromfile(path) for path in folder.iterdir()] if folder.is_dir() else []
    whole = [values for values in found if len(values) == len(FIELDS)]
    return dict(zip(FIELDS, np.sum(whole, 0).tolist(), strict=True)) if whole else {}


class CountsCollector:
    """Metrics of a folder, as Prometheus collects them: `vllm:hybrid_kv_<field>`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[CounterMetricFamily]:
        """One metric for each field; none before a layer is there."""
        for name, value in totals(self._folder).items():
            yield CounterMetricFamily(f"vllm:hybrid_kv_{name}", FIELDS[name], value=value)


def publish() -> None:
    """Show the counters of this process and of those that it starts; may be called again."""
    if FOLDER in os.environ:
        return
    folder = Path(tempfile.gettempdir()) / f"hybrid-kv-vllm-{secrets.token_hex(8)}"
    os.environ[FOLDER] = str(folder)
    REGISTRY.register(CountsCollector(folder))
    atexit.register(_remove, folder, os.getpid())


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked process ends as well
        shutil.rmtree(folder, ignore_errors=True)
