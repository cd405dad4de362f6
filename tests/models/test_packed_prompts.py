"""Products of packed weights with many tokens: by the engine, or in float32 where faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hybrid_kv as hkv
from hybrid_kv.errors import ShapeError
from hybrid_kv.models import packed_linear
from hybrid_kv.models.packed_linear import PackedLinear, packed, product, wide_product
from hybrid_kv.models.prompt_layers import MIN_TOKENS, WideningTrial
from hybrid_kv.ops.native.linear import PACKED_KINDS, PackedWeight
from tests.models.test_decoder_step import ids, made
from tests.models.test_widening import Clock
from tests.ops.native.engines import needs_engine
from tests.ops.native.packed_data import dequantised, random_weight

pytestmark = needs_engine
WIDE, OWN = WideningTrial(1.0, 2.0), WideningTrial(2.0, 1.0)


def trials_end(monkeypatch: pytest.MonkeyPatch, end: WideningTrial) -> list[tuple[Any, ...]]:
    """All trials end like this; kind, tokens and exactness of those that are made."""
    made: list[tuple[Any, ...]] = []

    def measure(kind: str, tokens: int, clock: object, *, exact: bool) -> WideningTrial:
        made.append((kind, tokens, exact))
        return end

    monkeypatch.setattr(packed_linear, "_trials", {})
    monkeypatch.setattr(packed_linear, "measure", measure)
    return made


@pytest.mark.parametrize("kind", PACKED_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_in_float32_are_those_of_unpacked_weights(
    kind: str, dtype: torch.dtype, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are no multiple of a piece and lie apart, and inputs that are not contiguous."""
    monkeypatch.setattr(packed_linear, "_PIECE", 5 * 512)
    weight, pieces, own = random_weight(kind, 13, 512, gap=3), list[int](), packed_linear.unpacked
    monkeypatch.setattr(
        packed_linear, "unpacked", lambda rows, kind: pieces.append(len(rows)) or own(rows, kind)
    )
    x = torch.randn(3, 512, 23).mT.to(dtype)
    bias = torch.randn(13).to(dtype) if has_bias else None
    out = wide_product(x, weight, bias)
    assert out.dtype == dtype
    assert pieces == [5, 5, 3]
    expected = x.double() @ dequantised(weight).T
    expected += 0 if bias is None else bias.double()
    error = (out.double() - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]


def test_a_trial_decides_for_many_tokens_and_nobody_asks_for_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = PackedWeight("Q8_0", packed(torch.randn(7, 96), "Q8_0"), 96)
    many, few = torch.randn(MIN_TOKENS, 96), torch.randn(MIN_TOKENS - 1, 96)
    own = trials_end(monkeypatch, OWN)
    by_engine = product(many, weight)
    assert own == [("Q8_0", MIN_TOKENS, False)]
    wide = trials_end(monkeypatch, WIDE)
    in_float32 = product(many, weight)
    assert torch.equal(in_float32, wide_product(many, weight))
    assert not torch.equal(in_float32, by_engine)
    torch.testing.assert_close(in_float32, by_engine, atol=0.2, rtol=0.02)
    assert wide == [("Q8_0", MIN_TOKENS, False)]
    assert not torch.equal(product(few, weight), wide_product(few, weight))
    assert wide == [("Q8_0", MIN_TOKENS, False)]


def test_under_autocast_products_are_as_exact_as_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    trials_end(monkeypatch, WIDE)
    weight = random_weight("Q8_0", 7, 96)
    x = torch.randn(MIN_TOKENS, 96)
    with torch.autocast("cpu", torch.bfloat16):
        found = product(x, weight, exact=True)
    expected = x.double() @ dequantised(weight).T
    assert (found - expected).norm() / expected.norm() < 2e-4


