"""What a registry of contexts was good for, counted over all processes that use its folder."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(slots=True)
class RegistryCounters:
    """hits, misses: prompts of a block or more that began with a context, or with none.

    tokens_saved: that were not computed again. seconds_saved: what they had taken when they were,
    in proportion to their number, less the time for finding, checking and opening; none where that
    took longer or was not measured. added, evicted: contexts. damaged: contexts that were dropped
    because they were not as written.
    """

    hits: int = 0
    misses: int = 0
    tokens_saved: int = 0
    seconds_saved: float = 0.0
    added: int = 0
    evicted: int = 0
    damaged: int = 0

    def plus(self, more: RegistryCounters) -> RegistryCounters:
        """Both together."""
        sums = {f.name: getattr(self, f.name) + getattr(more, f.name) for f in fields(self)}
        return RegistryCounters(**sums)

    @classmethod
    def read(cls, path: Path) -> RegistryCounters:
        """What a file says; zeros where there is none, or none of ours."""
        try:
            known = json.loads(path.read_bytes())
            found = cls(**{field.name: known[field.name] for field in fields(cls)})
            return found.plus(cls())  # numbers, or they could not be added
        except (OSError, ValueError, LookupError, TypeError):
            return cls()

    def write(self, path: Path) -> None:
        """Replaces a file in a single step.

        Raises:
            OSError: it cannot be written.
        """
        beside = path.with_suffix(f".{os.getpid()}.part")
        beside.write_text(json.dumps(asdict(self)) + "\n")
        os.replace(beside, path)
