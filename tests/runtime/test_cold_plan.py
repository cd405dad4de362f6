"""The host's part of a step as one call of the engine, held against the same made op by op."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hybrid_kv.config import HybridConfig
from hybrid_kv.ops.native import engine_state
from hybrid_kv.ops.native.step import LayerPlan
from hybrid_kv.runtime import KVCache
from hybrid_kv.transfer import SyncExecutor
from hybrid_kv.transfer.cuda import CudaExecutor
from hybrid_kv.types import ModelInfo
from tests.kit import held, kept_alive
from tests.runtime import test_look_ahead as look_ahead
from tests.runtime.test_engine_plan import (
    INT8,
    PROMPT,
    RETRIEVING,
    SETTINGS,
    SHAPE,
    STEPS,
    Tokens,
    begin,
    compare,
    feed,
)
from tests.transfer.late import LateLane

COLD = [n for n, setting in SETTINGS.items() if "cold" in setting and not n.endswith("all")]
"""Of which some entries are found; where all are attended, ops do it."""

pytestmark = pytest.mark.skipif(
    engine_state().isa is None, reason="no engine: every op is made by itself"
)


def far(settings: dict[str, Any]) -> KVCache:
    """A cache whose model computes on a device: what travels is late."""
    lane = LateLane()
    executor = CudaExecutor(SyncExecutor(), lambda device: lane)
    config = HybridConfig(**settings, index_build="wait")
    return KVCache(ModelInfo((SHAPE,)), config, executor)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[LayerPlan]:
    """Whose plans were attended by, in the order of the calls."""
    made: list[LayerPlan] = []
    own = LayerPlan.attend

    def noted(self: LayerPlan, *args: Any, **kwargs: Any) -> Any:
        made.append(self)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(LayerPlan, "attend", noted)
    return made


@pytest.mark.parametrize("name", COLD)
def test_the_cold_part_is_that_of_single_ops(
    name: str, calls: list[LayerPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages leave the window meanwhile, which one plan follows; work counts alike."""
    outs, caches = [], []
    for switch in ("1", "0"):
        monkeypatch.setenv("HYBRID_KV_ONE_CALL", switch)
        kv = far(SETTINGS[name])
        tokens = begin(kv)
        before = len(calls)
        outs.append([feed(kv, *tokens.next(1), softcap=2.0) for _ in range(STEPS)])
        assert len(calls) - before == (STEPS if switch == "1" else 0)
        kv.check_integrity()
        caches.append(kv)
    for one, parts in zip(*outs, strict=True):
        compare(one, parts)
    assert len(set(calls)) == 1
    one, parts = caches
    if name == "graph":  # of rows that walks share only a search by itself knows
        assert one.work.search_bytes == pytest.approx(parts.work.search_bytes, rel=0.35)
        parts.work.search_bytes = one.work.search_bytes
    assert one.work == parts.work
    entered = [{name for name, s in kv.phases.seconds.items() if s > 0} for kv in caches]
    assert entered[0] - {"merge"} == entered[1] - {"merge"}
    for kv in caches:
        kv.close()


