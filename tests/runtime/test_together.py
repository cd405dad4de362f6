"""Rows that were forked from one cache attend what they share together, as exactly as alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hybrid_kv as hkv
from hybrid_kv.config import IndexConfig
from hybrid_kv.errors import NonFiniteError
from hybrid_kv.models import joined
from hybrid_kv.models.attach import Attachment, HybridCache
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.joined import JoinedCache
from hybrid_kv.ops.native.step import LayerPlan
from hybrid_kv.runtime import cold, together
from hybrid_kv.store import ExtentView, search
from tests.ops.native.engines import needs_engine
from tests.serve.asking import prompt, small_model

STEPS = 20
FLAT = {"kind": "flat", "precision": "stored"}
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "quest, opened": {"method": "quest", "page_budget": "all"},
    "hybrid, opened": {"method": "hybrid", "cold": {"top_k": "all"}},
    "hybrid, found": {"method": "hybrid", "cold": {"top_k": 7, "index": FLAT}},
}
PLACED = {"hybrid": {"sink_tokens": 1, "window_tokens": 2}}  # in pages
pytestmark = needs_engine


def config(name: str, page_size: int) -> hkv.HybridConfig:
    own = SETTINGS[name]
    pages = PLACED.get(own["method"], {})
    place = {setting: count * page_size for setting, count in pages.items()}
    return hkv.HybridConfig(page_size=page_size, index_build="wait", **place, **own)


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


@pytest.fixture(params=[16, 37])
def page_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def runtime(model: Any) -> Iterator[Attachment]:
    with hkv.attach(model, "full") as attached:
        yield attached


def forks(model: Any, runtime: Attachment, own: hkv.HybridConfig) -> list[HybridCache]:
    """Three rows of one context, two of them with further tokens of their own."""
    first = runtime.cache(own)
    model(torch.tensor([prompt(700)]), **passing(first))
    model(torch.tensor([[5]]), **passing(first))  # ends the prompt
    rows = [first, first.fork(), first.fork()]
    for number, row in enumerate(rows[1:], 1):
        model(torch.tensor([prompt(60 * number, seed=number)]), **passing(row))
    return rows


def steps(model: Any, rows: list[HybridCache], count: int = STEPS) -> Tensor:
    logits = []
    for number in range(count):
        cache = JoinedCache(rows)
        out = model(
            torch.tensor([[3 + (number + row) % 9] for row in range(len(rows))]),
            position_ids=torch.tensor(cache.positions),
            **passing(cache),
        )
        assert cache.errors == [None] * len(rows)
        logits.append(out.logits)
    return torch.stack(logits)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows got an outcome at each layer and step."""
    counts: list[int] = []
    attend = together.attend_shared

    def counted(rows: Any, **how: Any) -> None:
        attend(rows, **how)
        counts.append(sum(row.outcome is not None for row in rows))

    monkeypatch.setattr(joined, "attend_shared", counted)
    return counts


