"""What a method keeps is attended beside the tiers, each entry once, whatever the row goes through.

Full attention in float64, and the driver that knows nothing of the runtime, are the oracles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.entries import Entries
from hybrid_kv.errors import MethodError
from hybrid_kv.models.rollback import Checkpoint
from hybrid_kv.plugins import Method
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import LayerShape, ModelInfo
from tests.drive_method import drive, heads
from tests.kit import held, kept_alive
from tests.oracle import causal, softmax_attention, spread
from tests.runtime.keeping import Absorbs, KeepsHalves, KeepsHeaviest
from tests.tolerances import TOLERANCES

SHAPE = LayerShape(0, 6, 2, 72)
INFO = ModelInfo((SHAPE, replace(SHAPE, layer_idx=1)))
CLOSE = TOLERANCES[torch.float32]
SCALE = 0.11
PAGE = 16


def cache(kind: type[Method], *, audit_every: int = 0, **params: Any) -> KVCache:
    """A cache under a method that is registered nowhere."""
    config = HybridConfig(
        method="full", page_size=PAGE, audit_every=audit_every, index_build="wait"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HybridConfig, "build", lambda _: kind(kind.Params(**params)))
        return KVCache(INFO, config)


class Stream:
    """Random tokens that are given to a cache, and full attention over them."""

    def __init__(self, kv: KVCache, total: int = 400, rows: int = 1, seed: int = 0) -> None:
        self.kv, self.at = kv, 0
        drawn = [
            heads(total, num_q_heads=6, num_kv_heads=2, head_dim=72, seed=seed + r)
            for r in range(rows)
        ]
        self.q, self.k, self.v = (torch.stack(same) for same in zip(*drawn, strict=True))

    def feed(self, *counts: int) -> Tensor:
        for count in counts:
            out = self.attend(count)
        self.kv.check_integrity()
        return out

    def attend(self, count: int) -> Tensor:
        new = slice(self.at, self.at + count)
        q, k, v = (t[:, :, new] for t in (self.q, self.k, self.v))
        out = self.kv.attend(0, q, (k, v), None, scale=SCALE).out
        self.at += count
        return out

    def exact(self, count: int = 1) -> Tensor:
        now = slice(0, self.at)
        return softmax_attention(
            self.q[:, :, self.at - count : self.at],
            spread(self.k[:, :, now], 6),
            spread(self.v[:, :, now], 6),
            scale=SCALE,
            visible=causal(count, self.at),
        )[0]

    def assert_exact(self, *counts: int) -> None:
        out = self.feed(*counts)
        torch.testing.assert_close(out.double(), self.exact(counts[-1]), **CLOSE)


FULL = {"budget": 10**6}
OPEN = {
    "full": (KeepsHeaviest, FULL),
    "codec": (KeepsHalves, {}),
    "offload": (KeepsHeaviest, {"offload": True}),
    "offload_and_find_all": (
        KeepsHeaviest,
        {"offload": True, "top_k": 10**6},
    ),
    "offload_and_share": (
        KeepsHeaviest,
        {"offload": True, "top_k": 1, "min_share": 0.0},
    ),
    "no_window": (KeepsHeaviest, {**FULL, "sink_tokens": 0, "window_tokens": 0}),
}


@pytest.fixture(params=OPEN)
def opened(request: pytest.FixtureRequest) -> KVCache:
    kind, params = OPEN[request.param]
    return cache(kind, **params)


@pytest.mark.parametrize("prompt", [1, 37, 173])
def test_where_nothing_is_lost_attention_is_exact(opened: KVCache, prompt: int) -> None:
    stream = Stream(opened)
    stream.assert_exact(prompt)
    for count in (1, 1, 3, *[1] * 20, 5):
        stream.assert_exact(count)


def test_a_long_later_turn_is_exact(opened: KVCache) -> None:
    stream = Stream(opened)
    stream.feed(173, *[1] * 20)
    stream.assert_exact(90)
    stream.assert_exact(1, 1, 1)


def test_forks_go_their_own_ways(opened: KVCache) -> None:
    stream = Stream(opened, rows=2)
    stream.feed(60, 1, 1)
    opened.layers[0].fork([1, 1, 0])
    for name in ("q", "k", "v"):
        rows = getattr(stream, name)[[1, 1, 0]].clone()
        rows[:, :, stream.at :] = torch.randn(rows[:, :, stream.at :].shape)
        setattr(stream, name, rows)
    stream.assert_exact(*[1] * 40)
    opened.layers[0].fork([2, 0])
    for name in ("q", "k", "v"):
        setattr(stream, name, getattr(stream, name)[[2, 0]])
    stream.assert_exact(*[1] * 20)


@pytest.mark.parametrize("count", [1, 5, 60, 150])
def test_cropped_tokens_leave_no_trace(opened: KVCache, count: int) -> None:
    stream = Stream(opened)
    stream.feed(120, *[1] * 40)
    opened.layers[0].crop(count)
    stream.at -= count
    stream.k, stream.v = stream.k.clone(), stream.v.clone()
    stream.k[:, :, stream.at :] = torch.randn(stream.k[:, :, stream.at :].shape)
    opened.check_integrity()
    stream.assert_exact(*[1] * 40)


def test_a_checkpoint_brings_everything_back(opened: KVCache) -> None:
    stream = Stream(opened)
    stream.feed(100, *[1] * 10)
    before = Checkpoint.of(opened.layers)
    # Until one is released, branch and original count references of each other.
    first = torch.cat([stream.attend(1) for _ in range(50)], 2)
    before.restore(opened.layers)
    opened.check_integrity()
    stream.at -= 50
    again = torch.cat([stream.attend(1) for _ in range(50)], 2)
    torch.testing.assert_close(again, first, **CLOSE)
    stream.assert_exact(1)


def test_reset_makes_the_cache_new() -> None:
    kv = cache(KeepsHeaviest, **FULL)
    Stream(kv).feed(100, 1, 1)
    with pytest.MonkeyPatch.context() as patch:
        own = kv.means.method
        patch.setattr(HybridConfig, "build", lambda _: own)
        kv.reset()
    Stream(kv).assert_exact(100, 1, 1)


@pytest.mark.parametrize("settings", [{}, {"offload": True}, {"budget": 3, "window_tokens": 40}])
def test_an_evicting_method_does_as_the_driver_says(settings: dict[str, Any]) -> None:
    prompt, new = 173, 60
    kv = cache(KeepsHeaviest, **settings)
    stream = Stream(kv, prompt + new)
    driven = drive(
        KeepsHeaviest(KeepsHeaviest.Params(**settings)),
        prompt=prompt,
        new=new,
        scale=SCALE,
        page_size=PAGE,
        given=(stream.q[0], stream.k[0], stream.v[0]),
    )
    stream.feed(prompt)
    for step, expected in enumerate(driven.out):
        torch.testing.assert_close(stream.feed(1)[0, :, 0].double(), expected, **CLOSE)
        kept, theirs = held(kv).kept, driven.steps[step]
        assert kept is not None
        assert theirs is not None
        for own, other in zip(kept.split("positions"), theirs.split("positions"), strict=True):
            assert torch.equal(own, other)


def test_what_is_dropped_is_freed_and_counted() -> None:
    kv = cache(KeepsHeaviest, budget=10)
    Stream(kv, 2000).feed(1900, 1)
    row = held(kv)
    assert row.kept is not None
    assert row.kept.lengths == (10, 11)
    gone = 1900 - 16 - 24
    assert (row.dropped, row.lost) == (gone, 2 * gone - 21)
    entry = 2 * 72 * 4 + 8 + 4  # k, v, position, mass
    assert row.kept.nbytes == (21 + 2 * 16) * entry
    assert row.reserved_bytes < 10 * PAGE * 2 * 2 * 72 * 4


def test_the_window_is_exact_to_the_token_at_the_prompt_s_end() -> None:
    kv = cache(KeepsHeaviest, **FULL)
    stream = Stream(kv)
    stream.feed(100, 1)
    row = held(kv)
    assert row.kept is not None
    assert row.kept.positions.max() == 100 - 24 - 1
    assert row.resident == [*range(16), *range(76, 101)]


def test_masses_of_the_prompt_are_exact_however_it_comes() -> None:
    sums = []

    class Watches(Absorbs):
        """Keeps everything and looks at the evidence."""

        from hybrid_kv.types import Needs

        needs = Needs(column_sums=True, last_queries=5)

        def absorb(self, layer_idx: int, row: int, kept: Any, left: Entries, seen: Any) -> Any:
            if seen is not None:
                sums.append((seen.column_sums, seen.mass()))
            return left if kept is None else kept.extended(left)

    whole, pieces = cache(Watches), cache(Watches)
    Stream(whole, rows=2).feed(60, 1)
    pieces.more_prompt = True
    stream = Stream(pieces, rows=2)
    stream.feed(7, 1, 30, 22)
    pieces.more_prompt = False
    stream.feed(1)
    logits = stream.q[:, :, :60] @ spread(stream.k[:, :, :60], 6).transpose(2, 3) * SCALE
    weights = logits.masked_fill(~causal(60, 60), -torch.inf).softmax(-1)
    assert len(sums) == 4
    for row, (columns, last) in enumerate(sums):
        torch.testing.assert_close(columns, weights[row % 2].sum(1), **CLOSE)
        torch.testing.assert_close(last, weights[row % 2, :, -5:].sum(1), **CLOSE)


# Going back -------------------------------------------------------------------------------------


def test_going_back_into_what_is_lost_is_refused_and_changes_nothing() -> None:
    kv = cache(KeepsHeaviest, budget=4)
    stream = Stream(kv)
    stream.feed(120, *[1] * 60)
    before = Checkpoint.of(kv.layers)
    with pytest.raises(MethodError, match=r"must still have its 24 tokens before position 100 to"):
        kv.layers[0].crop(80)
    stream.feed(1)
    before.restore(kv.layers)
    kv.check_integrity()
    kv.layers[0].crop(20)  # still in the window
    stream.at -= 21
    stream.feed(*[1] * 30)
    kv.layers[0].crop(held(kv).length)
    assert held(kv).length == 0
    kv.check_integrity()


# Broken methods ---------------------------------------------------------------------------------


def without(entries: Entries, name: str) -> Entries:
    """Less a column."""
    return replace(entries, columns={n: c for n, c in entries.columns.items() if n != name})


BROKEN: dict[str, tuple[Callable[[Any, Entries, int], Any], str]] = {
    "no entries": (lambda kept, left, n: left.k, "must return Entries or None, got Tensor"),
    "dtype": (
        lambda kept, left, n: left.copied().with_columns(k=left.copied().k.half()),
        r"must return keys .* torch.float32 on cpu as the cache's, got .* torch.float16",
    ),
    "width": (
        lambda kept, left, n: left.copied().with_columns(v=left.copied().v[:, :71]),
        r"must return values \[\d+, 72\] torch.float32 on cpu as the cache's, got \[\d+, 71\]",
    ),
    "device": (
        lambda kept, left, n: left.copied().with_columns(
            score=torch.zeros(len(left.copied().k), device="meta")
        ),
        r"must return column 'score' with \d+ rows on cpu as the positions, got \d+ on meta",
    ),
    "heads": (
        lambda kept, left, n: replace(left, starts=left.starts[:1], lengths=left.lengths[:1]),
        "must return entries of 2 KV heads, got 1",
    ),
    "no keys": (
        lambda kept, left, n: without(left, "k"),
        "must return entries with a column of 'k', or of a class that overrides read",
    ),
    "no positions": (
        lambda kept, left, n: without(left, "positions"),
        "must return entries with a column of positions in torch.int64, got none",
    ),
    "outside": (
        lambda kept, left, n: replace(left, starts=(10**6, 0)),
        "must return heads inside of",
    ),
    "twice": (
        lambda kept, left, n: (left if kept is None else kept.extended(left)).extended(left),
        r"must not return more than the \d+ entries that it was given of KV head 0, got \d+",
    ),
    "not finite": (
        lambda kept, left, n: left.copied().with_columns(v=left.copied().v / 0),
        "must be finite, got NaN or infinity",
    ),
    "hoards": (
        lambda kept, left, n: left.copied().with_state(all=torch.zeros(10**6)),
        r"must hold at most [\d,]+ bytes for \d+ tokens, got 4,",
    ),
    "raises": (lambda kept, left, n: 1 / 0, "must return entries, got ZeroDivisionError"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("late", [False, True], ids=["prompt", "answer"])
def test_a_broken_method_is_refused_and_the_cache_stays(name: str, late: bool) -> None:
    answer, text = BROKEN[name]

    def answers(kept: Any, left: Entries, calls: int) -> Any:
        good = left if kept is None else kept.extended(left)
        return answer(kept, left, calls) if calls == (2 if late else 1) else good

    kv = cache(Absorbs)
    kv.means.method.answer = answers  # type: ignore[attr-defined]
    stream = Stream(kv)
    stream.feed(100)
    who = "(Absorbs.absorb of layer 0, row 0|what the method keeps of row 0)"
    with pytest.raises(MethodError, match=f"^{who} .*{text}"):
        stream.feed(*[1] * 40)
    if late:  # the token that was stored is taken back
        kv.layers[0].crop(held(kv).length - stream.at)
    kv.check_integrity()
    stream.assert_exact(*[1] * 40)  # it answers well from now on


def test_entries_for_another_number_of_rows_are_refused() -> None:
    kv = cache(KeepsHeaviest)
    stream = Stream(kv, rows=2)
    stream.feed(100, 1)
    kv.means.method.after = None  # type: ignore[method-assign, assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(kv.means.method, "after")
        patch.setattr(KeepsHeaviest, "after", lambda *_: [None])
        with pytest.raises(
            MethodError, match=r"after of layer 0 must return entries of 2 rows, or"
        ):
            stream.feed(1)


def test_a_borrowed_answer_is_copied() -> None:
    kv = cache(Absorbs)
    kv.means.method.answer = lambda kept, left, n: left if kept is None else kept.extended(left)  # type: ignore[attr-defined]
    stream = Stream(kv)
    stream.feed(100)
    pages = kept_alive(kv)["pages 0"]
    stream.assert_exact(1)
    kept = held(kv).kept
    assert kept is not None
    assert not kept.is_borrowed
    assert pages() is None, "what was borrowed from is let go"


# Audits -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::hybrid_kv.errors.RecallWarning")
def test_an_audit_counts_what_was_dropped_and_changes_nothing() -> None:
    outs = []
    for audit_every in (0, 1):
        kv = cache(KeepsHeaviest, budget=4, audit_every=audit_every)
        stream = Stream(kv)
        outs.append([stream.feed(173), *(stream.feed(1) for _ in range(40)), stream.feed(90)])
        row = held(kv)
        assert row.lost > 0
        if audit_every:
            assert kv.auditor is not None
            kv.auditor.settle()
            missed = kv.auditor.audit.missed_mass(0)
            assert missed is not None
            assert missed.mean > 0.3
            assert len(row.cold) == row.gone
    for plain, audited in zip(*outs, strict=True):
        assert torch.equal(plain, audited)


def test_an_audit_finds_nothing_missing_at_a_full_budget() -> None:
    kv = cache(KeepsHeaviest, audit_every=1, **FULL)
    Stream(kv).feed(173, *[1] * 40)
    assert kv.auditor is not None
    kv.auditor.settle()
    missed = kv.auditor.audit.missed_mass(0)
    assert missed is not None
    assert missed.mean < 1e-5
