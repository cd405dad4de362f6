"""Random lives of a layer, held against a list of tokens per row.

After every step each token has one owner with its own key, value and position, unless the placement
said to drop it; views, digests, counts and cold searches agree with the lists.
"""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybrid_kv.plugins import Placement
from hybrid_kv.store import LayerStore, Overflow
from hybrid_kv.store.search import search_row
from hybrid_kv.types import HIDDEN, Demotion
from tests.store.scene import PAGE, Feed, flat_index, keys_of, layer, owned

pages = st.integers(0, 3).map(lambda count: count * PAGE)


class LayerLife(RuleBasedStateMachine):
    store: LayerStore
    feed: Feed
    lost: list[set[int]]

    @initialize(
        rows=st.sampled_from([3, 2, 1]),
        capacity=st.sampled_from([0, 5, 64]),
        prompt=st.integers(0, 40),
    )
    def begin(self, rows: int, capacity: int, prompt: int) -> None:
        self.store = layer(rows, capacity=capacity)
        self.feed = Feed(self.store)
        self.lost = [set() for _ in range(rows)]
        self.feed.append(prompt)

    @rule(count=st.integers(1, 11))
    def append(self, count: int) -> None:
        self.feed.append(count)

    @rule(seed=st.integers(0, 99), count=st.integers(1, 9))
    def append_padded(self, seed: int, count: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.feed.append(torch.rand(len(self.store.rows), count, generator=draw) < 0.6)

    @precondition(lambda self: self.store.placement is None)
    @rule(
        rest=st.sampled_from([Demotion.KEEP, Demotion.OFFLOAD, Demotion.DROP]),
        sinks=pages,
        window=pages,
        spare=pages,
        digests=st.booleans(),
        indexed=st.booleans(),
    )
    def seal(
        self,
        rest: Demotion,
        sinks: int,
        window: int,
        spare: int,
        digests: bool,
        indexed: bool,
    ) -> None:
        index = flat_index() if indexed else None
        self.store.seal(Placement(sinks, window, spare, rest, index=index, digests=digests))
        if digests:
            self.store.resident.pool.enable_digests()
        self.demote()

    @rule()
    def demote(self) -> None:
        """What the runtime does after every step of a sealed layer."""
        place = self.store.placement
        for row in range(len(self.store.rows)):
            overflow = Overflow.of(self.store.rows[row])
            if overflow is None or place is None:
                continue
            positions = overflow.positions.tolist()
            length = len(self.feed.history[row])
            assert positions[0] >= place.sink_tokens
            assert positions[-1] < length - place.window_tokens - place.spare_tokens
            if place.rest is Demotion.OFFLOAD:
                k, v = overflow.k, overflow.v
                self.store.rows[row].chain.append(k, v, overflow.positions, place.index)
            else:
                self.lost[row] |= set(positions)
                self.store.rows[row].dropped += len(positions)
            self.store.rows[row].table.remove(*overflow.pages)
            assert Overflow.of(self.store.rows[row]) is None

    @rule(count=st.integers(0, 15) | st.integers(0, 99))
    def crop(self, count: int) -> None:
        for row, history in enumerate(self.feed.history):
            fewer = min(count, len(history))
            self.store.rows[row].crop(fewer)
            del history[len(history) - fewer :]
            self.lost[row] = {position for position in self.lost[row] if position < len(history)}

    @rule(seed=st.integers(0, 99), count=st.integers(1, 3))
    def reorder_and_append(self, seed: int, count: int) -> None:
        """As beam search does: rows share pages, then write behind them."""
        rows = len(self.store.rows)
        self._fork(torch.randint(rows, (rows,), generator=torch.Generator().manual_seed(seed)))
        self.feed.append(count)

    @rule(seed=st.integers(0, 99), rows=st.integers(1, 3))
    def select(self, seed: int, rows: int) -> None:
        old = len(self.store.rows)
        self._fork(torch.randint(old, (rows,), generator=torch.Generator().manual_seed(seed)))

    def _fork(self, rows: torch.Tensor) -> None:
        sources = rows.tolist()
        self.store.fork(sources)
        self.feed.history = [list(self.feed.history[source]) for source in sources]
        self.lost = [set(self.lost[source]) for source in sources]

    @rule()
    def compact(self) -> None:
        self.store.compact()

    @rule(count=st.integers(1, 9))
    def branch_and_return(self, count: int) -> None:
        base, history = self.store, [list(row) for row in self.feed.history]
        lost = [set(row) for row in self.lost]
        self.store = self.feed.store = base.branch()
        self.feed.append(count)
        self.demote()
        self.every_token_is_owned_once()
        self.store.cold.release()
        self.store = self.feed.store = base
        self.feed.history, self.lost = history, lost

    @invariant()
    def integrity_holds(self) -> None:
        self.store.check_integrity()

    @invariant()
    def every_token_is_owned_once(self) -> None:
        for row, history in enumerate(self.feed.history):
            found = owned(self.store, row)
            expected = {p: tag for p, tag in enumerate(history) if p not in self.lost[row]}
            assert {position: tag for position, (tag, _) in found.items()} == expected
            assert self.store.rows[row].dropped == len(self.lost[row])

    @invariant()
    def the_view_shows_what_is_resident(self) -> None:
        view = self.store.resident.view()
        for row, history in enumerate(self.feed.history):
            kept = [p for p, (_, tier) in owned(self.store, row).items() if tier == "resident"]
            positions = torch.arange(view.k.shape[2])
            if view.positions is not None:
                positions = view.positions[row]
            filled = positions != HIDDEN
            assert sorted(positions[filled].tolist()) == sorted(kept)
            tags = torch.tensor([history[p] for p in positions[filled].tolist()])
            assert torch.equal(view.k[row][:, filled], keys_of(tags))
            assert torch.equal(view.v[row][:, filled], -keys_of(tags))
            assert view.k[row].isfinite().all(), "hidden slots are finite"

    @invariant()
    def whoever_looks_for_room_only_when_it_may_be_full_misses_nothing(self) -> None:
        for row in self.store.rows:
            start, stop = row.outside()
            assert start >= stop or row.table.num_tokens >= row.full_tokens

    @invariant()
    def cold_searches_find_the_best(self) -> None:
        place = self.store.placement
        if place is None or place.index is None:
            return
        for row in range(len(self.store.rows)):
            chain = self.store.rows[row].chain
            if not (total := chain.num_tokens):
                continue
            queries = torch.randn(2, 3, 3)
            found = search_row(chain, queries, 5)
            scores = torch.cat([r.scores.masked_fill(r.ids < 0, -torch.inf) for _, r in found], -1)
            keys = torch.cat([span.extent.first(span.length)[0] for span in chain.spans], 1)
            exact = torch.einsum("hmd,hnd->hmn", queries, keys)
            best = exact.topk(min(5, total), -1).values
            torch.testing.assert_close(scores.topk(min(5, total), -1).values, best)
            assert int(sum((r.ids >= 0).sum() for _, r in found)) == best.numel()


LayerLife.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=30,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_a_layer_of_any_history_holds_every_token_once = LayerLife.TestCase