def test_a_process_tries_once_for_a_kind_a_size_and_an_exactness(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = trials_end(monkeypatch, OWN)
    threads = [1]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    for kind, tokens, exact in (
        *(("Q4_K", 70, False), ("Q4_K", 100, False), ("Q4_K", 5000, False), ("Q4_K", 70, True)),
        *(("Q8_0", 70, False), ("Q8_0", 70, False)),
    ):
        packed_linear.trial(kind, tokens, exact=exact)
    threads[0] = 2
    packed_linear.trial("Q8_0", 70, exact=False)
    assert tried == [
        *(("Q4_K", 64, False), ("Q4_K", 1024, False), ("Q4_K", 64, True)),
        *(("Q8_0", 64, False), ("Q8_0", 64, False)),
    ]


@pytest.mark.parametrize(("own", "wide", "pays"), [(9e-2, 2e-2, True), (2e-2, 9e-2, False)])
@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_a_trial_times_both_ways(
    kind: str, own: float, wide: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, ways = Clock(own, wide), list[tuple[str, Any]]()

    def noted(x: Tensor, weight: PackedWeight, **settings: Any) -> Tensor:
        ways.append((weight.kind, settings.get("exact")))
        return x

    monkeypatch.setattr(packed_linear, "packed_linear", noted)
    monkeypatch.setattr(packed_linear, "wide_product", noted)
    assert packed_linear.measure(kind, MIN_TOKENS, clock, exact=True).pays is pays
    assert clock.is_done
    assert ways == [(kind, True), (kind, None)] * 2, "the engine's comes first"


def test_without_the_package_that_unpacks_the_engine_multiplies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = trials_end(monkeypatch, WIDE)
    monkeypatch.setattr(packed_linear, "find_spec", lambda name: None)
    weight = PackedWeight("Q4_1", packed(torch.randn(7, 96), "Q4_1"), 96)
    x = torch.randn(MIN_TOKENS, 96)
    assert not torch.equal(product(x, weight), wide_product(x, weight))
    assert tried == []
    assert packed_linear.trial("Q8_0", MIN_TOKENS, exact=False).pays  # which we unpack


def test_inputs_of_another_width_are_refused_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    trials_end(monkeypatch, WIDE)
    weight = PackedWeight("Q8_0", packed(torch.randn(7, 96), "Q8_0"), 96)
    with pytest.raises(ShapeError, match=r"x must be \[\.\.\., 96\], got \[96, 64\]"):
        product(torch.randn(96, 64), weight)
    with pytest.raises(ShapeError, match=r"bias must be \[7\], got \[3\]"):
        product(torch.randn(MIN_TOKENS, 96), weight, torch.randn(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", ["auto", 64])
def test_a_prompt_and_its_answer_are_those_of_the_engine(
    dtype: torch.dtype, chunk: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In exact products, where both ways round hardly anything; and with biases."""
    settings = {"method": "hybrid", "page_size": 4, "sink_tokens": 4, "window_tokens": 8}
    config = hkv.HybridConfig(**settings, cold={"top_k": "all"}, prefill_chunk_tokens=chunk)
    calls: list[list[int]] = []
    wide = packed_linear.wide_product

    def noted(x: Tensor, *args: Any) -> Tensor:
        calls.append(list(x.shape))
        return wide(x, *args)

    monkeypatch.setattr(packed_linear, "wide_product", noted)
    found = []
    for end in (OWN, WIDE):
        trials_end(monkeypatch, end)
        model = made("llama").to(dtype)
        with torch.inference_mode(), hkv.attach(model, config) as runtime:
            cache = runtime.cache()
            prompt = model(ids(1, 150), past_key_values=cache).logits
            step = model(ids(1, 1), past_key_values=cache).logits
        found.append((prompt, step))
        assert bool(calls) == (end is WIDE)
    # Seven matrices in each of three layers; of a last chunk of 22 tokens nobody asks.
    assert len(calls) == 3 * 7 * (1 if chunk == "auto" else 2)
    near: Any = (
        {"atol": 2e-3, "rtol": 1e-3} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.05}
    )
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, **near)


def test_inputs_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    trials_end(monkeypatch, WIDE)
    order, weight = torch.randperm(96), torch.randn(7, 96)
    module = PackedLinear("Q8_0", packed(weight, "Q8_0"), 96, columns_in=order)
    x = torch.randn(2, MIN_TOKENS, 96)
    expected = x[..., order] @ module.unpacked().T
    torch.testing.assert_close(module(x), expected, atol=1e-4, rtol=1e-4)
