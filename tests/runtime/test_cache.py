from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import CapacityError, NonFiniteError, ShapeError
from hybrid_kv.index.flat import FlatIndex
from hybrid_kv.methods.retrieval import RetrievalAttention
from hybrid_kv.models.rollback import Checkpoint
from hybrid_kv.ops import Ops
from hybrid_kv.ops.native import engine_state
from hybrid_kv.runtime import KVCache, check_host_memory
from hybrid_kv.store import ColdExtent, LayerStore, PageTable, ResidentStore
from hybrid_kv.transfer import SyncExecutor, ThreadExecutor
from hybrid_kv.types import (
    Budget,
    Evidence,
    LayerShape,
    ModelInfo,
    Needs,
    Read,
    TokenBudget,
    Work,
)
from hybrid_kv.watch.phases import WorkClock
from tests.kit import every, held, kept_alive
from tests.oracle import causal, softmax_attention, spread
from tests.store.scene import LaterRunner
from tests.tolerances import TOLERANCES

SHAPE = LayerShape(0, 6, 2, 8)
INFO = ModelInfo((SHAPE, replace(SHAPE, layer_idx=1)))
SMALL = {"page_size": 4, "sink_tokens": 4, "window_tokens": 8}


def cache(method: str = "hybrid", executor: Any = None, **settings: Any) -> KVCache:
    return KVCache(INFO, HybridConfig(method=method, **settings), executor)


def tokens(new: int, rows: int = 1) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    q, k, v = (torch.randn(rows, heads, new, 8) for heads in (6, 2, 2))
    return q, (k, v)


def feed(kv: KVCache, *news: int, layer_idx: int = 0) -> Tensor:
    for new in news:
        q, entries = tokens(new)
        out = kv.attend(layer_idx, q, entries, None, scale=0.3).out
    return out


# Prefill and later turns


@pytest.mark.parametrize("method", ["hybrid", "full", "quest"])
@pytest.mark.parametrize("long", [33, 50])
def test_a_long_later_turn_is_exact_after_the_spill(method: str, long: int) -> None:
    settings = {"page_size": 4, "sink_tokens": 4, "window_tokens": 8} if method == "hybrid" else {}
    kv = cache(method, **settings)
    total = 70 + 1 + long
    q, (k, v) = tokens(total)
    for start, stop in ((0, 70), (70, 71), (71, total)):
        part = kv.attend(
            0, q[:, :, start:stop], (k[:, :, start:stop], v[:, :, start:stop]), None, scale=0.3
        )
    exact, _ = softmax_attention(
        q[:, :, 71:], spread(k, 6), spread(v, 6), scale=0.3, visible=causal(long, total)
    )
    torch.testing.assert_close(part.out.double(), exact, **TOLERANCES[torch.float32])
    kv.check_integrity()
    assert method != "hybrid" or len(held(kv).cold) > 70


def test_a_row_without_a_token_of_its_own_is_left_out() -> None:
    """Left padding wider than a chunk: the fused kernel died of a division by zero."""
    kv = cache(**SMALL)
    kv.more_prompt = True
    for start in range(0, 30, 10):
        q, entries = tokens(10, rows=2)
        valid = torch.stack([torch.ones(10, dtype=torch.bool), torch.arange(10) + start >= 24])
        part = kv.attend(0, q, entries, valid, scale=0.3)
        assert part.out.isfinite().all()
        assert (part.out[1][:, ~valid[1]] == 0).all()
    assert [row.length for row in every(kv)] == [30, 6]
    kv.check_integrity()


def test_another_number_of_rows_is_refused() -> None:
    kv = cache(**SMALL)
    feed(kv, 20)
    q, entries = tokens(1, rows=3)
    with pytest.raises(ShapeError, match="batch must stay at 1 rows, got 3; use a new cache"):
        kv.attend(0, q, entries, None, scale=0.3)


def test_layers_are_sealed_one_by_one() -> None:
    kv = cache(**SMALL)
    feed(kv, 40)
    feed(kv, 40, layer_idx=1)
    feed(kv, 1)
    assert (kv.layers[0].is_sealed, kv.layers[1].is_sealed) == (True, False)