@pytest.mark.parametrize("one_call", ["1", "0"])
@pytest.mark.parametrize("estimate", ["none", "gaussian"])
@torch.inference_mode()
def test_a_shared_extent_is_searched_once_and_rows_go_on_from_what_was_found(
    model: Any,
    runtime: Attachment,
    estimate: str,
    one_call: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By one call of each row, or op by op; two rows have an extent of their own as well."""
    own = config("hybrid, found", 16)
    own = own.replace(cold={**own.cold.model_dump(), "estimate": estimate})
    searched: list[int] = []
    taken_up: list[bool] = []
    by_itself, tell = search.search_extent, LayerPlan.tell

    def noted(span: ExtentView, queries: Tensor, *args: Any) -> Any:
        searched.append(queries.shape[1])
        return by_itself(span, queries, *args)

    def called(self: LayerPlan, *args: Any, **how: Any) -> Any:
        taken_up.append(how["found"] is not None)
        return tell(self, *args, **how)

    for module in (search, cold, together):
        monkeypatch.setattr(module, "search_extent", noted)
    monkeypatch.setattr(LayerPlan, "tell", called)
    monkeypatch.setenv("HYBRID_KV_ONE_CALL", one_call)
    outs, works, counts = [], [], []
    for alone in (False, True):
        rows = forks(model, runtime, own)
        searched.clear()
        taken_up.clear()
        with monkeypatch.context() as patched:
            if alone:
                patched.setattr(joined, "attend_shared", lambda *_, **__: None)
            outs.append(steps(model, rows, 3))
        works.append([row.work for row in rows])
        group = model.config.num_attention_heads // model.config.num_key_value_heads
        expected = 0 if alone else 2 * 3
        assert searched.count(3 * group) == expected
        if one_call == "1":
            assert taken_up == [not alone] * (2 * 3 * 3)
            assert len(searched) == expected
        else:
            assert taken_up == []
        counts.append(len(searched))
    # By itself each of three rows searches that extent at each of two layers and three steps.
    assert one_call == "1" or counts[1] - counts[0] == 2 * 3 * (3 - 1)
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-4)
    for shared, own_search in zip(*works, strict=True):
        assert shared.search_bytes < own_search.search_bytes, "what is scanned once for all rows"
        shared.search_bytes = own_search.search_bytes
    assert works[0] == works[1]


@pytest.mark.parametrize("name", SETTINGS)
@torch.inference_mode()
def test_rows_get_what_they_get_one_by_one(
    model: Any,
    runtime: Attachment,
    page_size: int,
    name: str,
    shared: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = config(name, page_size)
    rows = forks(model, runtime, own)
    found = steps(model, rows)
    assert shared == [3] * (2 * STEPS)
    for row in rows:
        row.check_integrity()
    alone = forks(model, runtime, own)
    monkeypatch.setattr(joined, "attend_shared", lambda *_, **__: None)
    want = steps(model, alone)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    for row, other in zip(rows, alone, strict=True):
        assert row.work.attended == other.work.attended
        assert row.work.visible == other.work.visible
        assert row.work.retrieved == other.work.retrieved
        assert row.work.steps == other.work.steps


@pytest.mark.parametrize("name", ["full", "hybrid, opened"])
@torch.inference_mode()
def test_rows_of_one_length_and_a_cropped_one_keep_to_themselves(
    model: Any, runtime: Attachment, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two have all their pages in common, of which the last is not full."""
    found = []
    for alone in (False, True):
        first = runtime.cache(config(name, 16))
        model(torch.tensor([prompt(300)]), **passing(first))
        model(torch.tensor([[5]]), **passing(first))
        rows = [first, first.fork(), first.fork()]
        rows[2].crop(-100)
        with monkeypatch.context() as patched:
            if alone:
                patched.setattr(joined, "attend_shared", lambda *_, **__: None)
            found.append([steps(model, rows[:2], 2), steps(model, rows, 2)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_rows_without_a_common_part_are_left_alone(
    model: Any, runtime: Attachment, shared: list[int]
) -> None:
    rows = []
    for name in ("full", "hybrid, opened", "hybrid, found"):
        rows.append(runtime.cache(config(name, 16)))
        model(torch.tensor([prompt(300)]), **passing(rows[-1]))
    steps(model, rows)
    assert set(shared) == {0}


@torch.inference_mode()
def test_an_index_whose_queries_choose_together_takes_over_and_is_asked_by_each_row(
    model: Any, runtime: Attachment, shared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it finds for one row must not follow from queries of another."""
    joint = IndexConfig(kind="query_channels", num_channels=4, shared=True)
    outs = []
    for alone in (False, True):
        rows = forks(model, runtime, config("hybrid, found", 16))
        with monkeypatch.context() as patched:
            if alone:
                patched.setattr(joined, "attend_shared", lambda *_, **__: None)
            steps(model, rows, 1)
            for layer in rows[0].kv.layers.values():
                extent = layer.held.rows[0].chain.spans[0].extent
                assert extent.index is not None
                extent.index._serve(joint.build())
                extent.index.serving.build(extent.keys, None)
            outs.append(steps(model, rows, 3))
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-4)
    assert shared == [3] * 2 + [0] * (2 * 3)


@pytest.mark.parametrize("name", ["full", "hybrid, found"])
@torch.inference_mode()
def test_an_error_of_one_row_is_its_own(
    model: Any, runtime: Attachment, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = forks(model, runtime, config(name, 16))

    def fail(*_: Any) -> None:
        raise NonFiniteError("of this row")

    monkeypatch.setattr(rows[1].kv.layers[1], "append", fail)
    monkeypatch.setattr(rows[1].kv.layers[1].steps, "attend", fail)
    cache = JoinedCache(rows)
    model(
        torch.tensor([[3], [4], [5]]),
        position_ids=torch.tensor(cache.positions),
        **passing(cache),
    )
    assert [type(error) for error in cache.errors] == [type(None), NonFiniteError, type(None)]
