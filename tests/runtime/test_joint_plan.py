"""Steps of caches that share nothing, in one call of the engine: each is what it is alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hybrid_kv as hkv
from hybrid_kv.errors import NonFiniteError
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.joined import JoinedCache
from hybrid_kv.ops.native import step as native_step
from hybrid_kv.ops.native.library import Pool
from hybrid_kv.runtime import together
from hybrid_kv.runtime.together import JointPlan
from tests.ops.native.engines import needs_engine
from tests.runtime.test_engine_plan import SETTINGS, Tokens, cache, feed, stored
from tests.serve.asking import prompt, small_model

pytestmark = needs_engine

NAMES = ("hybrid", "quest", "full", "graph", "all")
PROMPTS = (420, 333, 37, 301, 260)
STEPS = 40  # pages leave in some of them


class Row:
    """Two caches of the same tokens: one for joint steps, one for steps alone."""

    def __init__(self, name: str, length: int) -> None:
        self.joint, self.alone = cache(SETTINGS[name]), cache(SETTINGS[name])
        self.tokens = Tokens()
        for new in (length, 1):
            once = self.tokens.next(new)
            for kv in (self.joint, self.alone):
                feed(kv, *once)


def take(rows: list[Row], news: list[Any]) -> tuple[list[Any], int]:
    """A step of all rows, and how many were joint; what is not one call is made alone."""
    found = [
        row.joint.joint_step(0, new[0], new[1:], scale=0.12, softcap=None)
        for row, new in zip(rows, news, strict=True)
    ]
    together = [one for one in found if one is not None]
    parts = iter(JointPlan([plan for plan, _ in together]).attend([step for _, step in together]))
    outs = []
    for row, new, one in zip(rows, news, found, strict=True):
        part = None if one is None else next(parts)
        if one is not None and part is not None:
            row.joint.layers.end_step(row.joint.layers[0])
        outs.append(feed(row.joint, *new) if one is None else part)
    return outs, len(together)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_rows_give_what_they_give_alone(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(threads)
    monkeypatch.setattr(together, "pool_here", lambda: pool)
    rows = [Row(name, length) for name, length in zip(NAMES, PROMPTS, strict=True)]
    joined = 0
    for _ in range(STEPS):
        news = [row.tokens.next(1) for row in rows]
        outs, count = take(rows, news)
        joined += count
        for row, new, out in zip(rows, news, outs, strict=True):
            expected = feed(row.alone, *new)
            assert torch.equal(out.out, expected.out)
            assert torch.equal(out.lse, expected.lse)
    assert joined > 0.6 * STEPS * len(rows), "hardly any step was made with others"
    for row in rows:
        row.joint.check_integrity()
        assert row.joint.work == row.alone.work


def test_a_row_that_fails_leaves_the_others_alone() -> None:
    rows = [Row("hybrid", length) for length in PROMPTS[:3]]
    take(rows, [row.tokens.next(1) for row in rows])
    news = [row.tokens.next(1) for row in rows]
    news[1][1][0, 1, 0, 71] = float("nan")
    before = stored(rows[1].joint)
    outs, count = take(rows, news)
    assert count == 3
    assert [out is None for out in outs] == [False, True, False]
    assert all(torch.equal(*pair) for pair in zip(stored(rows[1].joint), before, strict=True))
    with pytest.raises(NonFiniteError, match=r"^keys and values of layer 0 must be finite"):
        feed(rows[1].joint, *news[1])
    for row in rows:
        row.joint.check_integrity()


def test_an_interrupt_in_the_call_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row("hybrid", length) for length in PROMPTS[:2]]
    before = [stored(row.joint) for row in rows]

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(together.JointRun, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            take(rows, [row.tokens.next(1) for row in rows])
    for row, kept in zip(rows, before, strict=True):
        row.joint.check_integrity()
        assert all(torch.equal(*pair) for pair in zip(stored(row.joint), kept, strict=True))


def test_who_is_looked_at_steps_alone() -> None:
    row = Row("hybrid", 420)
    how: dict[str, Any] = {"scale": 0.12, "softcap": None}
    q, k, v = row.tokens.next(1)
    assert row.joint.joint_step(0, q, (k, v), **how) is not None
    row.joint.look_every(1)
    assert row.joint.joint_step(0, q, (k, v), **how) is None
    row.joint.look_every(0)
    row.joint.more_prompt = True
    assert row.joint.joint_step(0, q, (k, v), **how) is None


@torch.inference_mode()
def test_a_model_s_rows_are_one_call_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"alone": 0, "joint": 0}
    for owner, name in ((native_step.LayerPlan, "alone"), (together.JointRun, "joint")):

        def counted(self: Any, *args: Any, own: Any = owner.run, key: str = name) -> Any:
            calls[key] += 1
            return own(self, *args)

        monkeypatch.setattr(owner, "run", counted)
    model = small_model()
    config = hkv.HybridConfig(method="hybrid", index_build="wait", cold={"top_k": 7})
    with hkv.attach(model, config) as runtime:
        rows = [runtime.cache() for _ in range(3)]
        for number, row in enumerate(rows):
            model(torch.tensor([prompt(601 + number, seed=number)]), **passing(row))
        cache = JoinedCache(rows)
        lengths = [row.get_seq_length() for row in rows]
        for number in range(5):
            if number == 2:  # the prompts have left, and plans were made
                calls.update(alone=0, joint=0)
            ids, where = torch.tensor([[5], [6], [7]]), torch.tensor(cache.positions)
            model(ids, position_ids=where, **passing(cache))
        assert [row.get_seq_length() for row in rows] == [length + 5 for length in lengths]
        assert calls == {"alone": 0, "joint": 3 * model.config.num_hidden_layers}
        for row in rows:
            row.check_integrity()
