"""Layers that are searched before their queries are known: what is attended, and when.

The lane to the device delivers nothing before somebody waits, the thread beside the model goes on
only when it is let, and both note what they do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.runtime import KVCache, look_ahead_state
from hybrid_kv.runtime.look_ahead_state import MOST_LOST, TRIAL_LOOKS, rank_named
from hybrid_kv.transfer import SyncExecutor
from hybrid_kv.transfer.cuda import CudaExecutor
from hybrid_kv.types import LayerShape, ModelInfo, PartialAttention
from tests.kit import held
from tests.store.scene import HeldBuild
from tests.tolerances import TOLERANCES
from tests.transfer.late import LateLane

PROMPT, DIM, LAYERS = 173, 24, 3
SHAPE = LayerShape(layer_idx=0, num_q_heads=6, num_kv_heads=2, head_dim=DIM)
ENOUGH = 20  # seconds after which a thread that waits for ever is given up


class NotedExecutor(CudaExecutor):
    """A device whose copies arrive late; searches run in the thread beside it when `open` is set.

    events: what happened, in its order.
    """

    def __init__(self) -> None:
        self.lane, self.events, self.open = LateLane(), list[str](), threading.Event()
        super().__init__(SyncExecutor(), lambda device: self.lane)
        self.open.set()

    def ahead(self, work: Callable[[], None]) -> Future[None]:
        number = sum(event.startswith("begin") for event in self.events)
        self.events.append(f"begin {number}")

        def let() -> None:
            assert self.open.wait(ENOUGH), "a search was waited for before it could go on"
            work()
            self.events.append(f"found {number}")

        return super().ahead(let)


class SlowBuilds(NotedExecutor):
    """The same, whose indexes are built when a test lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.builds: list[HeldBuild] = []

    def background(self, work: Callable[[], None]) -> Future[None]:
        self.builds.append(HeldBuild(work))
        return self.builds[-1].future


def made(executor: Any = None, **cold: Any) -> KVCache:
    config = HybridConfig(
        method="flat",
        page_size=4,
        sink_tokens=4,
        window_tokens=8,
        cold={"top_k": 7, "index": {"kind": "flat", "precision": "stored"}, **cold},
    )
    shapes = tuple(replace(SHAPE, layer_idx=idx) for idx in range(LAYERS))
    unforeseen = {0: "no layer comes before it", 1: "", 2: ""}
    return KVCache(ModelInfo(shapes, unforeseen=unforeseen), config, executor)


def drawn(steps: int, rows: int = 1, seed: int = 0) -> list[list[tuple[Tensor, Tensor, Tensor]]]:
    """q, k, v by step and layer; the first step is the prompt."""
    draw = torch.Generator().manual_seed(seed)

    def some(new: int) -> tuple[Tensor, Tensor, Tensor]:
        q = torch.randn(rows, 6, new, DIM, generator=draw)
        k, v = torch.randn(2, rows, 2, new, DIM, generator=draw)
        return q, k, v

    return [[some(new) for _ in range(LAYERS)] for new in (PROMPT, *([1] * steps))]


def run(
    cache: KVCache,
    steps: list[list[tuple[Tensor, Tensor, Tensor]]],
    predict: Callable[[int, Tensor], Tensor] = lambda idx, q: q,
) -> list[PartialAttention]:
    """What the steps give, where each layer is predicted as the one before it begins."""
    parts = []
    for step in steps:
        for idx, (q, k, v) in enumerate(step):
            if q.shape[2] == 1 and idx + 1 < len(step):
                later = predict(idx + 1, step[idx + 1][0])
                cache.search_ahead(idx + 1, lambda later=later: later)  # type: ignore[misc]
            parts.append(cache.attend(idx, q, (k, v), None, scale=0.3))
    return parts


def assert_same(got: list[PartialAttention], want: list[PartialAttention]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.out, other.out, **TOLERANCES[torch.float32])
        torch.testing.assert_close(one.lse, other.lse, **TOLERANCES[torch.float32])


def states(cache: KVCache) -> list[str]:
    return [row["state"] for row in cache.layers.describe_look_ahead()]


