"""Time to the first token: arithmetic that can be checked by hand, and rates of this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import hybrid_kv as hkv
from hybrid_kv.planning.plan import ModelFacts, PromptRates, model_facts
from hybrid_kv.planning.rates import CARDS, Rates
from hybrid_kv.planning.traffic import (
    SPARSE_DENSITY,
    first_token_seconds,
    measure_prompt_rates,
    prompt_rates_of_card,
)

GIB = 2**30
SPEEDS = PromptRates(products=1000.0, attention=500.0)
CPU = Rates(device=50.0, dram=50.0, gather=20.0)
BUS = replace(CPU, h2d=25.0, d2h=25.0)


@pytest.fixture(scope="module")
def llama() -> ModelFacts:
    return model_facts("random:llama-3-8b")


def test_products_are_those_of_all_layers_without_table_and_output(llama: ModelFacts) -> None:
    assert llama.products == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)


def test_a_tied_table_is_no_product_and_experts_are_those_that_are_routed_to() -> None:
    assert model_facts("random:llama-3.2-1b").products == 16 * (
        2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192
    )
    gpt = model_facts("random:gpt-oss-20b")
    assert gpt.products / 1e9 == pytest.approx(3.0, rel=0.02)  # 3.6 active with the output


def test_a_prompt_takes_its_products_and_half_of_all_pairs(llama: ModelFacts) -> None:
    taken = first_token_seconds(llama, 8192, SPEEDS, CPU)
    assert taken["products"] == pytest.approx(2 * 8192 * llama.products / 1e12)
    pairs = 8192 * 8193 / 2
    assert taken["attention"] == pytest.approx(32 * 32 * pairs * 2 * 2 * 128 / 500e9)
    assert taken["leaving"] == 0


def test_what_is_not_known_is_not_predicted(llama: ModelFacts) -> None:
    assert first_token_seconds(llama, 8192, None, CPU) == {}
    assert prompt_rates_of_card(CARDS["rtx-4090"], replace(llama, dtype_bytes=4)) is None
    plan = hkv.plan("random:tiny", 500, device="cpu", rates=CPU)
    assert [option.ttft_s for option in plan.options] == [None] * 3


def test_entries_leave_behind_the_next_layer_and_the_last_ones_show(llama: ModelFacts) -> None:
    kv = 8192 * llama.kv_bytes_per_token / 1e9
    hidden = first_token_seconds(llama, 8192, SPEEDS, BUS, cold_tokens=8192)
    assert hidden["leaving"] == pytest.approx(kv / 25 / 32)
    slow = replace(BUS, d2h=0.001)
    shown = first_token_seconds(llama, 8192, SPEEDS, slow, cold_tokens=8192)
    computed = shown["products"] + shown["attention"]
    assert shown["leaving"] == pytest.approx(kv / 0.001 - computed * 31 / 32)
    copied = first_token_seconds(llama, 8192, SPEEDS, CPU, cold_tokens=8192)
    assert copied["leaving"] == pytest.approx(2 * kv / 50)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_this_machine_is_measured_in_the_models_dtype(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    linear = torch.nn.functional.linear

    def noted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(weight.dtype)
        return linear(x, weight)

    monkeypatch.setattr("hybrid_kv.planning.traffic.linear", noted)
    facts = model_facts("random:tiny", dtype=dtype)
    rates = measure_prompt_rates(facts, torch.device("cpu"))
    assert rates is not None
    assert min(rates.products, rates.attention) > 0
    # 16-bit weights are widened where that pays, as a prompt does.
    assert seen
    assert set(seen) <= {getattr(torch, dtype), torch.float32}


def test_packed_weights_are_measured_as_they_lie_and_a_librarys_are_not() -> None:
    cpu = torch.device("cpu")
    facts = model_facts("random:tiny", dtype="bfloat16")
    packed = replace(facts, weights={"Q8_0": 10, "bfloat16": 1})
    assert measure_prompt_rates(packed, cpu) is not None
    assert measure_prompt_rates(replace(facts, weights={"int4": 10}), cpu) is None


def test_a_plan_for_a_card_has_the_seconds_of_each_way(llama: ModelFacts) -> None:
    where = {"card": "rtx-4090", "host_bytes": 64 * GIB, "rates": BUS}
    dense, _, hybrid = hkv.plan("random:llama-3-8b", 131072, **where).options
    assert dense.ttft_s == pytest.approx(sum(dense.first_token.values()))
    assert dense.first_token["leaving"] == 0
    assert hybrid.first_token["leaving"] > 0
    sparse_config = hkv.HybridConfig(prefill="sparse")
    sparse = hkv.plan("random:llama-3-8b", 131072, config=sparse_config, **where).options
    assert sparse[0].first_token == dense.first_token
    share = sparse[2].first_token["sparse attention"] / hybrid.first_token["attention"]
    assert share == pytest.approx(SPARSE_DENSITY + 0.04)
    twice = hkv.plan("random:llama-3-8b", 262144, **where).options[0].first_token
    assert twice["products"] == pytest.approx(2 * dense.first_token["products"])
    assert twice["attention"] == pytest.approx(4 * dense.first_token["attention"], rel=1e-4)
