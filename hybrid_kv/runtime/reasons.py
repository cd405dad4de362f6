"""Why a step is not made in the fastest way, as a value."""

from __future__ import annotations

from typing import NamedTuple


class PlanReason(NamedTuple):
    """Why a step is no single call. code: one of a fixed set; text: in words."""

    code: str
    text: str
