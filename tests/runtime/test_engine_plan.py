"""A step as one call of the engine, held against the same step made op by op."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import CapacityError, IntegrityError, NonFiniteError
from hybrid_kv.index import sketch
from hybrid_kv.ops.native import engine_state
from hybrid_kv.ops.native.library import Pool
from hybrid_kv.ops.native.step import LayerPlan
from hybrid_kv.runtime import KVCache, engine_plan
from hybrid_kv.types import LayerShape, ModelInfo
from tests.kit import held
from tests.tolerances import TOLERANCES

SHAPE = LayerShape(0, 6, 2, 72)
PROMPT, STEPS = 420, 20
LEARNED = {"min_keys": 64, "target_recall": 0.05}
GRAPH = {"kind": "graph", **LEARNED, "max_scanned": 1.0, "check_positions": 8, "max_degree": 16}
SKETCH = {"kind": "sketch", **LEARNED, "target_mass": 0.05, "gain": 0, "codes": "64"}
INT8 = {"kind": "flat", "precision": "int8"}
RETRIEVING = {"method": "retrieval_attention", "sink_tokens": 16, "window_tokens": 32}
SPARE = {"spare_tokens": 96, "page_budget": 3}
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "streaming_llm": {"method": "streaming_llm", "window_tokens": 48},
    "quest": {"method": "quest", "dense_layers": 0, "page_budget": 5, "sink_tokens": 16},
    "stored": {**RETRIEVING, "cold": {"index": {"kind": "flat", "precision": "stored"}}},
    "int8": {**RETRIEVING, "cold": {"index": INT8, "top_k": 9}},
    "graph": {**RETRIEVING, "cold": {"index": GRAPH, "top_k": 20}},
    "sketch": {**RETRIEVING, "cold": {"index": SKETCH, "top_k": 20, "max_tokens": 31}},
    "estimated": {
        **RETRIEVING,
        "cold": {
            "index": {"kind": "flat", "precision": "int8"},
            "top_k": 9,
            "max_tokens": 13,
            "estimate": "gaussian",
        },
    },
    "all": {**RETRIEVING, "cold": {"index": INT8, "top_k": "all"}},
    "nearly all": {**RETRIEVING, "cold": {"index": INT8, "top_k": 375}},
    "hybrid": {**RETRIEVING, **SPARE, "method": "hybrid", "cold": {"top_k": 15}},
}
BESIDE_PAGES = {
    **{**RETRIEVING, "method": "hybrid", "page_size": 1, "spare_tokens": 200, "page_budget": 9},
    "cold": {"index": GRAPH, "top_k": 20},
}

pytestmark = pytest.mark.skipif(
    engine_state().isa is None, reason="no engine: every op is made by itself"
)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes caches whose steps are made op by op."""

    def make(settings: dict[str, Any]) -> KVCache:
        monkeypatch.setenv("HYBRID_KV_ONE_CALL", "0")
        kv = cache(settings)
        begin(kv)
        monkeypatch.delenv("HYBRID_KV_ONE_CALL")
        return kv

    return make


def cache(settings: dict[str, Any]) -> KVCache:
    return KVCache(ModelInfo((SHAPE,)), HybridConfig(**settings, index_build="wait"))


