"""The most memory that this process held for a while."""

from __future__ import annotations

from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """The peak of the resident set since this object was made, where the system can tell."""

    def __init__(self) -> None:
        try:
            _CLEAR.write_text("5")  # Linux: the peak begins anew
            self._known = True
        except OSError:
            self._known = False

    def bytes(self) -> int | None:
        """None where the system counts since the process began, or not at all."""
        if not self._known:
            return None
        lines = _STATUS.read_text().splitlines()
        peak = next((line for line in lines if line.startswith("VmHWM:")), None)
        return None if peak is None else 1024 * int(peak.split()[1])