def test_the_first_tokens_never_seal_however_few() -> None:
    kv = cache(**SMALL)
    feed(kv, 1)
    assert not kv.layers[0].is_sealed


# What a step touches


class Spy:
    """Counts the entries that each call reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kv: KVCache) -> None:
        self.attended: list[int] = []
        self.scanned: list[str] = []
        ops = kv.ops
        spied = self

        class Counting:
            def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
                spied.attended.append(k.shape[2])
                return ops.attend(q, k, v, **options)

            def attend_visible(self, q: Tensor, k: Tensor, *args: Any, **options: Any) -> Any:
                spied.attended.append(k.shape[2])
                return ops.attend_visible(q, k, *args, **options)

            def attend_causal(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
                spied.attended.append(k.shape[2])
                return ops.attend_causal(q, k, v, **options)

            def attend_retrieved(self, q: Tensor, *args: Any, **options: Any) -> Any:
                spied.attended.append(args[2].shape[2])
                return ops.attend_retrieved(q, *args, **options)

            def attend_pages(
                self, q: Tensor, pages: Any, slots: Tensor, *args: Any, **kw: Any
            ) -> Any:
                spied.attended.append(slots.shape[2] * pages.k.shape[2])
                return ops.attend_pages(q, pages, slots, *args, **kw)

            def __getattr__(self, name: str) -> Any:
                return getattr(ops, name)

        kv.means.ops = Counting()  # type: ignore[assignment]
        for owner, name in (
            (PageTable, "view"),
            (PageTable, "positions"),
            (ResidentStore, "select"),
            (PageTable, "take"),
            (ColdExtent, "first"),
            (LayerStore, "compact"),
        ):
            self._watch(monkeypatch, owner, name)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        plain: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.scanned.append(name)
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)


BOUNDED = {
    # method: settings, entries that one step may attend in all its partial attentions
    "streaming_llm": (SMALL, 4 + 8 + 2 * 4),
    "quest": ({"page_size": 4, "page_budget": 3, "dense_layers": 0}, (3 + 1) * 4),
    "retrieval_attention": ({**SMALL, "cold": {"top_k": 5}}, 4 + 8 + 2 * 4 + 5),
    "hybrid": (
        {**SMALL, "cold": {"top_k": 5}, "spare_tokens": 40, "page_budget": 2},
        4 + 8 + 2 * 4 + 2 * 4 + 5,
    ),
}


@pytest.mark.parametrize("method", BOUNDED)
def test_a_step_touches_its_budget_however_long_the_context(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_KV_ONE_CALL", "0")  # the spy stands between ops
    settings, most = BOUNDED[method]
    for context in (100, 1000):
        kv = cache(method, **settings)
        feed(kv, context, 1)
        spy = Spy(monkeypatch, kv)
        for _ in range(30):
            spy.attended.clear()
            feed(kv, 1)
            assert 0 < sum(spy.attended) <= most
        assert spy.scanned == [], "no call on the way of a step reads all entries"


def test_quest_reads_digests_and_not_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_KV_ONE_CALL", "0")
    kv = cache("quest", page_size=4, page_budget=3, dense_layers=0)
    feed(kv, 200, 1)
    monkeypatch.setattr(ResidentStore, "view", lambda self: pytest.fail("all keys were viewed"))
    read: list[torch.Size] = []
    plain = Ops.attend_pages

    def attend_pages(self: Ops, q: Tensor, pages: Any, slots: Tensor, *args: Any, **kw: Any) -> Any:
        read.append(slots.shape)
        return plain(self, q, pages, slots, *args, **kw)

    monkeypatch.setattr(Ops, "attend_pages", attend_pages)
    feed(kv, 1)
    assert read == [(2, 1, 4)]


# Builds in the background

LEARNED = {"top_k": 9, "index": {"kind": "graph", "min_keys": 40, "check_positions": 4}}
needs_engine = pytest.mark.skipif(
    engine_state().isa is None, reason=f"no native engine: {engine_state().detail}"
)


class LaterExecutor(SyncExecutor):
    """Runs searches at once and builds when told."""

    def __init__(self) -> None:
        self.runner = LaterRunner()
        self.closed = 0

    def background(self, work: Callable[[], None]) -> Future[None]:
        return self.runner.beside(work)

    def close(self) -> None:
        self.closed += 1


def served(kv: KVCache) -> list[tuple[str, int, int]]:
    """State of the build, searches and those before it of each head."""
    return [
        (head["build"], head["searches"], head["searches_before"])
        for head in kv.layers.describe_indexes()
    ]


@needs_engine
def test_a_prompt_is_served_before_during_and_after_its_build() -> None:
    executor = LaterExecutor()
    late = cache(executor=executor, **SMALL, cold=LEARNED)
    now = cache(**SMALL, cold=LEARNED, index_build="wait")
    q, entries = tokens(300)
    for kv in (late, now):
        kv.attend(0, q, entries, None, scale=0.3)
        kv.layers.seal(0)
    assert served(late) == [("in progress", 0, 0)] * 2
    assert served(now) == [("done", 0, 0)] * 2
    steps = [tokens(1) for _ in range(30)]  # so many that the window moves on
    for step, (q, entries) in enumerate(steps):
        if step == 20:
            executor.runner.finish()
        outs = [kv.attend(0, q, entries, None, scale=0.3).out for kv in (late, now)]
        if step >= 20:
            assert torch.equal(*outs), "from now on both have the same index"
        late.check_integrity()
    assert served(late) == [("done", 30, 20)] * 2


@needs_engine
def test_what_is_waited_for_is_the_same_every_time() -> None:
    prompt, steps = tokens(300), [tokens(1) for _ in range(20)]

    def run() -> list[Tensor]:
        kv = cache(**SMALL, cold=LEARNED, index_build="wait")
        kv.attend(0, *prompt, None, scale=0.3)
        kv.layers.seal(0)
        assert served(kv) == [("done", 0, 0)] * 2
        return [kv.attend(0, *step, None, scale=0.3).out for step in steps]

    for one, other in zip(run(), run(), strict=True):
        assert torch.equal(one, other)


@needs_engine
def test_builds_that_are_waited_for_are_told_from_the_others() -> None:
    executor = LaterExecutor()
    late = cache(executor=executor, **SMALL, cold=LEARNED)
    now = cache(**SMALL, cold=LEARNED, index_build="wait")
    for kv in (late, now):
        feed(kv, 300)
        kv.layers.seal(0)
    waited, in_all = now.phases.seconds["index_build"], now.means.builds.clock.seconds
    assert 0 < in_all <= waited
    stand_in = late.means.builds.clock.seconds
    waited = late.phases.seconds["index_build"]
    executor.runner.finish()
    assert late.phases.seconds["index_build"] == waited, "nobody waited"
    assert late.means.builds.clock.seconds > stand_in


def test_work_in_progress_counts_as_far_as_it_has_come() -> None:
    clock = WorkClock()
    with clock.running():
        first = clock.seconds
        with clock.running():
            assert clock.seconds > first > 0
    done = clock.seconds
    assert clock.seconds == done > first


@needs_engine
@pytest.mark.parametrize("end", ["reset", "reset_layer", "close"])
def test_a_cache_that_ends_gives_up_its_builds(end: str) -> None:
    executor = LaterExecutor()
    kv = cache(executor=executor, **SMALL, cold=LEARNED)
    feed(kv, 300)
    kv.layers.seal(0)
    (build,) = executor.runner.held
    {"reset": kv.reset, "reset_layer": kv.layers[0].reset, "close": kv.close}[end]()
    assert build.future.cancelled()
    assert executor.closed == 0, "it belongs to whoever made it"


def test_a_closed_cache_holds_nothing() -> None:
    kv = cache(**SMALL)
    feed(kv, 300, 1)
    stored = kept_alive(kv)
    assert stored.keys() == {"layer 0", "pages 0", "extent 0.0", "keys 0.0"}
    kv.close()
    assert {ref() for ref in stored.values()} == {None}
    assert not every(kv)


def test_settings_choose_the_executor() -> None:
    waiting, beside = cache(index_build="wait"), cache(index_build="background")
    assert type(waiting.executor) is SyncExecutor
    assert type(beside.executor) is ThreadExecutor
    beside.close()


@needs_engine
def test_a_checkpoint_during_a_build_is_restored_after_it() -> None:
    executor = LaterExecutor()
    kv = cache(executor=executor, **SMALL, cold=LEARNED)
    feed(kv, 300, 1)
    checkpoint = Checkpoint.of(kv.layers)
    feed(kv, *[1] * 10)
    executor.runner.finish()
    feed(kv, *[1] * 10)
    checkpoint.restore(kv.layers)
    kv.check_integrity()
    assert [build for build, _, _ in served(kv)] == ["done"] * 2
    feed(kv, *[1] * 20)
    kv.check_integrity()


def test_a_value_that_is_not_finite_is_named_when_it_would_leave_the_window() -> None:
    """Where logits show it sooner, as in a model, nothing gets so far."""
    kv = cache(**SMALL)
    feed(kv, 30)
    q, (k, v) = tokens(1)
    v[0, 1, 0, 3] = torch.nan
    kv.attend(0, q, (k, v), None, scale=0.3)
    with pytest.raises(NonFiniteError, match="KV head 1 at position 30"):
        feed(kv, *[1] * 16)
    kv.check_integrity()  # nothing is lost: the page is still resident


# Evidence


def test_a_method_gets_each_rows_own_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Sequence[Evidence]] = []
    plain = RetrievalAttention.seal

    def seal(self: RetrievalAttention, layer_idx: int, evidence: Sequence[Evidence]) -> Any:
        seen.append(evidence)
        return plain(self, layer_idx, evidence)

    monkeypatch.setattr(RetrievalAttention, "seal", seal)
    monkeypatch.setattr(RetrievalAttention, "needs", Needs(sampled_queries=4, last_queries=3))
    kv = cache("retrieval_attention", **SMALL)
    q, entries = tokens(40, rows=2)
    valid = torch.stack([torch.ones(40, dtype=torch.bool), torch.arange(40) >= 21])
    kv.attend(0, q, entries, valid, scale=0.3)
    kv.layers.seal(0)
    (evidence,) = seen
    assert [row.num_tokens for row in evidence] == [40, 19]
    for row in range(2):
        assert torch.equal(evidence[row].last_queries, q[row][:, -3:])
    assert torch.equal(evidence[1].sampled_queries, q[1][:, 21::4])


def test_watched_evidence_lets_another_cache_build_as_this_one_would() -> None:
    needs = Needs(sampled_queries=4, last_queries=3)
    watching = cache("full")
    watching.means.watched = needs
    q, (k, v) = tokens(40)
    watching.attend(0, q, (k, v), None, scale=0.3)
    (evidence,) = watching.layers[0].prompt.evidence()
    watching.layers.seal(0)
    (kept,) = watching.layers[0].prompt.evidence()
    assert torch.equal(kept.queries, evidence.queries)
    assert evidence.queries is not None
    assert evidence.queries.shape[1] == evidence.sampled_queries.shape[1] + 3

    samples = _learned(k, v, evidence, learns=None)
    assert samples is not None
    assert torch.equal(samples.flatten(0, 1), evidence.queries)
    assert cache("full").layers[0].prompt.evidence() == ()


class Learning(FlatIndex):
    samples: ClassVar[list[Tensor | None]] = []

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        self.samples.append(samples)


def _learned(k: Tensor, v: Tensor, seen: Evidence, *, learns: Needs | None) -> Tensor | None:
    """What the index of a prompt is given to learn from."""
    kv = cache("retrieval_attention", **SMALL)
    change = {"index": lambda: Learning(FlatIndex.Params()), "learns": learns}
    placement = replace(kv.means.method.seal(0, ()), **change)
    kv.means.method.seal = lambda *_: placement  # type: ignore[method-assign]
    Learning.samples.clear()
    kv.load(0, k, v, (seen,))
    (samples,) = Learning.samples
    return samples


def test_an_index_learns_from_no_more_queries_than_it_asks_for() -> None:
    """A method may want all of them for itself."""
    watching = cache("full")
    watching.means.watched = Needs(sampled_queries=1 << 40, last_queries=3)
    q, (k, v) = tokens(41)
    watching.attend(0, q, (k, v), None, scale=0.3)
    (evidence,) = watching.layers[0].prompt.evidence()
    samples = _learned(k, v, evidence, learns=Needs(sampled_queries=4))
    assert samples is not None
    assert torch.equal(samples.flatten(0, 1), q[0, :, ::8])
    assert _learned(k, v, evidence, learns=Needs()) is None
    own = HybridConfig(method="locret", demote="offload", index={"kind": "sketch"}).build()
    assert own.needs.sampled_queries > 1 << 30
    learns = own.seal(0, ()).learns
    assert learns is not None
    assert learns.sampled_queries == 1024


# Checkpoints


@pytest.mark.parametrize("method", ["streaming_llm", "hybrid", "full", "quest"])
def test_a_restored_cache_answers_as_if_nothing_had_happened(method: str) -> None:
    settings = {} if method in ("full", "quest") else SMALL
    kv = cache(method, **settings)
    feed(kv, 60, 1, 1)
    probe = tokens(5)

    def ask() -> Tensor:
        checkpoint = Checkpoint.of(kv.layers)
        q, entries = probe
        outs = [kv.attend(0, q, entries, None, scale=0.3).out]
        for _ in range(20):  # so many that the window moves on
            outs.append(
                kv.attend(
                    0, q[:, :, :1], (entries[0][:, :, :1], entries[1][:, :, :1]), None, scale=0.3
                ).out
            )
        checkpoint.restore(kv.layers)
        kv.check_integrity()
        assert [row.length for row in every(kv)] == [62]
        return torch.cat(outs, 2)

    first = ask()
    assert torch.equal(ask(), first)
    assert torch.equal(ask(), first)


def test_steps_of_a_fork_are_counted_and_watched_by_themselves() -> None:
    kv = cache()
    feed(kv, 200, 1, 1)
    before = replace(kv.work)
    kv.watchers.append(object())  # type: ignore[arg-type]
    fork = kv.fork()
    assert fork.watchers == []
    assert fork.work.steps == 0
    feed(fork, 1)
    assert fork.work.steps > 0
    assert kv.work == before


def test_reset_makes_the_cache_new() -> None:
    kv = cache(**SMALL)
    feed(kv, 40, 1)
    kv.reset()
    assert not every(kv)
    assert kv.work.attended == 0
    assert not kv.layers[0].is_sealed


# Capacity


def test_a_context_beyond_the_free_memory_is_refused_with_both_numbers() -> None:
    check_host_memory(1000, 10)
    with pytest.raises(CapacityError, match=r"context of 7 tokens needs 1,\d{3}(,\d{3})+ bytes"):
        check_host_memory(1_000_000_000_000_000, 7)


@pytest.mark.parametrize("pages", ["all", 0])
@pytest.mark.parametrize("cold", ["all", TokenBudget(3), None])
def test_each_tier_is_read_by_its_own_budget(
    monkeypatch: pytest.MonkeyPatch, pages: Budget, cold: TokenBudget | Literal[all] | None
) -> None:
    monkeypatch.setattr(RetrievalAttention, "read", lambda self, idx, q: Read(pages, cold))
    kv = cache("hybrid", spare_tokens=16, **SMALL)
    feed(kv, 61, 1)
    kv.work = Work()
    feed(kv, 1)
    row, heads = held(kv), SHAPE.num_q_heads
    stored = len(row.cold)
    far = {None: 0, "all": stored}.get(cold, 3)  # type: ignore[arg-type]
    assert (stored > 3, kv.work.retrieved) == (True, heads * far)
    pinned = 4 + 8 + row.length % 4  # sinks, window, and what its first page has beside
    near = len(row.resident) if pages == "all" else pinned
    assert kv.work.attended - kv.work.retrieved == heads * near
