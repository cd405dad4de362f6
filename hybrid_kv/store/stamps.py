"""Stamps: whoever a plan describes marks it when that changes, so that no step has to look.

stamp = Stamp()                     # of a plan
pool.stamps.add(stamp)              # it describes this pool
...
chain.stamps.grow()                 # there is more of the same: stamp.has_grown says so
pool.stamps.mark("pages moved")     # the pool is another one: stamp.reason says so
"""

from __future__ import annotations

import threading
from weakref import WeakSet


class Stamp:
    """Whether a plan still describes what it was made from.

    reason: what has changed since; "" while nothing has. Any thread may set it; nobody clears it.
    has_grown: whether there is more of the same, which a plan may follow, and clears this.
    """

    __slots__ = ("__weakref__", "has_grown", "reason")

    def __init__(self) -> None:
        self.reason, self.has_grown = "", False


class Stamps:
    """The stamps of the plans that describe one thing; may be used by several threads."""

    __slots__ = ("_lock", "_stamps")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stamps: WeakSet[Stamp] = WeakSet()

    def add(self, stamp: Stamp) -> None:
        """Marks this stamp as well when what it describes changes."""
        with self._lock:
            self._stamps.add(stamp)

    def grow(self) -> None:
        """Tells all stamps that there is more of the same, where it lay."""
        with self._lock:
            for stamp in self._stamps:
                stamp.has_grown = True

    def mark(self, what: str) -> None:
        """Marks all stamps, and forgets them: the thing has changed.

        Args:
            what: the change, in words.
        """
        if not self._stamps:  # nearly always; who is added from now on describes what is now
            return
        with self._lock:
            stamps, self._stamps = list(self._stamps), WeakSet()
        for stamp in stamps:
            stamp.reason = stamp.reason or what