# What is attended -----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("beside", [False, True])
def test_a_true_prediction_finds_what_a_search_finds(rows: int, beside: bool) -> None:
    """Thirty steps: pages leave the window meanwhile, and later searches find their keys."""
    steps = drawn(30, rows)
    executor = NotedExecutor() if beside else None
    cache = made(executor, look_ahead="always", look_ahead_factor=1)
    got, want = run(cache, steps), run(made(look_ahead="never"), steps)
    assert_same(got, want)
    # The first step after the prompt seals the layers, so that it comes too late for them.
    assert [row["searches"] for row in cache.layers.describe_look_ahead()] == [0, 29, 29]
    cache.check_integrity()


def test_a_wrong_prediction_ranks_by_the_true_query() -> None:
    """A search that names everything loses nothing, whatever the query it had."""
    steps = drawn(9)
    cache = made(look_ahead="always", look_ahead_factor=99)
    assert_same(run(cache, steps, lambda _, q: -q), run(made(look_ahead="never"), steps))


@pytest.mark.parametrize("cold", [{}, {"shared": True}])
def test_a_wrong_prediction_loses_what_a_narrow_search_does_not_name(cold: dict[str, Any]) -> None:
    steps = drawn(9)
    cache = made(look_ahead="always", look_ahead_factor=1, **cold)
    got, want = run(cache, steps, lambda _, q: -q), run(made(look_ahead="never", **cold), steps)
    assert not torch.allclose(got[-1].lse, want[-1].lse)
    assert torch.equal(got[-3].lse, want[-3].lse), "the first layer is searched by its own query"


@pytest.mark.parametrize("cold", [{"shared": True}, {"min_share": 0.01, "max_tokens": 30}])
def test_budgets_that_weigh_see_the_exact_scores(cold: dict[str, Any]) -> None:
    steps = drawn(9)
    cache = made(look_ahead="always", look_ahead_factor=30, **cold)
    assert_same(run(cache, steps, lambda _, q: -q), run(made(look_ahead="never", **cold), steps))


def test_predictions_are_turned_to_the_position_of_the_new_token() -> None:
    from hybrid_kv.rotary import Rotary

    rotary = Rotary((1.0, 0.3, 0.01))
    steps = drawn(5)
    cache = made(look_ahead="always", look_ahead_factor=1)
    for layer in cache.layers.values():
        layer.rotary = rotary
    back = {}

    def predict(idx: int, q: Tensor) -> Tensor:
        length = held(cache, idx).length
        back[idx] = length
        return rotary.turn(q, torch.tensor([-length]))

    assert_same(run(cache, steps, predict), run(made(look_ahead="never"), steps))
    assert back == {1: PROMPT + 4, 2: PROMPT + 4}


def test_several_new_tokens_are_searched_for_by_themselves() -> None:
    steps = drawn(3)
    more = [tuple(torch.cat([t, t], 2) for t in layer) for layer in steps[-1]]
    cache, plain = made(look_ahead="always"), made(look_ahead="never")
    assert_same(run(cache, [*steps, more]), run(plain, [*steps, more]))  # type: ignore[list-item]
    assert cache.layers.describe_look_ahead()[1]["searches"] == 2


def test_cropped_and_forked_caches_are_searched_ahead_as_they_are() -> None:
    steps, later = drawn(12, rows=2), drawn(5, rows=2, seed=1)[1:]
    caches = made(look_ahead="always", look_ahead_factor=1), made(look_ahead="never")
    results = []
    for cache in caches:
        run(cache, steps)
        for layer in cache.layers.values():
            layer.crop(5)
            layer.fork([1, 1])
        results.append(run(cache, later))
    assert_same(*results)


def test_an_index_of_pages_is_not_searched_ahead() -> None:
    cache = made(look_ahead="always", index={"kind": "pages", "page_size": 4})
    run(cache, drawn(3))
    assert states(cache) == ["off"] * LAYERS
    assert "whole pages" in cache.layers.describe_look_ahead()[1]["reason"]


def test_a_layer_of_which_everything_is_attended_is_not_searched() -> None:
    cache = made(look_ahead="always", top_k="all")
    assert_same(run(cache, drawn(4)), run(made(look_ahead="never", top_k=PROMPT), drawn(4)))
    assert cache.layers.describe_look_ahead()[1]["searches"] == 0


