"""Decode steps of the same layer of several caches, each a call of the engine, as one call."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_kv.ops.native.step import JointRun
from hybrid_kv.ops.native.workers import pool_here
from hybrid_kv.runtime.engine_plan import Begun, EnginePlan
from hybrid_kv.runtime.step import Step
from hybrid_kv.types import PartialAttention


class JointPlan:
    """The steps of several rows, each of which its own plan could make alone.

    Rows have nothing in common but the call, so that one that fails leaves the others alone.

    plans: by row.
    """

    def __init__(self, plans: Sequence[EnginePlan]) -> None:
        self.plans = plans
        self._run = JointRun([plan.told for plan in plans])

    def attend(self, steps: Sequence[Step]) -> list[PartialAttention | None]:
        """By row what its plan's `attend` returns; None where that would raise, and nothing of the
        step was stored.
        """
        begun: list[Begun] = []
        try:
            for plan, step in zip(self.plans, steps, strict=True):
                begun.append(plan.begin(step))
            made = self._run.run(pool_here())
        except BaseException:
            for plan, one in zip(self.plans, begun, strict=False):  # those that had begun
                plan.take_back(one)
            raise
        parts: list[PartialAttention | None] = []
        for plan, one, is_made in zip(self.plans, begun, made, strict=True):
            if is_made:
                parts.append(plan.end(one))
            else:
                plan.take_back(one)
                parts.append(None)
        return parts
