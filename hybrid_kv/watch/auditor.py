"""Audits beside decoding: looks at one head at a time, and acts on what was found."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Literal
from warnings import warn

from torch import Tensor

from hybrid_kv.config import AuditParams
from hybrid_kv.errors import AuditError, RecallWarning
from hybrid_kv.transfer import Executor
from hybrid_kv.types import LayerShape, PartialAttention
from hybrid_kv.watch.audit import Audit, Estimate, Finding, Look, Target, WatchedStep

_log = logging.getLogger(__name__)

_FEWEST = 4
"""Looks before an alarm: an interval from fewer says nothing."""
_WIDEST = 8
"""Times the configured budget, where the action is to widen it."""

Scope = int | None
"""A layer, or None for all of them."""


class Auditor:
    """Audits one cache and raises the alarm that its settings ask for.

    One look is under way at a time, by `executor`; a head whose turn comes meanwhile is passed
    over. Everything else happens in the thread that decodes.

    Args:
        every: decode steps from one look to the next.
        executor: runs the looks; closed with the auditor.
    """

    def __init__(
        self, every: int, params: AuditParams, layers: tuple[LayerShape, ...], executor: Executor
    ) -> None:
        self.audit = Audit(every, layers)
        self._params, self._executor = params, executor
        self._future: Future[None] | None = None
        self._found: list[Finding | None] = []
        self._since = 0  # findings that an alarm has judged already
        self._factors: dict[Scope, int] = {}
        self._warned = False
        self._target: Target | None = None  # of the step that is looked at

    def wants(self, layer_idx: int, q: Tensor) -> bool:
        """Whether a head of the layer is looked at in the step that begins; mostly it is not.

        Args:
            q: [B, Hq, T, D]; steps of one token are looked at.

        Raises:
            AuditError: what was found so far is worse than the settings allow, and they say raise.
        """
        self._target = self.audit.due(layer_idx) if q.shape[2] == 1 else None
        if self._target is None or (self._future is not None and not self._future.done()):
            return False
        self.settle()
        return True

    def add(self, step: WatchedStep, part: PartialAttention) -> None:
        """Starts a look at that step, off the critical path, at one row of its batch in turn."""
        assert self._target is not None
        row = len(self.audit.findings) % len(part.out)
        self.begin(Look(step, row, self._target, part))

    def begin(self, look: Look) -> None:
        """Starts a look."""
        self._future = self._executor.background(lambda: self._found.append(look.finding()))

    def settle(self) -> None:
        """Waits for the look that is under way, and raises the alarm where it is due.

        Raises:
            AuditError: see `wants`.
        """
        if self._future is None:
            return
        future, self._future = self._future, None
        try:
            future.result()
        finally:
            del future  # this frame hangs on an error, and the error on the future
        found, self._found = self._found, []
        self.audit.findings += [finding for finding in found if finding is not None]
        for finding in found:
            if finding is not None:
                self._judge(finding.target.layer_idx)

    def factor(self, layer_idx: int) -> int:
        """By which a layer's budget of cold entries is multiplied."""
        return max(self._factors.get(layer_idx, 1), self._factors.get(None, 1))

    def close(self) -> None:
        """Ends the look that is under way; its finding is not wanted any more."""
        self._executor.close()

    def _judge(self, layer_idx: int) -> None:
        recent = self.audit.since(self._since)
        for scope in (layer_idx, None):
            if (problem := self._problem(recent, scope)) is not None:
                self._act(scope, problem)
                return

    def _problem(self, audit: Audit, scope: Scope) -> str | None:
        """Description of a measure that is surely worse than allowed, at 95%; None mostly."""
        where, limits = "all layers" if scope is None else f"layer {scope}", self._params
        recall = _telling(audit.recall(scope))
        if recall is not None and recall.mean + recall.half_width < limits.min_recall:
            return (
                f"{_said(recall)} of the best cold entries of {where} are found, not "
                f"{limits.min_recall}: choose another index"
            )
        lost = audit.missed_by_index(scope)
        error = audit.mass_error(scope)
        what = "is missed" if error is None or error.mean <= 0 else "is estimated too much"
        for estimate, most, said in (
            (
                audit.mass_error_size(scope),
                limits.max_missed_mass,
                f"of the attention of {{}} {what}",
            ),
            (audit.output_error(scope), limits.max_output_error, "is the output error of {}"),
        ):
            worst = _telling(estimate)
            if worst is None or most is None or worst.mean - worst.half_width <= most:
                continue
            found = f"{_said(worst)} {said.format(where)}, more than {most}"
            if said.endswith("too much"):
                return f"{found}: choose estimate first_order or none, or raise top_k"
            by_index = 0.0 if lost is None else lost.mean
            return (
                f"{found}; {by_index:.2f} of the attention was lost by the index, the rest by the "
                "budget: raise top_k"
            )
        return None

    def _act(self, scope: Scope, problem: str) -> None:
        action: Literal["warn", "widen", "raise"] = self._params.action
        if action == "raise":
            _log.info("audit raises: %s", problem)
            raise AuditError(f"the audit found that {problem}, or set audit.action to warn")
        what = ""
        if action == "widen":
            factor = self._factors.get(scope, 1)
            if factor < _WIDEST:
                self._factors[scope] = 2 * factor
                _log.info("audit widens budgets %d times: %s", 2 * factor, problem)
                self._since = len(self.audit.findings)  # the wider search is judged by its own
            what = f"; budgets are widened, up to {_WIDEST} times"
        if not self._warned:
            self._warned = True
            _log.info("audit warns: %s; %s", problem, what)
            warn(f"the audit found that {problem}{what}", RecallWarning, stacklevel=2)


def _telling(estimate: Estimate | None) -> Estimate | None:
    return None if estimate is None or estimate.looks < _FEWEST else estimate


def _said(estimate: Estimate) -> str:
    return f"{estimate.mean:.2f} ± {estimate.half_width:.2f}"
