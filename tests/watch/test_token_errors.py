"""How far a step moves with the better half of what it found, held against a plain formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.ops.native import engine_state
from hybrid_kv.plugins import Placement
from hybrid_kv.runtime import KVCache
from hybrid_kv.transfer import SyncExecutor
from hybrid_kv.transfer.cuda import CudaExecutor
from hybrid_kv.types import Demotion, LayerShape, ModelInfo, PartialAttention, Read, TokenBudget
from hybrid_kv.watch.token_errors import (
    CALIBRATION,
    Calibration,
    HalfWatcher,
    TokenError,
    half_of,
    halves_of,
    spreads_of,
    why_unknown,
)
from tests.kit import held

SHAPE = LayerShape(0, 6, 2, 40)
SCALE = 0.25
SIZES = {"page_size": 4, "sink_tokens": 4, "window_tokens": 8, "index_build": "wait"}
COLD: dict[str, dict[str, Any]] = {
    "nothing estimated": {"estimate": "none"},
    "one Gaussian": {"estimate": "gaussian"},
    "first order": {"estimate": "first_order"},
}
FLAT = {"kind": "flat", "precision": "stored"}


class Seen:
    """Takes of every step its halves, whether the engine gave them, and what was found."""

    def __init__(self) -> None:
        self.halves: list[Tensor] = []
        self.is_told: list[bool] = []
        self.found: list[list[Tensor]] = []
        self.outs: list[Tensor] = []

    def wants(self, layer_idx: int, q: Tensor) -> bool:
        return True

    def add(self, step: Any, part: PartialAttention) -> None:
        row = len(step.layer.rows) - 1
        self.halves.append(half_of(step, part, row))
        retrieved = step.found.get(row)
        self.is_told.append(retrieved is not None and retrieved[1].half is not None)
        parts = [] if retrieved is None else retrieved[1].parts
        self.found.append([one.ids[:, step.new - 1 :: step.new] for one in parts])
        self.outs.append(part.out[row, :, -1])


class Scene:
    """A cache that is watched, and all that its last row ever stored."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, executor: Any = None, **settings: Any
    ) -> None:
        torch.manual_seed(3)
        sizes = {"page_size": 4} if settings["method"] == "full" else SIZES
        self.kv = KVCache(ModelInfo((SHAPE,)), HybridConfig(**{**sizes, **settings}), executor)
        self.seen, self.dtype = Seen(), dtype
        self.k = self.v = torch.zeros(SHAPE.num_kv_heads, 0, SHAPE.head_dim)
        self.q = torch.zeros(0)
        self.softcap: float | None = None

    def feed(self, new: int, rows: int = 1) -> Scene:
        sizes = (SHAPE.num_q_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads)
        q, k, v = (torch.randn(rows, n, new, SHAPE.head_dim).to(self.dtype) for n in sizes)
        self.extents = [] if self.kv.layers[0].store is None else self._extents()
        self.kv.attend(0, q, (k, v), None, scale=SCALE, softcap=self.softcap)
        self.k, self.v = torch.cat([self.k, k[-1]], 1), torch.cat([self.v, v[-1]], 1)
        self.q = q[-1, :, -1].double()
        return self

    def begin(self, prompt: int = 150, rows: int = 1) -> Scene:
        self.feed(prompt, rows).kv.layers.seal_all()
        self.kv.watchers.append(self.seen)
        return self

    def _extents(self) -> list[Any]:
        row = held(self.kv, row=-1)
        return [(one.length, one.moments) for one in row.extents]

    def expected(self, estimate: str = "none") -> Tensor:
        """[Hq] by the plain formula in float64, for what the last step has found."""
        group = SHAPE.group_size
        every = [self._of_head(head, head // group, estimate) for head in range(SHAPE.num_q_heads)]
        return torch.tensor(every, dtype=torch.float64)

    def _of_head(self, head: int, kv_head: int, estimate: str) -> float:
        k, v = self.k[kv_head].double(), self.v[kv_head].double()
        firsts = SIZES["sink_tokens"]
        ids, ends = [], [firsts]
        for (length, _), found in zip(self.extents, self.seen.found[-1], strict=True):
            own = found[kv_head, head % SHAPE.group_size]
            ids += [int(one) + ends[-1] for one in own if one >= 0]
            ends.append(ends[-1] + length)
        logits = SCALE * k @ self.q[head]
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        resident = [*range(firsts), *range(ends[-1], len(k))]
        best = sorted(ids, key=lambda one: -float(logits[one]))
        outs = []
        for read in (best, best[: len(best) // 2]):
            chosen = torch.tensor(resident + read, dtype=torch.long)
            weights, values = [logits[chosen].exp()], [v[chosen]]
            limit = min((float(logits[one]) for one in read), default=math.inf)
            for number, (length, known) in enumerate(self.extents):
                if estimate == "none":
                    break
                own = [one for one in read if ends[number] <= one < ends[number + 1]]
                moments = [t[kv_head].double() for t in known.tensors().values()]
                weight, value = unread(
                    self.q[head], moments, length, k[own], v[own], limit, estimate
                )
                weights.append(torch.tensor([weight], dtype=torch.float64))
                values.append(value[None])
            joined = torch.cat(weights)
            outs.append(joined / joined.sum() @ torch.cat(values))
        return float((outs[0] - outs[1]).norm() / outs[0].norm())


def unread(
    q: Tensor, known: list[Tensor], n: int, k: Tensor, v: Tensor, limit: float, form: str
) -> tuple[float, Tensor]:
    """Weight and mean value of what a query [D] does not read of n entries, as ops/tail.py says.

    Args:
        known: by cluster shares and means of keys and values; covariances of keys, and of keys with
            values.
        k, v: [K, D] that it reads. limit: the lowest logit of all that it reads.
    """
    shares, keys, values, key_key, key_value = known
    left, q = n - len(k), SCALE * q
    logits, w, along = keys @ q, float(q @ key_key @ q), q @ key_value
    m = float(shares @ logits)
    d, wide = math.sqrt(w), w + float(shares @ (logits - m) ** 2)
    rest = (n * (shares @ values) - v.sum(0)) / left
    if form == "first_order":
        lower = float(q @ (n * (shares @ keys) - k.sum(0))) / left - m
        lower = min(max(lower, -3 * math.sqrt(wide)), 3 * math.sqrt(wide))
        return left * math.exp(m + lower), rest + along + (shares * (logits - m)) @ values

    def below(z: float) -> float:
        return 0.5 * math.erfc(-z / math.sqrt(2))

    def hazard(z: float) -> float:
        return math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / below(z) if z < math.inf else 0.0

    weight = number = 0.0
    weighed, plain = torch.zeros_like(rest), torch.zeros_like(rest)
    for share, s, value in zip(shares.tolist(), logits.tolist(), values, strict=True):
        c = (limit - s) / d
        own, unread_of = share * math.exp(s + w / 2) * below(c - d), share * below(c)
        if unread_of == 0:
            continue
        weight, number = weight + own, number + unread_of
        weighed += own * (value + along * (d - hazard(c - d)) / d)
        plain += unread_of * (value - along * hazard(c) / d)
    anchored = math.exp(-wide / 2) * (rest - plain / number)
    return left * min(weight / number, math.exp(limit)), weighed / weight + anchored


def close(got: Tensor, expected: Tensor, at_most: float = 1e-5) -> None:
    assert float((got.flatten().double() - expected.double()).abs().max()) < at_most


@pytest.fixture(params=["1", "0"], ids=["one call", "op by op"])
def switch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a step is one call of the engine, where there is one."""
    monkeypatch.setenv("HYBRID_KV_ONE_CALL", request.param)
    return bool(request.param == "1" and engine_state().isa is not None)


@pytest.mark.parametrize("top_k", [1, 2, 7])
@pytest.mark.parametrize("name", COLD)
def test_half_is_that_of_the_formula(switch: bool, name: str, top_k: int) -> None:
    scene = Scene(method="flat", cold={"top_k": top_k, "index": FLAT, **COLD[name]}).begin()
    for _ in range(6):  # a page leaves meanwhile
        scene.feed(1)
        assert scene.seen.is_told[-1] == switch
        expected = scene.expected(COLD[name]["estimate"])
        assert float(expected.min()) > 1e-3
        close(scene.seen.halves[-1], expected)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_softcap(switch: bool, dtype: torch.dtype, softcap: float | None) -> None:
    cold = {"top_k": 6, "index": FLAT, "estimate": "none"}
    scene = Scene(dtype, method="flat", cold=cold)
    scene.softcap = softcap
    scene.begin().feed(1)
    close(scene.seen.halves[-1], scene.expected(), 1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("name", COLD)
def test_the_better_half_is_chosen_of_several_extents_together(switch: bool, name: str) -> None:
    cold = {"top_k": 7, "index": FLAT, **COLD[name]}
    scene = Scene(method="flat", cold=cold).begin()
    whole = scene.kv
    scene.kv = scene.kv.fork()  # what either adds is its own
    scene.kv.watchers.append(scene.seen)
    for _ in range(9):
        scene.feed(1)
    assert len(held(scene.kv).extents) == 2
    scene.feed(1)
    assert scene.seen.is_told[-1] == switch
    assert all(bool((ids >= 0).any()) for ids in scene.seen.found[-1])
    close(scene.seen.halves[-1], scene.expected(COLD[name]["estimate"]))
    whole.close()


@pytest.mark.parametrize("name", COLD)
def test_the_second_row_and_the_last_of_several_tokens(name: str) -> None:
    cold = {"top_k": 5, "index": FLAT, **COLD[name]}
    scene = Scene(method="flat", cold=cold, dense_extend_tokens=3).begin(rows=2)
    scene.feed(1, rows=2)
    close(scene.seen.halves[-1], scene.expected(COLD[name]["estimate"]))
    scene.feed(3, rows=2)
    assert scene.seen.halves[-1].shape == (SHAPE.num_kv_heads, SHAPE.group_size)
    close(scene.seen.halves[-1], scene.expected(COLD[name]["estimate"]))


@pytest.mark.parametrize("name", COLD)
def test_a_device_that_selects_by_itself(name: str) -> None:
    """Its memory is the host's here."""
    executor = CudaExecutor(SyncExecutor(), lambda _: None, lambda _: None)
    cold = {"top_k": 9, "select": "device", "index": {"kind": "sketch"}, **COLD[name]}
    scene = Scene(method="retrieval_attention", executor=executor, cold=cold).begin(300)
    assert held(scene.kv).extents[0].index.selector is not None
    for _ in range(2):
        scene.feed(1)
        assert not scene.seen.is_told[-1]
        assert bool((scene.seen.found[-1][0] >= 0).sum(-1).eq(9).all())
        close(scene.seen.halves[-1], scene.expected(COLD[name]["estimate"]))


def test_what_is_cut_by_weight_is_halved_as_it_is_read() -> None:
    cold = {"top_k": 9, "max_tokens": 20, "min_share": 0.02, "index": FLAT, "estimate": "none"}
    scene = Scene(method="flat", cold=cold).begin()
    scene.feed(1)
    counts = (scene.seen.found[-1][0] >= 0).sum(-1).flatten()
    assert len(set(counts.tolist())) > 1, "heads attend different numbers"
    close(scene.seen.halves[-1], scene.expected())


def test_of_nothing_found_nothing_moves(switch: bool) -> None:
    cold = {"top_k": 3, "min_share": 0.999, "index": FLAT, "estimate": "gaussian"}
    scene = Scene(method="flat", cold=cold).begin()
    scene.feed(1)
    assert not bool((scene.seen.found[-1][0] >= 0).any())
    close(scene.seen.halves[-1], torch.zeros(SHAPE.num_q_heads), 1e-7)


@pytest.mark.parametrize(
    ("prompt", "settings"),
    [
        (150, {"method": "full"}),
        (150, {"method": "hybrid", "cold": {"top_k": "all"}}),
        (150, {"method": "hybrid", "cold": {"top_k": 400}}),
        (9, {"method": "hybrid", "cold": {"top_k": 2}}),
    ],
    ids=["full", "all", "more than there are", "nothing is cold"],
)
def test_whoever_reads_everything_has_no_error(
    switch: bool, prompt: int, settings: dict[str, Any]
) -> None:
    scene = Scene(**settings).begin(prompt)
    for _ in range(3):
        scene.feed(1)
        assert scene.seen.halves[-1].shape == (SHAPE.num_kv_heads, SHAPE.group_size)
        assert not scene.seen.halves[-1].any()


def test_copies_that_a_method_keeps_are_not_halved() -> None:
    cold = {"top_k": 6, "index": "flat", "estimate": "gaussian"}
    scene = Scene(method="snapkv", demote="offload", budget_tokens=24, cold=cold).begin()
    scene.feed(1)
    assert held(scene.kv).kept is not None
    cold["top_k"] = 3
    fewer = Scene(method="snapkv", demote="offload", budget_tokens=24, cold=cold).begin()
    fewer.feed(1)
    for one, count in ((scene, 6), (fewer, 3)):  # copies take no place among what is found
        assert ((one.seen.found[-1][0] >= 0).sum(-1) == count).all()
    moved = (scene.seen.outs[-1] - fewer.seen.outs[-1]).norm(dim=-1)
    close(scene.seen.halves[-1].flatten(), moved / scene.seen.outs[-1].norm(dim=-1))


def test_the_estimate_of_an_index_is_asked_again() -> None:
    index = {"kind": "query_channels", "num_channels": SHAPE.head_dim}  # which ranks exactly
    outs, halves = [], []
    for top_k in (6, 3):
        cold = {"top_k": top_k, "estimate": "index", "index": index}
        scene = Scene(method="sparq", cold=cold).begin()
        scene.feed(1)
        outs.append(scene.seen.outs[-1])
        halves.append(scene.seen.halves[-1])
    close(halves[0], (outs[0] - outs[1]).norm(dim=-1) / outs[0].norm(dim=-1))


# What is made of it


def test_a_forward_is_the_mean_of_its_layers() -> None:
    watcher, scene = HalfWatcher(), Scene(method="flat", cold={"top_k": 4}).begin()
    scene.kv.watchers.append(watcher)
    assert watcher.take() == []
    scene.feed(1).feed(1)
    assert watcher.take() == pytest.approx([float(torch.stack(scene.seen.halves).mean())])
    assert watcher.take() == []


def test_entropy_and_margin_are_those_of_the_raw_logits() -> None:
    logits = torch.tensor([2.0, -1.0, 1.25, 0.0])
    p = logits.softmax(0)
    expected = [-float((p * p.log()).sum()), 0.75]
    assert spreads_of(logits).tolist() == pytest.approx(expected)
    assert spreads_of(torch.tensor([0.0, -torch.inf, 3.0])).isfinite().all()
    assert spreads_of(logits.bfloat16()).dtype == torch.float32


def test_a_token_s_error_follows_its_signals() -> None:
    by = Calibration(2.0, 5.0, (-1.0, -1.5, 0.5))
    one = TokenError.of(0.1, 3.0, 0.5, by)
    odds = -1.0 - 1.5 * math.log(0.5) + 0.5 * math.log(0.1)
    size = 0.1**2.5 * 3.0**0.75
    assert (one.kl, one.kl_bar) == pytest.approx((2 * size, 5 * size))
    assert TokenError.of(0.1, -1e-9, 0.5, by).kl == 0.0, "an entropy of 0, rounded"
    assert one.flip == pytest.approx(1 / (1 + math.exp(-odds)))
    assert TokenError.of(0.0, 3.0, 0.0, by) == TokenError(0.0, 0.0, 0.0, 0.0, 3.0, 0.0)
    assert TokenError.of(0.1, 3.0, 0.0, by).flip > 0.99


def test_the_shipped_calibration_has_the_signs_that_it_must_have() -> None:
    _, by_margin, by_half = CALIBRATION.flip
    assert 0 < CALIBRATION.kl < CALIBRATION.kl_bar
    assert by_margin < 0 < by_half
    near, far = (TokenError.of(0.05, 2.0, margin) for margin in (0.01, 5.0))
    assert 0 < far.flip < 0.02 < near.flip < 1


OFFLOADS = {"rest": Demotion.OFFLOAD}


@pytest.mark.parametrize(
    ("place", "read", "as_is", "why"),
    [
        ({}, Read(), True, None),
        (OFFLOADS, Read(cold="all"), True, None),
        (OFFLOADS, Read(cold=TokenBudget(3)), True, None),
        ({"rest": Demotion.ABSORB, "offload": True}, Read(cold=TokenBudget(3)), True, None),
        ({}, Read(), False, "another form"),
        ({"rest": Demotion.DROP}, Read(), True, "drops entries"),
        ({"rest": Demotion.ABSORB}, Read(), True, "drops entries"),
        ({}, Read(pages=3), True, "by their bounds"),
        (OFFLOADS, Read(), True, "never reads"),
    ],
)
def test_which_steps_can_tell(place: Any, read: Read, as_is: bool, why: str | None) -> None:
    found = why_unknown(Placement(**place), read, as_is=as_is)
    assert found is None if why is None else why in str(found)


def test_every_token_of_a_step_has_its_half() -> None:
    scene = Scene(method="hybrid", cold={"top_k": 12, "index": FLAT}).begin()
    every: list[Tensor] = []

    class All(Seen):
        def add(self, step: Any, part: PartialAttention) -> None:
            every.append(halves_of(step, part))

    scene.kv.watchers.append(All())
    for new in (1, 5):
        scene.feed(new)
        assert every[-1].shape == (SHAPE.num_kv_heads, SHAPE.group_size, new)
        torch.testing.assert_close(every[-1][..., -1], scene.seen.halves[-1])
        found = every[-1][..., -1].flatten().double()
        torch.testing.assert_close(found, scene.expected("gaussian"), rtol=1e-3, atol=1e-5)
    assert len(every[-1].unique()) == 5 * SHAPE.num_q_heads