@pytest.mark.parametrize("name", ["int8", "estimated"])
def test_cold_parts_of_forks_are_one_call(
    name: str, calls: list[LayerPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them has cropped what it shares; both have an extent of their own behind it."""
    outs = []
    for switch in ("1", "0"):
        monkeypatch.setenv("HYBRID_KV_ONE_CALL", switch)
        first = far(SETTINGS[name])
        tokens = begin(first)
        shorter = first.fork()
        shorter.layers[0].crop(140)
        outs.append([])
        for kv in (first, shorter):
            before = len(calls)
            outs[-1] += [feed(kv, *tokens.next(1)) for _ in range(70)]
            assert len(calls) - before == (70 if switch == "1" else 0)
            assert len(held(kv).extents) == 2
    for one, parts in zip(*outs, strict=True):
        compare(one, parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_several_rows_and_tokens_in_16_bits(
    dtype: torch.dtype, calls: list[LayerPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At home too: there only a single row's single token is a whole step of the engine."""
    outs = []
    for switch in ("1", "0"):
        monkeypatch.setenv("HYBRID_KV_ONE_CALL", switch)
        kv = KVCache(ModelInfo((SHAPE,)), HybridConfig(**SETTINGS["estimated"], index_build="wait"))
        tokens = begin(kv, dtype)
        kv.layers[0].fork([0, 0, 0])
        before = len(calls)
        outs.append([feed(kv, *tokens.next(new, rows=3)) for new in (1, 1, 4, 1)])
        assert len(calls) - before == (12 if switch == "1" else 0)
        kv.layers[0].fork([2])
        outs[-1].append(feed(kv, *tokens.next(3)))
    for one, parts in zip(*outs, strict=True):
        compare(one, parts, dtype)


def test_what_was_found_is_there_for_an_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row."""
    ids = []
    for switch in ("1", "0"):
        monkeypatch.setenv("HYBRID_KV_ONE_CALL", switch)
        kv = far(SETTINGS["int8"])
        layer, found = kv.layers[0], {}
        tokens = begin(kv)
        layer.fork([0, 0])
        q, k, v = tokens.next(1, rows=2)
        layer.append(k, v, None)
        layer.steps.attend(layer.steps.make(layer.held, q, 0.12, None, found=found))
        assert sorted(found) == [0, 1]
        for budget, retrieved in found.values():
            assert (budget.top_k, len(retrieved.parts)) == (9, 1)
        ids.append(torch.stack([found[row][1].parts[0].ids for row in (0, 1)]))
    assert torch.equal(*ids)
    assert not torch.equal(*ids[0])


def test_estimates_of_several_extents_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for switch in ("1", "0"):
        monkeypatch.setenv("HYBRID_KV_ONE_CALL", switch)
        source = far(SETTINGS["estimated"])
        tokens = begin(source)
        kv, found = source.fork(), {}
        _ = [feed(kv, *tokens.next(1)) for _ in range(70)]
        layer = kv.layers[0]
        q, k, v = tokens.next(1)
        layer.append(k, v, None)
        layer.steps.attend(layer.steps.make(layer.held, q, 0.12, None, found=found))
        assert len(found[0][1].parts) == 2
        told.append(found[0][1].estimated)
    torch.testing.assert_close(*told)


def test_entries_that_a_method_has_copies_of_are_attended_once() -> None:
    """By whatever index the others are found: one that the engine could search is no exception."""
    kept = {"method": "snapkv", "demote": "offload", "window_tokens": 32, "budget_tokens": 64}
    outs = []
    for precision in ("exact", "stored"):
        index = {"kind": "flat", "precision": precision}
        kv = far({**kept, "cold": {"index": index, "top_k": 30}})
        tokens = begin(kv)
        outs.append([feed(kv, *tokens.next(1)) for _ in range(3)])
    for one, other in zip(*outs, strict=True):
        compare(one, other)
    kv = far({**kept, "cold": {"index": "flat", "top_k": "all"}})
    feed(kv, *begin(kv).next(1))
    assert kv.work.most_retrieved == len(held(kv).cold) - (64 - 32)


def test_an_estimate_beside_copies_is_of_all_others() -> None:
    """Keys are alike, so that it is what attention gives."""
    kept = {"method": "snapkv", "demote": "offload", "window_tokens": 32, "budget_tokens": 64}
    kv = far({**kept, "cold": {"index": "flat", "top_k": 30, "estimate": "gaussian"}})
    tokens = Tokens()
    for new in (PROMPT, 1, 1):
        q, _, v = tokens.next(new)
        part = feed(kv, q, torch.full_like(v, 0.1), v)
    expected = 0.12 * 0.1 * q.sum(-1) + math.log(PROMPT + 2)
    torch.testing.assert_close(part.lse, expected, rtol=1e-3, atol=1e-3)


def test_no_more_cold_entries_than_the_budget_are_attended_without_a_search(
    calls: list[LayerPlan],
) -> None:
    for more, is_searched in ((0, False), (-1, True)):
        kv = far(SETTINGS["int8"])
        begin(kv)
        top_k = len(held(kv).cold) + more
        kv = far({**RETRIEVING, "cold": {"index": INT8, "top_k": top_k}})
        tokens = begin(kv)
        feed(kv, *tokens.next(1))
        calls.clear()
        feed(kv, *tokens.next(1))
        assert (bool(calls), bool(kv.work.scored)) == (is_searched, is_searched)


@pytest.mark.parametrize("rows", [1, 3])
def test_what_was_searched_ahead_is_ranked_in_the_place_of_a_search(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong prediction names everything; on trial a layer is searched as well, op by op."""
    named: list[bool] = []
    own = LayerPlan.attend

    def noted(self: LayerPlan, *args: Any, **kwargs: Any) -> Any:
        named.append(kwargs["named"] is not None)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(LayerPlan, "attend", noted)
    steps = look_ahead.drawn(9, rows)
    executor = look_ahead.NotedExecutor()
    cache = look_ahead.made(executor, look_ahead="always", look_ahead_factor=99)
    got = look_ahead.run(cache, steps, lambda _, q: -q)
    # In the first step nobody had sealed the layers yet; nothing comes before the first layer.
    assert named == [False] * 3 * rows + [*[False] * rows, *[True] * 2 * rows] * 8
    monkeypatch.setenv("HYBRID_KV_ONE_CALL", "0")
    parts = look_ahead.made(executor, look_ahead="always", look_ahead_factor=99)
    look_ahead.assert_same(got, look_ahead.run(parts, steps, lambda _, q: -q))
    assert cache.work == parts.work
    caches = []
    for switch, kv in (("1", cache), ("0", parts)):  # what leaves now lies in an extent of its own
        monkeypatch.setenv("HYBRID_KV_ONE_CALL", switch)
        caches.append((kv.fork(), kv))
    named.clear()
    forked = []
    for switch, (fork, _) in zip(("1", "0"), caches, strict=True):
        monkeypatch.setenv("HYBRID_KV_ONE_CALL", switch)
        forked.append(look_ahead.run(fork, look_ahead.drawn(20, rows, 1)[1:], lambda _, q: -q))
        assert len(held(fork, layer=1).extents) == 2
    assert named == [*[False] * rows, *[True] * 2 * rows] * 20
    look_ahead.assert_same(*forked)
    trial = look_ahead.made(executor, look_ahead="auto")
    named.clear()
    monkeypatch.delenv("HYBRID_KV_ONE_CALL")
    look_ahead.run(trial, steps[:4])
    assert not any(named)
    executor.close()


def test_what_a_call_cannot_say_is_made_op_by_op(calls: list[LayerPlan]) -> None:
    """Each of these reads what no descriptor names, or is attended by the device."""
    for cold, further in (
        ({"index": "flat"}, {}),  # torch scans
        ({"index": INT8, "min_share": 0.01}, {}),
        ({"index": INT8, "top_k": "all"}, {}),
        ({"index": INT8}, {"backend": "torch_cpu"}),
    ):
        kv = far({**RETRIEVING, **further, "cold": cold})
        tokens = begin(kv)
        feed(kv, *tokens.next(1))
        kv.close()
    assert not calls


def test_a_layer_that_is_forgotten_lets_go_of_its_entries() -> None:
    kv = far(SETTINGS["int8"])
    begin(kv)
    entries = kept_alive(kv)
    assert all(one() is not None for one in entries.values())
    kv.layers[0].reset()
    assert {one() for one in entries.values()} == {None}
