"""Which heads of a layer try a graph: what was tried before decides for heads that are like it.

A graph is hard to search where queries see many dimensions of the keys (`effective_dim`). So a head
whose graph was of no use speaks for those of as many dimensions or more, and one whose graph is
faster says what those near it have to expect. Nothing is known beyond the layer and its keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hybrid_kv.index._choice import Cost, Pace

_HOPED = 0.5
"""What a graph is hoped to take of the time of what serves, before one was tried."""
_SKETCH_LISTS, _SCAN_LISTS = 0.6, 0.25
"""Of a search, what one sampled position takes where lists are made so: many share what is read."""
_COPIES = 128
"""Scans in whose time a head is copied and the self-check is answered exactly."""
_PROJECTED_S = 1.5e-4
"""Of one sampled query in the projection and the trials, which hardly grow with the keys: 8e-5 on
heads of few dimensions and 2.8e-4 on those of many (docs/lab.md)."""


def build_forecast(served: Cost, scan: Cost, group: int, positions: int) -> float:
    """Core-seconds that a head's first graph takes: only its lists and copies grow with the keys.

    Args:
        served: a search of what makes the lists.
        scan: a search of all keys in 8 bits.
        group: query heads.
        positions: that are sampled of each.
    """
    share = _SKETCH_LISTS if served.kind == "sketch" else _SCAN_LISTS
    lists = share * positions * served.work_s
    return lists + _COPIES * scan.work_s + _PROJECTED_S * group * positions


def hoped(served: Cost) -> Cost:
    """A search by graph, where nothing was tried."""
    return Cost("graph", _HOPED * served.work_s, _HOPED * served.read_bytes)


@dataclass(frozen=True, slots=True)
class Payback:
    """When a graph wins back its build: within so many decoded tokens, at the pace of decoding."""

    tokens: int
    pace: Pace

    def wins(self, served: Cost, graph: Cost, build_s: float) -> tuple[bool, str]:
        """Whether it does, and the figures."""
        graph_s = graph.seconds(self.pace)
        saved_s = (served.seconds(self.pace) - graph_s) * self.pace.threads * self.tokens
        verb = "wins" if saved_s > build_s else "does not win"
        return saved_s > build_s, (
            f"a graph ({1e6 * graph_s:.0f} us, {build_s:.1f} core-seconds to build) {verb} that "
            f"back in {self.tokens} tokens"
        )


@dataclass(frozen=True, slots=True)
class _Tried:
    """cost: of the graph, None where it missed its goal or is slower than what serves."""

    head: int
    dim: float
    cost: Cost | None
    build_s: float


class GraphTrials:
    """The trials of one layer, head by head, in the order that `order` gives.

    Args:
        served: cost of what serves, by head.
        dims: effective dimensions, by head.
        payback: when a graph is worth its build.
        most_lost_s: core-seconds that graphs without use may take; then no more are tried.
    """

    def __init__(
        self,
        served: Mapping[int, Cost],
        dims: Mapping[int, float],
        payback: Payback,
        most_lost_s: float,
    ) -> None:
        self._served, self._dims = served, dims
        self._payback, self._most_lost_s = payback, most_lost_s
        self._tried: list[_Tried] = []

    def order(self, heads: Iterable[int]) -> list[int]:
        """Those first that have the most time to win; of equal ones the fewest dimensions."""
        pace = self._payback.pace
        return sorted(heads, key=lambda n: (-self._served[n].seconds(pace), self._dims[n], n))

    def why_not(self, head: int) -> str | None:
        """Why this head tries no graph after what others have found; None if it does."""
        dim = self._dims[head]
        for one in self._tried:
            if one.cost is None and one.dim <= dim:
                return (
                    f"no graph, for that of head {one.head} was of no use and queries see "
                    f"{dim:.1f} dimensions here, {one.dim:.1f} there"
                )
        lost_s = sum(one.build_s for one in self._tried if one.cost is None)
        if lost_s >= self._most_lost_s:
            return (
                f"no graph, for {lost_s:.1f} core-seconds went into graphs of no use and "
                f"{self._most_lost_s:g} may"
            )
        useful = [one for one in self._tried if one.cost is not None]
        if not useful:
            return None
        near = min(useful, key=lambda one: abs(one.dim - dim))
        assert near.cost is not None
        wins, why = self._payback.wins(self._served[head], near.cost, near.build_s)
        return None if wins else f"as head {near.head} tells, {why}"

    def note(
        self, head: int, graph: Cost | None, build_s: float, served: Cost | None = None
    ) -> None:
        """What a trial found.

        Args:
            graph: its cost, None where it missed its goal.
            served: the cost of what serves, as it was timed in turn with the graph. Where the
                machine has become faster or slower since all were timed, so has the graph.
        """
        pace, before = self._payback.pace, self._served[head]
        served = served or before
        if graph is not None and graph.seconds(pace) >= served.seconds(pace):
            graph = None
        if graph is not None:
            graph = replace(graph, work_s=graph.work_s * before.work_s / served.work_s)
        self._tried.append(_Tried(head, self._dims[head], graph, build_s))