def test_a_row_that_has_no_more_than_the_budget_is_not_searched() -> None:
    steps, cold = drawn(5), PROMPT - 9
    caches = [made(look_ahead=when, top_k=cold) for when in ("always", "never")]
    assert_same(*[run(cache, steps) for cache in caches])
    assert len(held(caches[0], 1).cold) == cold
    assert caches[0].work == caches[1].work
    assert states(caches[0])[1:] == ["on", "on"], "that may be other in a later step"


def test_a_budget_that_was_widened_meanwhile_is_searched_for_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the look at the layer before may have it."""
    steps, parts = drawn(4), []
    for ahead in ({"look_ahead": "always", "look_ahead_factor": 1}, {"look_ahead": "never"}):
        cache, widening = made(**ahead), [1]
        cache.watchers.append(SimpleNamespace(wants=lambda idx, q: False))  # type: ignore[arg-type]
        monkeypatch.setattr("hybrid_kv.runtime.cache._widening", lambda *_, of=widening: of[0])
        run(cache, steps[:-1])
        cache.search_ahead(1, lambda: steps[-1][1][0])
        widening[0] = 3
        q, k, v = steps[-1][1]
        parts.append(cache.attend(1, q, (k, v), None, scale=0.3))
    assert_same(parts[:1], parts[1:])


def test_a_fork_is_searched_ahead_beside_its_source() -> None:
    steps = drawn(3)
    caches = [made(look_ahead="always", look_ahead_factor=1) for _ in range(2)]
    for cache in caches:
        run(cache, steps[:-1])
    both, alone = [caches[0], caches[0].fork()], caches[1]
    queries = [steps[-1][1][0], -steps[-1][1][0]]
    for cache, q in zip(both, queries, strict=True):
        cache.search_ahead(1, lambda q=q: q)  # type: ignore[misc]
    _, k, v = steps[-1][1]
    got = [
        cache.attend(1, q, (k, v), None, scale=0.3) for cache, q in zip(both, queries, strict=True)
    ]
    alone.search_ahead(1, lambda: queries[0])
    assert_same(got[:1], [alone.attend(1, queries[0], (k, v), None, scale=0.3)])


# Trials ---------------------------------------------------------------------------------------


def test_a_trial_attends_what_the_layer_s_own_search_finds_and_judges() -> None:
    steps = drawn(TRIAL_LOOKS + 6)
    cache = made(NotedExecutor(), look_ahead="auto")
    during = run(cache, steps[: TRIAL_LOOKS + 1], lambda idx, q: q if idx == 1 else -q)
    assert states(cache) == ["off", "trial", "trial"]
    want = made(look_ahead="never")
    assert_same(during, run(want, steps[: TRIAL_LOOKS + 1]))
    after = run(cache, steps[TRIAL_LOOKS + 1 :], lambda idx, q: q if idx == 1 else -q)
    assert_same(after, run(want, steps[TRIAL_LOOKS + 1 :]))
    first, good, bad = cache.layers.describe_look_ahead()
    assert first["reason"] == "no layer comes before it"
    assert (good["state"], good["factor"]) == ("on", 1)
    assert good["lost_mass"] == pytest.approx(0.0, abs=1e-5)
    assert bad["state"] == "off"
    assert bad["lost_mass"] > MOST_LOST
    assert "of what its search finds is lost" in bad["reason"]
    assert good["searches"] == TRIAL_LOOKS + 5
    assert bad["searches"] == TRIAL_LOOKS


def test_a_trial_finds_the_narrowest_search_that_loses_little() -> None:
    steps = drawn(TRIAL_LOOKS + 3)
    noise = torch.randn(99, DIM, generator=torch.Generator().manual_seed(2))

    def near(idx: int, q: Tensor) -> Tensor:
        return q + (0.0, 0.0, 0.35)[idx] * noise[:6, None]

    cache = made(NotedExecutor(), look_ahead="auto", look_ahead_factor=24)
    run(cache, steps, near)
    _, true, close = cache.layers.describe_look_ahead()
    assert true["factor"] == 1
    assert 1 < close["factor"] < 24
    assert close["state"] == "on"
    assert 0 < close["lost_mass"] <= MOST_LOST


# When things happen ---------------------------------------------------------------------------


def test_a_search_runs_while_the_layer_before_attends() -> None:
    """The thread is let go on only when that layer is done: who waits for it earlier hangs."""
    executor = NotedExecutor()
    cache = made(executor, look_ahead="always")
    steps = drawn(2)
    run(cache, steps[:2])
    executor.events.clear()
    executor.open.clear()
    for idx, (q, k, v) in enumerate(steps[2]):
        if idx + 1 < LAYERS:
            cache.search_ahead(idx + 1, lambda idx=idx: steps[2][idx + 1][0])  # type: ignore[misc]
        if idx == 1:
            executor.open.set()
        cache.attend(idx, q, (k, v), None, scale=0.3)
        executor.events.append(f"attended {idx}")
    assert executor.events.index("attended 0") < executor.events.index("found 0")
    assert executor.events.index("found 0") < executor.events.index("attended 1")
    assert executor.events.index("begin 1") < executor.events.index("attended 1")
    executor.close()


def test_the_prediction_travels_without_being_waited_for_here() -> None:
    executor = NotedExecutor()
    cache = made(executor, look_ahead="always")
    steps = drawn(2)
    run(cache, steps[:2])
    executor.open.clear()
    waiting = len(executor.lane.pending)
    cache.search_ahead(1, lambda: steps[2][1][0])
    assert len(executor.lane.pending) == waiting + 1, "under way, and nobody has opened it"
    executor.open.set()
    cache.means.look_ahead.forget()  # type: ignore[union-attr]
    assert len(executor.lane.pending) == 0
    executor.close()


def test_an_error_of_a_search_comes_where_its_layer_attends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = NotedExecutor()
    cache = made(executor, look_ahead="always")
    steps = drawn(2)
    run(cache, steps[:2])
    monkeypatch.setattr(look_ahead_state, "search_row", lambda *_, **__: 1 / 0)
    cache.search_ahead(1, lambda: steps[2][1][0])
    q, k, v = steps[2][1]
    with pytest.raises(ZeroDivisionError):
        cache.attend(1, q, (k, v), None, scale=0.3)
    executor.close()


def test_an_index_that_was_built_meanwhile_takes_over_before_a_search_begins() -> None:
    """Not beside it: whoever asks later exchanges none under a search."""
    executor, steps = SlowBuilds(), drawn(3)
    learned = {"kind": "sketch", "min_keys": 32, "target_recall": 0.05, "target_mass": 0.05}
    cache = made(executor, look_ahead="always", index={**learned, "gain": 0})
    run(cache, steps[:-1])
    executor.open.clear()
    for build in executor.builds:
        build.run()
    cache.search_ahead(1, lambda: steps[-1][1][0])
    serving = {row["serves"] for row in cache.layers.describe_indexes() if row["layer"] == 1}
    executor.open.set()
    assert serving == {"sketch"}
    cache.means.look_ahead.forget()  # type: ignore[union-attr]
    executor.close()


def test_what_is_forgotten_has_ended() -> None:
    executor = NotedExecutor()
    cache = made(executor, look_ahead="always")
    steps = drawn(2)
    run(cache, steps[:2])
    executor.events.clear()
    ahead = cache.means.look_ahead
    assert ahead is not None
    cache.search_ahead(1, lambda: steps[2][1][0])
    ahead.forget()
    assert executor.events == ["begin 0", "found 0"]
    assert ahead.take(1) is None
    executor.close()


# Ranking --------------------------------------------------------------------------------------


def test_named_keys_are_ranked_by_their_scores(dtype: torch.dtype) -> None:
    keys = torch.randn(2, 37, 72).to(dtype)
    queries = torch.randn(2, 3, 72).to(dtype)
    ids = torch.stack([torch.randperm(37)[:11] for _ in range(6)]).view(2, 3, 11)
    ids[0, 0, 4:] = -1
    found, scores = rank_named(queries, keys, ids, 5)
    for head in range(2):
        for m in range(3):
            named = [i for i in ids[head, m].tolist() if i >= 0]
            exact = {i: float(keys[head, i].double() @ queries[head, m].double()) for i in named}
            best = sorted(named, key=lambda i: -exact[i])[:5]
            want = best + [-1] * (5 - len(best))
            assert found[head, m].tolist() == want
            for i, score in zip(best, scores[head, m].tolist(), strict=False):
                assert score == pytest.approx(exact[i], rel=1e-4, abs=1e-4)
    assert scores[0, 0, 4:].tolist() == [-torch.inf]
