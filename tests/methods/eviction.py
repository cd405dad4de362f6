"""What evicting methods keep, written from their papers with sets and loops, in float64.

The formulas share no code with the methods. A kept set is a set of positions for each KV head,
sinks and window left out.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.entries import Entries
from hybrid_kv.plugins import Method
from tests.drive_method import Driven, drive

Array = NDArray[np.float64]
Kept = list[set[int]]
Heads = tuple[Tensor, Tensor, Tensor]

PROMPT, NEW = 173, 37


def method(name: str, page_size: int = 16, **settings: Any) -> Method:
    config = HybridConfig(method=name, page_size=page_size, **settings)
    built: Method = config.build()
    return built


def kept_sets(kept: Entries | None, num_heads: int) -> Kept:
    if kept is None:
        return [set() for _ in range(num_heads)]
    return [set(at.tolist()) for at in kept.split("positions")]


def run(
    tested: Method,
    given: Heads,
    *,
    prompt: int = PROMPT,
    new: int = NEW,
    page: int = 16,
    **more: Any,
) -> Driven:
    return drive(tested, prompt=prompt, new=new, page_size=page, given=given, **more)


def causal_weights(q: Tensor, k: Tensor, scale: float) -> Array:
    """[Hq, N, N]: row i holds the softmax weights of query i over the keys up to its own."""
    queries, keys = q.double().numpy(), k.double().numpy()
    group = len(queries) // len(keys)
    logits = np.stack([queries[h] @ keys[h // group].T for h in range(len(queries))]) * scale
    count = logits.shape[1]
    logits[:, np.triu(np.ones((count, count), dtype=bool), 1)] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def of_groups(by_query_head: Array, num_kv_heads: int) -> Array:
    """[Hkv, ...] means over the query heads of each KV head."""
    return by_query_head.reshape(num_kv_heads, -1, *by_query_head.shape[1:]).mean(1)


def snap_scores(
    weights: Array, num_kv_heads: int, *, window: int, observed: int, pool: int, mean: bool = False
) -> Array:
    """[Hkv, N - window] pooled scores of the prompt before its window."""
    count = weights.shape[1]
    means = of_groups(weights[:, -observed:].mean(1), num_kv_heads)
    before = means[:, : count - window]
    pooled = np.zeros_like(before)
    half = pool // 2
    for n in range(before.shape[1]):
        near = before[:, max(0, n - half) : n + half + 1]
        pooled[:, n] = near.sum(1) / pool if mean else near.max(1)
    return pooled


def top(scores: Array, count: int, among: range) -> set[int]:
    """Of some positions the `count` of highest scores [N]; of equals the first."""
    return set(sorted(among, key=lambda n: (-scores[n], n))[:count])


def snapkv(scores: Array, budget: int, sinks: int) -> Kept:
    return [top(head, budget, range(sinks, len(head))) for head in scores]


def ada(scores: Array, budget: int, sinks: int, safeguard: float) -> Kept:
    """Algorithms 2 and 3 of Ada-KV, in exact fractions that become whole numbers at last."""
    heads, count = scores.shape
    every = [(-scores[h, n], h, n) for h in range(heads) for n in range(sinks, count)]
    chosen = [h for _, h, _ in sorted(every)[: heads * budget]]
    alpha = Fraction(safeguard).limit_denominator(1000)
    exact = [alpha * budget + (1 - alpha) * chosen.count(h) for h in range(heads)]
    budgets = whole(exact, heads * budget)
    return [top(head, budgets[h], range(sinks, count)) for h, head in enumerate(scores)]


def pyramid(budget: int, layers: int, available: int, beta: int) -> list[int]:
    """A line from layer to layer, whose mean is `budget`."""
    last = budget // beta
    first = 2 * budget - last
    if first >= available:
        first, last = available, 2 * budget - available
    steps = Fraction(first - last, layers - 1)
    return whole([first - steps * layer for layer in range(layers)], layers * budget)


def whole(exact: list[Fraction], total: int) -> list[int]:
    """Nearest whole numbers with the same total: the largest fractions are rounded up."""
    floors = [int(x) for x in exact]
    order = sorted(range(len(exact)), key=lambda i: (floors[i] - exact[i], i))
    for i in order[: total - sum(floors)]:
        floors[i] += 1
    return floors


class Stepwise:
    """Decodes token by token over the entries that are left, and evicts as H2O and TOVA do.

    score: [Hkv, N] of all positions so far. move: scores and the masses of a step make new scores.
    decide: what evicts, from those scores.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scale: float,
        prompt: int,
        sinks: int,
        window: int,
        page: int,
        room: int,
        score: Array,
        move: Callable[[Array, Array], Array],
        decide: Callable[[Array], Array] = lambda scores: scores,
    ) -> None:
        self.q, self.k = q.double().numpy() * scale, k.double().numpy()
        self.heads, total = self.k.shape[:2]
        self.sinks, self.window, self.page, self.room = sinks, window, page, room
        self.move, self.decide = move, decide
        self.score = np.zeros((self.heads, total))
        self.score[:, :prompt] = score
        self.first = max(sinks, prompt - window)
        self.kept: Kept = [set() for _ in range(self.heads)]
        self._evict(range(sinks, self.first))

    def _evict(self, leaving: range) -> None:
        scores = self.decide(self.score)
        for h in range(self.heads):
            among = sorted(self.kept[h] | set(leaving))
            self.kept[h] = set(sorted(among, key=lambda n: (-scores[h, n], n))[: self.room])

    def step(self, at: int) -> Kept:
        """The token at this position is attended with all that is left; then a page may leave."""
        group = len(self.q) // self.heads
        mass = np.zeros((self.heads, at + 1))
        for h in range(self.heads):
            near = [*range(self.sinks), *range(self.first, at + 1)]
            ids = sorted(self.kept[h] | set(near))
            for query in self.q[h * group : (h + 1) * group, at]:
                logits = self.k[h, ids] @ query
                weights = np.exp(logits - logits.max())
                mass[h, ids] += weights / weights.sum()
        self.score[:, : at + 1] = self.move(self.score[:, : at + 1], mass)
        if at + 1 - self.first >= self.window + self.page:
            leaving = range(self.first, self.first + self.page)
            self.first += self.page
            self._evict(leaving)
        return [set(kept) for kept in self.kept]
