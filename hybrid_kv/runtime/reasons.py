"""Why a step is not made in the fastest way, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class PlanReason(NamedTuple):
    """Why a step is no single call. code: one of a fixed set; text: in words."""

    code: str
    text: str


@dataclass(slots=True)
class GraphUse:
    """What became of the last forward as one graph.

    reason: why it was not a replay; None where it was. captures, replays: so far.
    """

    reason: PlanReason | None = None
    captures: int = 0
    replays: int = 0

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        code, text = self.reason or ("", "")
        counts = {"captures": self.captures, "replays": self.replays}
        return {"code": code, "reason": text, **counts}
