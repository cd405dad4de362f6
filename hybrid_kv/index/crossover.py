"""What a graph takes beside what serves else: measured here, kept for this machine.

The time of a sketch or a scan grows with the keys, a graph's hardly does; one measurement at one
size says where they meet. The file is a cache: a damaged or unwritable one costs a measurement.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Crossover:
    """keys: where both take the same time, from one search of each at measured_keys.

    Times are those of one KV head with the threads of decoding; other_us is that of the sketch, or
    of the scan where that is faster; build_s: seconds of one thread for a head's graph.
    """

    keys: int
    measured_keys: int
    graph_us: float
    other_us: float
    build_s: float


def crossover_path() -> Path:
    """Where the measurements lie: $XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "hybrid_kv" / f"crossover-{platform.node() or 'machine'}.json"


def read_crossovers() -> dict[str, Crossover]:
    """All that was measured on this machine."""
    try:
        data = json.loads(crossover_path().read_text(encoding="utf-8"))
        return {name: Crossover(**entry) for name, entry in data.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def read_crossover(name: str) -> Crossover | None:
    """The latest measurement for one shape of heads."""
    return read_crossovers().get(name)


def write_crossover(
    name: str, keys: int, *, graph_s: float, other_s: float, build_s: float
) -> None:
    """Keeps a measurement; the latest counts, because machines and loads change."""
    entry = Crossover(round(keys * graph_s / other_s), keys, 1e6 * graph_s, 1e6 * other_s, build_s)
    known = {**read_crossovers(), name: entry}
    text = json.dumps(
        {
            key: {field: getattr(value, field) for field in Crossover.__slots__}
            for key, value in sorted(known.items())
        },
        indent=1,
    )
    path = crossover_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        return  # a cache: the next build measures again
