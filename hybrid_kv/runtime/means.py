"""What the layers of a cache share."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_kv.ops import Ops
from hybrid_kv.plugins import Method
from hybrid_kv.runtime.builds import IndexBuilds
from hybrid_kv.runtime.finite import FiniteGuard
from hybrid_kv.runtime.look_ahead import LookAhead
from hybrid_kv.runtime.numbers import StepNumbers
from hybrid_kv.runtime.select import Selectors
from hybrid_kv.store.ahead import PinnedAhead
from hybrid_kv.transfer import Executor
from hybrid_kv.types import Needs, Work
from hybrid_kv.watch.phases import Phases


@dataclass(slots=True)
class Means:
    """The policy of a cache, what computes and moves for it, and where it counts.

    finite: looks at what is stored. numbers: tell devices of steps.
    watched: evidence that somebody wants kept, beside what the method needs.
    reserved_tokens: that are expected in a row, so that memory is taken once.
    audits: whether somebody looks at what is missed; then what methods drop is kept on the host.
    look_ahead: searches layers before their queries are known; None where the method wants none.
    """

    ops: Ops
    executor: Executor
    finite: FiniteGuard
    phases: Phases
    page_size: int
    pinned: PinnedAhead
    method: Method
    method_name: str
    builds: IndexBuilds
    selectors: Selectors
    work: Work
    numbers: StepNumbers
    watched: Needs = Needs()
    reserved_tokens: int = 0
    audits: bool = False
    look_ahead: LookAhead | None = None

    def reserve(self, num_tokens: int) -> None:
        """Announces how many tokens will come in a row."""
        self.reserved_tokens = max(self.reserved_tokens, num_tokens)