class Tokens:
    """The same ones for every cache; their dtype is that of the keys."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(0), dtype

    def next(self, new: int, rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            torch.randn(rows, heads, new, 72, generator=self.generator, dtype=torch.float32)
            for heads in (SHAPE.num_q_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads)
        )
        return q.to(self.dtype), k.to(self.dtype), v.to(self.dtype)


def feed(kv: KVCache, q: Tensor, k: Tensor, v: Tensor, softcap: float | None = None) -> Any:
    return kv.attend(0, q, (k, v), None, scale=0.12, softcap=softcap)


def begin(kv: KVCache, dtype: torch.dtype = torch.float32) -> Tokens:
    """Reads the prompt and a first token; returns what follows."""
    tokens = Tokens(dtype)
    feed(kv, *tokens.next(PROMPT))
    feed(kv, *tokens.next(1))
    return tokens


def compare(one: Any, parts: Any, dtype: torch.dtype = torch.float32) -> None:
    torch.testing.assert_close(one.out, parts.out, **TOLERANCES[dtype])
    torch.testing.assert_close(one.lse, parts.lse, **TOLERANCES[torch.float32])


def is_one_call(kv: KVCache) -> bool:
    return kv.ops.served.get("plan_step") == "native"


@pytest.mark.parametrize("name", [*SETTINGS, "graph beside pages"])
def test_steps_are_those_of_single_ops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages leave the window meanwhile, which one plan follows; work counts alike."""
    outs: list[list[Any]] = []
    caches = []
    for switch in ("1", "0"):
        monkeypatch.setenv("HYBRID_KV_ONE_CALL", switch)
        kv = cache(SETTINGS.get(name, BESIDE_PAGES))
        kv.means.reserve(PROMPT + 1 + STEPS)
        tokens = begin(kv)
        outs.append([feed(kv, *tokens.next(1)) for _ in range(STEPS)])
        kv.check_integrity()
        caches.append(kv)
    for one, parts in zip(*outs, strict=True):
        compare(one, parts)
    one, parts = caches
    assert is_one_call(one)
    assert one.describe_steps()[0]["plans"] == 1 + (name == "nearly all")  # for a while all
    assert not is_one_call(parts)
    if "graph" in name:  # of rows that walks share only a search by itself knows
        read = pytest.approx(parts.work.search_bytes, rel=0.35)
        assert one.work.search_bytes == read
        parts.work.search_bytes = one.work.search_bytes
    assert one.work == parts.work
    entered = [{name for name, s in kv.phases.seconds.items() if s > 0} for kv in caches]
    assert entered[0] - {"merge"} == entered[1] - {"merge"}
    one.close()
    parts.close()


@pytest.mark.parametrize("name", ["int8", "estimated"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_and_softcap(
    dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outs = []
    for switch in ("1", "0"):
        monkeypatch.setenv("HYBRID_KV_ONE_CALL", switch)
        kv = cache(SETTINGS[name])
        tokens = begin(kv, dtype)
        outs.append([feed(kv, *tokens.next(1), softcap=2.0) for _ in range(3)])
        assert is_one_call(kv) == (switch == "1")
    for one, parts in zip(*outs, strict=True):
        compare(one, parts, dtype)


def test_an_estimate_to_first_order_is_that_of_single_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**RETRIEVING, "cold": {"index": INT8, "top_k": 9, "estimate": "first_order"}}
    outs = []
    for switch in ("1", "0"):
        monkeypatch.setenv("HYBRID_KV_ONE_CALL", switch)
        kv = cache(settings)
        tokens = begin(kv)
        outs.append(feed(kv, *tokens.next(1)))
        assert is_one_call(kv) == (switch == "1")
    compare(*outs)


def test_a_layer_of_several_kinds_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of the prompt's keys, and a scan of the later ones."""
    monkeypatch.setattr(sketch, "SCANNED_KEYS", 16)
    settings = {**RETRIEVING, "cold": {"index": {**SKETCH, "horizon_tokens": 64}, "top_k": 20}}
    outs = []
    for switch in ("1", "0"):
        monkeypatch.setenv("HYBRID_KV_ONE_CALL", switch)
        kv = cache(settings)
        tokens = begin(kv)
        outs.append([feed(kv, *tokens.next(1)) for _ in range(STEPS)])
        plan = held(kv).extents[0].index.answers.plan(20, 20) or ()
        assert len(plan) > 1, "the later keys are scanned beside the codes"
        assert any(search.first_row for search in plan)
    for one, parts in zip(*outs, strict=True):
        compare(one, parts)


def test_after_crop_and_fork_the_plan_is_that_of_what_is_left(apart: Any) -> None:
    one, parts = cache(SETTINGS["int8"]), apart(SETTINGS["int8"])
    tokens, same = begin(one), Tokens()
    same.next(PROMPT), same.next(1)

    def both(new: int, rows: int = 1) -> None:
        given, expected = tokens.next(new, rows), same.next(new, rows)
        compare(feed(one, *given), feed(parts, *expected))

    for _ in range(20):
        both(1)
    for count in (3, 40, 200):  # within the page, within the window, into the cold tier
        for kv in (one, parts):
            kv.layers[0].crop(count)
        both(1)
        both(4)  # several tokens are made op by op
        both(1)
    for kv in (one, parts):
        kv.layers[0].fork([0, 0])
    both(1, rows=2)
    for kv in (one, parts):
        kv.layers[0].fork([1])
    both(1)
    for kv in (one, parts):
        kv.check_integrity()


@pytest.mark.parametrize("name", [name for name in SETTINGS if "cold" in SETTINGS[name]])
def test_rows_that_go_on_from_shared_entries_are_one_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What leaves the window of a fork lies in an extent of its own; what a fork has cropped is
    still there for the others, and found by every search.
    """
    outs: list[list[Any]] = []
    works = []
    # A page leaves in the steps; the spare pages of hybrid leave later.
    counts = [130 if name == "hybrid" else 70, *[1] * 20]
    for switch in ("1", "0"):
        monkeypatch.setenv("HYBRID_KV_ONE_CALL", switch)
        first = cache(SETTINGS[name])
        tokens = begin(first)
        shorter = first.fork()
        shorter.layers[0].crop(140)
        again = shorter.fork()
        outs.append([])
        for kv in (first, shorter, again):
            outs[-1] += [feed(kv, *tokens.next(count), softcap=2.0) for count in counts]
        twice = again.fork()
        outs[-1] += [feed(twice, *tokens.next(count)) for count in counts]
        for kv, extents in ((first, 2), (shorter, 2), (again, 2), (twice, 3)):
            seen = held(kv).extents
            assert len(seen) == extents
            assert (seen[0].length < seen[0].stored) == (kv is not first)
            assert kv.describe_steps()[0]["one_call"] == (switch == "1")
            kv.check_integrity()
        works.append([kv.work for kv in (first, shorter, again, twice)])
    if name == "graph":  # begins at what all extents together found, and by itself at its own
        steps = [[out.lse for out in each if out.lse.shape[-1] == 1] for each in outs]
        masses = [torch.cat(each).exp().mean() for each in steps]
        assert float(masses[0] / masses[1]) == pytest.approx(1, abs=0.01)
        return
    for one, parts in zip(*outs, strict=True):
        compare(one, parts)
    assert works[0] == works[1]


def test_every_extent_is_searched_from_where_its_entries_were_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = cache(SETTINGS["graph"])
    tokens = begin(first)
    kv = first.fork()
    kv.layers[0].crop(140)
    for _ in range(100):
        feed(kv, *tokens.next(1))
    shared, own = held(kv).extents
    assert shared.length < shared.stored
    assert shared.near is not None
    assert own.near is not None
    assert 0 <= int(own.near.max()) < own.length
    assert int(shared.near.max()) < shared.length
    moved = torch.where(own.near < 0, -1, own.near + shared.length)
    expected = torch.cat([shared.near, moved], -1)
    begins = []
    tell = LayerPlan.tell

    def noted(plan: LayerPlan, *args: Any, **kwargs: Any) -> Any:
        begins.append(kwargs["warm"])
        return tell(plan, *args, **kwargs)

    monkeypatch.setattr(LayerPlan, "tell", noted)
    feed(kv, *tokens.next(1))
    assert torch.equal(begins[0], expected)
    feed(kv, *tokens.next(3))  # whose queries are others than those of one token
    feed(kv, *tokens.next(1))
    assert begins[-1] is None


def stored(kv: KVCache) -> list[Tensor]:
    """All that a layer's only row holds in its pages."""
    row = held(kv)
    return [row.k, row.v, torch.tensor(row.resident), torch.tensor(row.length), *(row.bounds or ())]


@pytest.mark.parametrize("name", ["int8", "quest"])
def test_the_call_stores_the_token_as_an_append_does(name: str, apart: Any) -> None:
    one, parts = cache(SETTINGS[name]), apart(SETTINGS[name])
    tokens, same = begin(one), Tokens()
    same.next(PROMPT), same.next(1)
    for _ in range(STEPS):
        feed(one, *tokens.next(1))
        feed(parts, *same.next(1))
        one.check_integrity()
        for found, expected in zip(stored(one), stored(parts), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("switch", ["1", "0"])
@pytest.mark.parametrize("more", [1, -PROMPT % 16 - 1])
def test_a_key_that_is_not_finite_is_not_stored(
    value: float, switch: str, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it in a page that has room or as the first of a page."""
    monkeypatch.setenv("HYBRID_KV_ONE_CALL", switch)
    kv = cache(SETTINGS["int8"])
    tokens = begin(kv)
    for _ in range(more):
        feed(kv, *tokens.next(1))
    before = stored(kv)
    q, k, v = tokens.next(1)
    k[0, 1, 0, 71] = value
    with pytest.raises(NonFiniteError, match=r"^keys and values of layer 0 must be finite, got"):
        feed(kv, q, k, v)
    kv.check_integrity()
    assert all(torch.equal(*pair) for pair in zip(stored(kv), before, strict=True))
    feed(kv, *tokens.next(1))
    kv.check_integrity()


def test_a_call_that_fails_has_stored_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = cache(SETTINGS["int8"])
    tokens = begin(kv)
    feed(kv, *tokens.next(1))
    before = stored(kv)

    def fail(*_: Any, **__: Any) -> Any:
        raise CapacityError("the native engine has run out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(LayerPlan, "run", fail)
        with pytest.raises(CapacityError):
            feed(kv, *tokens.next(1))
    kv.check_integrity()
    assert all(torch.equal(*pair) for pair in zip(stored(kv), before, strict=True))


def test_results_are_the_callers() -> None:
    """They are made many at a time; writing to one changes no other, inside a block or outside."""
    kv = cache(SETTINGS["int8"])
    with torch.inference_mode():
        tokens = begin(kv)
        first = feed(kv, *tokens.next(1))
        kept = first.out.clone(), first.lse.clone()
    later = feed(kv, *tokens.next(1))
    expected = later.out.clone(), later.lse.clone()
    first.out.fill_(3)
    first.lse.fill_(3)
    assert torch.equal(later.out, expected[0])
    assert torch.equal(later.lse, expected[1])
    later.out.mul_(2)
    for _ in range(20):
        feed(kv, *tokens.next(1))
    assert torch.equal(later.out, 2 * expected[0])
    assert not torch.equal(first.out, kept[0])


@pytest.mark.parametrize("name", ["streaming_llm", "int8"])
def test_a_page_that_has_left_is_in_no_plan(name: str, apart: Any) -> None:
    """A page leaves when the last one is full, and the next token changes the table once more; a
    layer that shares its keys attends between the two.
    """
    one, parts = (
        cache({**SETTINGS[name], "page_size": 16}),
        apart({**SETTINGS[name], "page_size": 16}),
    )
    tokens, same = begin(one), Tokens()
    same.next(PROMPT), same.next(1)
    for _ in range(2 * 16):
        given, expected = tokens.next(1), same.next(1)
        compare(feed(one, *given), feed(parts, *expected))
        compare(*(kv.attend(0, given[0], None, None, scale=0.12) for kv in (one, parts)))
        one.check_integrity()


def test_what_was_found_is_there_for_an_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = []
    for switch in ("1", "0"):
        monkeypatch.setenv("HYBRID_KV_ONE_CALL", switch)
        kv = cache({**SETTINGS["int8"], "audit_every": 1, "audit": {"action": "widen"}})
        layer, found = kv.layers[0], {}
        tokens = begin(kv)
        q, k, v = tokens.next(1)
        layer.append(k, v, None)
        layer.steps.attend(layer.steps.make(layer.held, q, 0.12, None, found=found))
        budget, retrieved = found[0]
        assert (budget.top_k, len(retrieved.parts)) == (9, 1)
        assert is_one_call(kv) == (switch == "1")
        ids.append(retrieved.parts[0].ids)
        kv.close()
    assert torch.equal(*ids)


def test_most_retrieved_is_of_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an earlier one, where an audit had the budget widened."""
    kv = cache(SETTINGS["int8"])
    tokens, steps = begin(kv), type(kv.layers[0].steps)
    with monkeypatch.context() as patched:
        patched.setattr(steps, "attend", partialmethod(steps.attend, widening=3))
        feed(kv, *tokens.next(1))
    feed(kv, *tokens.next(1))
    assert is_one_call(kv)
    assert kv.work.most_retrieved == 3 * 9


def test_what_a_plan_cannot_say_is_made_op_by_op() -> None:
    """Each of these reads what no descriptor names; the reason is in `one_call`."""
    flat = {"kind": "flat", "precision": "int8"}
    for settings in (
        {**RETRIEVING, "cold": {"index": "flat"}},  # torch scans
        {**RETRIEVING, "cold": {"index": flat, "min_share": 0.01}},
        {"method": "h2o"},
        {"method": "full", "backend": "reference"},
    ):
        kv = cache(settings)
        tokens = begin(kv)
        feed(kv, *tokens.next(1))
        assert not is_one_call(kv), settings
        (how,) = kv.describe_steps()
        assert (how["one_call"], bool(how["reason"])) == (False, True)


def test_how_a_step_was_made_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = cache(SETTINGS["int8"])
    none = {"layer": 0, "plans": 0, "one_call": False, "code": None, "reason": None}
    assert kv.describe_steps() == [none]
    tokens = begin(kv)
    one = {"layer": 0, "plans": 1, "one_call": True, "code": "", "reason": ""}
    assert kv.describe_steps() == [one]
    feed(kv, *tokens.next(3))
    assert kv.describe_steps()[0]["reason"] == "several new tokens"
    feed(kv, *tokens.next(1))
    assert kv.describe_steps()[0]["one_call"]
    kv.layers[0].fork([0, 0])
    feed(kv, *tokens.next(1, rows=2))
    assert kv.describe_steps()[0]["reason"] == "several rows"
    for settings, reason in (
        ({"backend": "torch_cpu"}, "backend 'torch_cpu' computes each op"),
        ({"cold": {"index": INT8, "min_share": 0.01}}, "not found by plain searches"),
        ({"cold": {"index": "flat"}}, "asked by Python"),
    ):
        kv = cache({**RETRIEVING, **settings})
        begin(kv)
        assert reason in kv.describe_steps()[0]["reason"]
    monkeypatch.setenv("HYBRID_KV_ONE_CALL", "0")
    kv = cache(SETTINGS["int8"])
    begin(kv)
    assert kv.describe_steps()[0]["reason"] == "HYBRID_KV_ONE_CALL=0"


@pytest.mark.parametrize("name", ["full", "quest"])
def test_pages_that_fill_change_no_plan(name: str) -> None:
    """As long as nothing leaves, and the pool and the list of pages have room."""
    kv = cache(SETTINGS[name])
    kv.means.reserve(PROMPT + 200)
    tokens = begin(kv)
    feed(kv, *tokens.next(1))
    before = kv.describe_steps()[0]["plans"]
    for _ in range(100):
        feed(kv, *tokens.next(1))
    assert kv.describe_steps()[0]["plans"] == before
    kv.check_integrity()


def test_a_row_without_pages_is_asked_and_goes_on(apart: Any) -> None:
    """Its list of pages is empty where the plan is made, and fills in place."""
    one, parts = cache(SETTINGS["full"]), apart(SETTINGS["full"])
    tokens, same = begin(one), Tokens()
    same.next(PROMPT), same.next(1)
    for kv in (one, parts):
        kv.layers[0].crop(PROMPT + 1)
        empty = kv.attend(0, torch.ones(1, SHAPE.num_q_heads, 1, 72), None, None, scale=0.12)
        assert (empty.lse == -torch.inf).all()
    for _ in range(STEPS):
        compare(feed(one, *tokens.next(1)), feed(parts, *same.next(1)))
        one.check_integrity()


def test_a_plan_that_was_not_told_of_a_change_is_found_out() -> None:
    kv = cache(SETTINGS["int8"])
    tokens = begin(kv)
    feed(kv, *tokens.next(1))
    held(kv).extents[0].move()
    with pytest.raises(IntegrityError, match="a step's plan must be told of what changes"):
        feed(kv, *tokens.next(1))


@pytest.mark.parametrize("name", ["int8", "sketch", "estimated", "all"])
def test_a_plan_that_does_not_follow_a_page_is_found_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the number that the engine was not told."""
    kv = cache(SETTINGS[name])
    tokens = begin(kv)
    monkeypatch.setattr(engine_plan.EnginePlan, "follow", lambda plan: True)
    with pytest.raises(IntegrityError, match=r"told of what changes, got \('\w[^']*count'"):
        _ = [feed(kv, *tokens.next(1)) for _ in range(STEPS)]


def test_threads_more_than_cores_and_a_pool_that_closes_in_mid_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many threads take turns; a closed pool leaves the work to the calling thread."""
    kv, alone = cache(SETTINGS["int8"]), cache(SETTINGS["int8"])
    tokens, same = begin(kv), begin(alone)
    pool = Pool(64)
    monkeypatch.setattr(engine_plan, "pool_here", lambda: pool)
    outs = []
    for step in range(6):
        if step == 3:
            pool.close()
        outs.append(feed(kv, *tokens.next(1)))
    monkeypatch.setattr(engine_plan, "pool_here", lambda: None)
    for out in outs:
        expected = feed(alone, *same.next(1))
        assert torch.equal(out.out, expected.out)
        assert torch.equal(out.lse, expected.lse)
