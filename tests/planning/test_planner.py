"""The planner's arithmetic, on sizes that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hybrid_kv.config import HybridConfig
from hybrid_kv.planning.plan import Machine, ModelFacts, Option
from hybrid_kv.planning.planner import AIR_BYTES, learning_bytes, make_plan
from hybrid_kv.planning.rates import CARDS, Rates, rates_of_card
from hybrid_kv.planning.traffic import codes_bytes, select_bytes
from hybrid_kv.types import LayerShape

GIB = 2**30
LLAMA_8B = ModelFacts(
    name="llama-3-8b",
    weight_bytes=16_060_522_496,
    read_bytes=15_009_849_344,
    layers=tuple(LayerShape(idx, 32, 8, 128) for idx in range(32)),
    window_bytes=0,
    hidden_size=4096,
    intermediate_size=14336,
)
HOST = Rates(device=60, dram=60, gather=30)
CARD = CARDS["rtx-4090"]
DESKTOP = Machine("rtx-4090", CARD.memory_bytes, 64 * GIB, rates_of_card(CARD, HOST))
CONTEXT = 600 * 2**20
HOST_FINDS = {"select": "host"}


def option_of(tokens: int, mode: str, machine: Machine = DESKTOP, **config: object) -> Option:
    plan = make_plan(LLAMA_8B, machine, tokens, HybridConfig(**config))
    return next(option for option in plan.options if option.mode == mode)


def test_kv_of_an_8b_model_is_128_kib_a_token() -> None:
    assert LLAMA_8B.kv_bytes_per_token == 128 * 1024


@pytest.mark.parametrize(
    ("tokens", "mode"), [(16 << 10, "dense"), (64 << 10, "dense_8bit"), (128 << 10, "hybrid")]
)
def test_what_fits_exactly_is_preferred(tokens: int, mode: str) -> None:
    plan = make_plan(LLAMA_8B, DESKTOP, tokens, HybridConfig())
    assert plan.recommended is not None
    assert plan.recommended.mode == mode
    assert mode.partition("_")[0] in plan.advice


def test_advice_says_why_nothing_fits() -> None:
    plan = make_plan(LLAMA_8B, replace(DESKTOP, host_bytes=4 * GIB), 1 << 20, HybridConfig())
    assert plan.recommended is None
    assert plan.advice.startswith("does not fit, because dense: 1")
    assert "of host memory are needed, 4.0 are free" in plan.advice


def test_dense_reads_all_weights_and_all_kv_for_a_token() -> None:
    ms = option_of(128 << 10, "dense").ms
    assert ms["weights"] == pytest.approx(1e3 * 15_009_849_344 / (0.9 * 1008e9))
    assert ms["resident_attention"] == pytest.approx(1e3 * 16 * GIB / (0.9 * 1008e9))


def test_every_token_is_in_one_tier() -> None:
    plain = option_of(128 << 10, "hybrid", method="retrieval_attention")
    assert plain.device_bytes["kv"] + plain.host_bytes["kv"] == 16 * GIB


def test_free_device_memory_becomes_spare_pages_with_digests() -> None:
    option = option_of(128 << 10, "hybrid", cold=HOST_FINDS)
    spare, token = option.settings["spare_tokens"], LLAMA_8B.kv_bytes_per_token
    assert isinstance(spare, int)
    assert spare > 4_000
    assert spare % 16 == 0
    assert option.device_bytes["kv"] == 640 * token + spare * token * 17 // 16
    assert option.host_bytes["kv"] == 16 * GIB - (640 + spare) * token
    one_page_more = sum(option.device_bytes.values()) + 17 * token
    assert one_page_more > CARD.memory_bytes - CONTEXT - GIB
    assert HybridConfig(**option.settings).spare_tokens == spare


def test_a_plan_for_a_24_gb_card_leaves_a_gib_of_air() -> None:
    """It filled 98% of 24.0 GiB; a card reports 23.6, and a prompt's search was left out."""
    option = option_of(128 << 10, "hybrid")
    assert CARD.memory_bytes <= 23.65 * GIB
    assert AIR_BYTES == GIB
    assert option.fits
    assert sum(option.device_bytes.values()) + CONTEXT + GIB <= CARD.memory_bytes


def test_what_a_prompt_s_search_takes_is_counted_on_both_sides() -> None:
    tokens = 128 << 10
    own = {"method": "retrieval_attention", "cold": {"index": "auto", **HOST_FINDS}}
    option = option_of(tokens, "hybrid", **own)
    scanned = option_of(tokens, "hybrid", method="flat")
    learning = learning_bytes(LLAMA_8B.layers[0], HybridConfig().build().needs, tokens, 2)
    more = option.device_bytes["prefill"] - scanned.device_bytes["prefill"]
    assert learning.collecting <= more <= learning.collecting + learning.sealing
    assert option.host_bytes["builds"] == 32 * learning.kept
    tight = replace(DESKTOP, host_bytes=int(25.8 * GIB))
    fewer = option_of(tokens, "hybrid", tight, **own)
    assert fewer.fits, "layers wait for the indexes of those before them"
    assert sum(fewer.host_bytes.values()) == tight.host_bytes
    assert option.host_bytes["staging"] == learning.kept
    assert option.host_bytes["room"] == (tokens - 640) // 16 * LLAMA_8B.kv_bytes_per_token
    assert scanned.host_bytes.keys() == {"kv", "index", "room"}


def test_what_a_short_chunk_learns_and_a_rotary_table_take_is_counted() -> None:
    tokens, chunk = 128 << 10, {"prefill_chunk_tokens": 256}
    learned, scanned = (
        option_of(tokens, "hybrid", method=name, cold=HOST_FINDS, **chunk).device_bytes["prefill"]
        for name in ("retrieval_attention", "flat")
    )
    needs = HybridConfig(method="retrieval_attention").build().needs
    learning = learning_bytes(LLAMA_8B.layers[0], needs, tokens, 2)
    mlp = 256 * int(2 * (3 * 14336 + 3.25 * 4096))
    making = tokens * 15 * 128  # while its tables are made, once
    assert learning.sealing > making > mlp
    assert learned - scanned == learning.collecting + learning.sealing - making
    held = 32 * tokens + tokens * 2 * (4096 + 2 * 128) + 2 * tokens * 4096
    assert scanned == held + making


def test_a_cpu_searches_no_nearest_keys_ahead() -> None:
    tokens = 128 << 10
    machine = Machine("cpu", None, 64 * GIB, HOST)
    option = option_of(tokens, "hybrid", machine, method="retrieval_attention")
    needs = HybridConfig(method="retrieval_attention").build().needs
    assert needs.nearest_keys
    needs = replace(needs, nearest_keys=0)
    learning = learning_bytes(LLAMA_8B.layers[0], needs, tokens, 2)
    assert option.host_bytes["builds"] == 32 * learning.kept


def test_states_of_long_prompts_wait_on_the_host() -> None:
    machine = replace(DESKTOP, host_bytes=256 * GIB)
    short = option_of(128 << 10, "hybrid", machine)
    assert "prefill" not in short.host_bytes
    for tokens in (512 << 10, 1 << 20):
        option = option_of(tokens, "hybrid", machine)
        assert option.fits, option.why
        # Hidden states and two rotary tables; the device holds one layer's KV.
        assert option.host_bytes["prefill"] == tokens * 2 * (4096 + 2 * 128)
        assert 0 < option.device_bytes["prefill"] - tokens * 4096 < 0.7 * GIB
        held = option_of(tokens, "hybrid", machine, prefill_states="device")
        assert not held.fits
        more = held.device_bytes["prefill"] - option.device_bytes["prefill"]
        assert more >= tokens * (2 * 4096 + 4096)


def test_spare_tokens_that_were_asked_for_are_kept() -> None:
    option = option_of(128 << 10, "hybrid", spare_tokens=1024, cold=HOST_FINDS)
    assert option.settings == {}
    assert option.host_bytes["kv"] == ((128 << 10) - 1024 - 640) * LLAMA_8B.kv_bytes_per_token


def test_spare_tokens_are_no_more_than_there_are() -> None:
    token = LLAMA_8B.kv_bytes_per_token
    asked = option_of(1000, "hybrid", spare_tokens=1024, cold=HOST_FINDS)
    assert (asked.cold_tokens, asked.host_bytes["kv"]) == (0, 0)
    assert asked.device_bytes["kv"] == 1000 * token + 360 * token // 16
    filled = option_of(1000, "hybrid", cold=HOST_FINDS)
    assert filled.settings == {"spare_tokens": 352}, "whole pages"
    assert (filled.cold_tokens, filled.host_bytes["kv"]) == (8, 8 * token)


def test_a_token_reads_its_pages_by_digests_and_what_heads_find() -> None:
    """By hand: 32 layers of 8 KV heads, 4 query heads each, 128 channels in 16 bit."""
    token, rates = LLAMA_8B.kv_bytes_per_token, DESKTOP.rates
    for tokens in (128 << 10, 6000):
        cold = tokens - 640 - 4096
        for budget, read in ((32, 512), (1000, 4096), ("all", 4096)):
            settings = {"spare_tokens": 4096, "page_budget": budget}
            ms = option_of(tokens, "hybrid", cold={**HOST_FINDS, "top_k": 400}, **settings).ms
            assert ms["select"] == pytest.approx(1e-6 * 256 * token / rates.device)
            assert ms["resident_attention"] == pytest.approx(
                1e-6 * (640 + read) * token / rates.device
            )
            found = min(4 * 400, cold)
            assert ms["cold_attention"] == pytest.approx(1e-6 * found * token / rates.gather)
            assert ms["transfer"] == pytest.approx(32 * 0.08)
    kept = option_of(128 << 10, "hybrid", method="snapkv")
    assert kept.ms["select"] == 0, "what is kept has no digests"
    assert kept.ms["resident_attention"] == pytest.approx(1e-6 * 1024 * token / rates.device)


def test_a_short_context_has_nothing_to_search() -> None:
    option = option_of(512, "hybrid")
    assert option.host_bytes == {"kv": 0, "index": 0}
    assert option.ms["search"] == option.ms["cold_attention"] == option.ms["transfer"] == 0


def test_a_search_never_costs_more_than_the_scan() -> None:
    slow_gather = replace(DESKTOP, rates=replace(DESKTOP.rates, gather=0.5))
    scan = 1e3 * 32 * 8 * 129 * (32768 - 640) / 60e9
    found = option_of(32 << 10, "hybrid", slow_gather, method="retrieval_attention")
    assert found.ms["search"] == pytest.approx(scan)
    flat = option_of(32 << 10, "hybrid", slow_gather, method="flat")
    assert flat.ms["search"] == pytest.approx(2 * scan)


def search_ms(kind: str, tokens: int, machine: Machine = DESKTOP) -> float:
    cold = {"index": {"kind": kind}, **HOST_FINDS}
    return option_of(tokens, "hybrid", machine, method="retrieval_attention", cold=cold).ms[
        "search"
    ]


def test_a_sketch_reads_codes_in_order_and_candidates_anywhere() -> None:
    rates, cold = DESKTOP.rates, (128 << 10) - 640
    later = 4096 // 2  # without codes on average
    coded, ranked = 32 * 8 * ((cold - later) * 32 + later * 129), 32 * 8 * 200 * 4 * 256
    seconds = coded / rates.dram + ranked / rates.gather
    assert search_ms("sketch", 128 << 10) == pytest.approx(1e-6 * seconds)


@pytest.mark.parametrize("tokens", [740, 4 << 10, 128 << 10])
def test_a_graph_reads_rows_and_their_lists_anywhere(tokens: int) -> None:
    machine = replace(DESKTOP, rates=replace(DESKTOP.rates, gather=5000.0))
    cold = tokens - 640
    rows = min(cold, 9000 * (cold / 2**17) ** 0.6)
    expected = 1e-6 * 32 * 8 * rows * 129 * 1.5 / 5000
    assert search_ms("graph", tokens, machine) == pytest.approx(expected)


@pytest.mark.parametrize("gather", [0.5, 10, 100])
@pytest.mark.parametrize("tokens", [4 << 10, 128 << 10, 1 << 20])
def test_auto_is_the_best_of_sketch_graph_and_scan(tokens: int, gather: float) -> None:
    machine = replace(DESKTOP, rates=replace(DESKTOP.rates, gather=gather))
    kinds = [search_ms(kind, tokens, machine) for kind in ("sketch", "graph")]
    assert search_ms("auto", tokens, machine) == min(kinds)


def test_one_composed_method_is_planned_as_itself() -> None:
    part = {"method": "hybrid", "window_tokens": 4096, "cold": HOST_FINDS}
    whole = option_of(128 << 10, "hybrid", cold=HOST_FINDS, window_tokens=4096)
    for config in ({"layers": {"rest": part}}, {"layers": {"0-31": part}}):
        assert option_of(128 << 10, "hybrid", method="by_layer", **config) == whole
    assert whole.ms["search"] > 0


def test_no_times_are_guessed_where_layers_have_different_tiers() -> None:
    layers = {"0-1": "full", "rest": "hybrid"}
    assert option_of(128 << 10, "hybrid", method="by_layer", layers=layers).ms == {}


def test_what_is_not_modelled_is_not_guessed() -> None:
    option = option_of(128 << 10, "hybrid", method="ivf")
    assert option.ms == {}
    assert option.tpot_ms is None


def test_on_the_cpu_all_bytes_are_in_host_memory() -> None:
    machine = Machine("cpu", None, 64 * GIB, HOST)
    option = option_of(128 << 10, "hybrid", machine)
    assert option.device_bytes == {}
    assert sum(option.host_bytes.values()) > 16 * GIB + LLAMA_8B.weight_bytes
    assert option.settings == {}
    assert option.ms["transfer"] == 0


@pytest.mark.parametrize("mode", ["dense", "dense_8bit", "hybrid"])
def test_the_longest_context_fits_and_the_next_does_not(mode: str) -> None:
    longest = option_of(128 << 10, mode).max_context_tokens
    assert option_of(longest, mode).fits
    assert not option_of(longest + 1024, mode).fits


def test_a_context_that_fits_is_no_longer_than_the_longest() -> None:
    longest = option_of(128 << 10, "dense").max_context_tokens
    between = option_of(longest + 1, "dense")
    assert between.fits
    assert between.max_context_tokens == longest + 1


def test_layers_that_differ_count_by_their_own_bytes() -> None:
    wide, narrow = LayerShape(0, 32, 8, 128), LayerShape(1, 8, 2, 128)
    facts = replace(LLAMA_8B, layers=(wide, narrow))
    layers = {"0": "full", "1": {"method": "retrieval_attention", "cold": HOST_FINDS}}
    config = HybridConfig(method="by_layer", layers=layers)
    option = make_plan(facts, DESKTOP, 1001, config).options[2]
    per_token = facts.kv_bytes_per_token
    for held, least in ((option.device_bytes, 1001 * 4096), (option.host_bytes, 1001 * 1024)):
        assert least <= held["kv"] < least + per_token
    searching = HybridConfig(cold=HOST_FINDS, spare_tokens=16)
    one = make_plan(facts, DESKTOP, 64 << 10, searching).options[2]
    learning = learning_bytes(wide, HybridConfig().build().needs, 64 << 10, 2)
    assert one.host_bytes["staging"] == learning.kept, "of the widest"
    listed = (64 << 10) - 640 + ((64 << 10) - 640) // 16 + 4096
    device = make_plan(facts, DESKTOP, 64 << 10, HybridConfig()).options[2].device_bytes
    assert device["search"] >= 4 * 8 * 5 * listed


def test_states_of_a_fixed_size_lie_on_the_device_and_are_read_and_written() -> None:
    facts = replace(LLAMA_8B, fixed_bytes=GIB, other_layers=3)
    plain, more = (make_plan(one, DESKTOP, 32 << 10, HybridConfig()) for one in (LLAMA_8B, facts))
    for without, option in zip(plain.options, more.options, strict=True):
        assert option.device_bytes["states"] == GIB
        assert without.device_bytes["states"] == without.ms["states"] == 0
        assert option.ms["states"] == pytest.approx(1e3 * 2 * GIB / (0.9 * 1008e9))
        assert option.max_context_tokens <= without.max_context_tokens
    assert more.options[0].max_context_tokens < plain.options[0].max_context_tokens
    filled = make_plan(facts, DESKTOP, 128 << 10, HybridConfig(cold=HOST_FINDS)).options[2]
    assert filled.settings["spare_tokens"]
    assert filled.fits, "what is free is what the states leave"


def test_windows_of_other_layers_count() -> None:
    windows = replace(LLAMA_8B, window_bytes=GIB)
    plain = make_plan(LLAMA_8B, DESKTOP, 8192, HybridConfig()).options[0]
    wider = make_plan(windows, DESKTOP, 8192, HybridConfig()).options[0]
    assert wider.device_bytes["kv"] - plain.device_bytes["kv"] == GIB


def test_keys_of_other_layers_count_beside_the_methods_own() -> None:
    tokens, rate = 32 << 10, DESKTOP.rates.device * 1e6
    others = replace(LLAMA_8B, window_bytes=2**28, untiered_kv_bytes=1000)
    more = 2**28 + 1000 * tokens
    config = HybridConfig(spare_tokens=1024, cold=HOST_FINDS)
    plain, wider = (
        make_plan(one, DESKTOP, tokens, config).options[2] for one in (LLAMA_8B, others)
    )
    assert wider.device_bytes["kv"] - plain.device_bytes["kv"] == more
    for name in plain.ms.keys() - {"resident_attention"}:
        assert wider.ms[name] == plain.ms[name]
    read = wider.ms["resident_attention"] - plain.ms["resident_attention"]
    assert read == pytest.approx(more / rate)


def test_codes_that_fit_on_the_device_are_counted_and_the_host_builds_nothing() -> None:
    tokens, heads = 128 << 10, 32 * 8
    option = option_of(tokens, "hybrid")
    cold = tokens - 640
    maps, later = 4 * 128 * (2 * 128 + 2), 4096 * 128 * 2
    assert option.device_bytes["codes"] == heads * ((cold + cold // 16) * 64 + later + maps)
    # For one layer: rows and scores of all keys, 4 query heads for each KV head, and of the sample.
    listed = cold + cold // 16 + 4096
    assert 4 * 8 * (5 * listed) <= option.device_bytes["search"] <= 4 * 8 * (5 * listed + 4 * 16384)
    assert option.select == "the device selects: codes of 64 B a key fit"
    assert option.settings == {"select": "device"}
    HybridConfig.from_settings(option.settings)
    assert option.host_bytes.keys() == {"kv", "index", "room"}
    assert option.host_bytes["index"] == 0
    rates = DESKTOP.rates
    assert rates.h2d is not None
    coded, ranked = heads * cold * 64 * 9 / 8, heads * 1.25 * 166.4 * 2 * 256
    expected = 1e-6 * (coded / rates.device + ranked / rates.h2d)
    assert option.ms["search"] == pytest.approx(expected)
    assert option.ms["transfer"] == 0


@pytest.mark.parametrize("size", [48, 32, 24, 16])
def test_codes_are_as_large_as_fit(size: int) -> None:
    tokens = 128 << 10
    whole = option_of(tokens, "hybrid").device_bytes
    less = 32 * 8 * (tokens - 640) * 17 // 16 * (64 - size)
    machine = replace(DESKTOP, device_bytes=sum(whole.values()) - less + CONTEXT + GIB)
    option = option_of(tokens, "hybrid", machine)
    assert f"codes of {size} B" in option.select
    assert option.fits
    tight = replace(machine, device_bytes=(machine.device_bytes or 0) - 1)
    assert f"codes of {size} B a key fit" not in option_of(tokens, "hybrid", tight).select


@pytest.mark.parametrize("spare", [8192, 12_000])
def test_spare_tokens_that_were_asked_for_come_before_codes(spare: int) -> None:
    """Regression: codes filled the device, and the plan said that it does not fit."""
    tokens, machine = 200 << 10, replace(DESKTOP, host_bytes=128 * GIB)
    assert "codes of 48 B" in option_of(tokens, "hybrid", machine).select
    option = option_of(tokens, "hybrid", machine, spare_tokens=spare)
    assert option.fits, option.why
    size, wider = (32, 48) if spare == 8192 else (24, 32)
    assert f"codes of {size} B a key" in option.select
    cold = tokens - 640 - spare
    more = 32 * 8 * (cold + cold // 16) * (wider - size)
    assert sum(option.device_bytes.values()) + more > CARD.memory_bytes - CONTEXT - GIB


def test_codes_leave_room_for_any_number_of_spare_tokens() -> None:
    machine = replace(DESKTOP, host_bytes=128 * GIB)
    for spare in range(1024, 12 << 10, 512):  # a step takes little more than its digests
        option = option_of(200 << 10, "hybrid", machine, spare_tokens=spare)
        assert option.fits, (spare, option.why)


def test_few_cold_keys_are_left_to_the_host_unless_it_is_told_otherwise() -> None:
    few = option_of(1000, "hybrid", spare_tokens=16)
    assert few.select == "the host searches: 344 cold keys are few"
    told = option_of(1000, "hybrid", spare_tokens=16, cold={"select": "device"})
    assert told.select == "the device selects: codes of 64 B a key fit"


@pytest.mark.parametrize(("dim", "code"), [(128, 48), (64, 24), (72, 27)])
@pytest.mark.parametrize("group", [1, 4])
def test_a_selection_reads_codes_as_wide_as_heads_and_rows_over_the_bus(
    dim: int, code: int, group: int
) -> None:
    layers = [LayerShape(idx, 3 * group, 3, dim) for idx in range(2)]
    for cold in (50_000, 300):
        read = select_bytes(layers, 48, cold, 150, 2)
        assert read.coded == pytest.approx(2 * 3 * cold * code * 9 / 8)
        ranked = min(cold, 1.25 * 205 * 1.5 * group / 2)
        attended = min(cold, 150 * max(1, group / 2))
        assert read.ranked == pytest.approx(2 * 3 * dim * 2 * ranked)
        assert read.attended == pytest.approx(2 * 3 * dim * 2 * attended)
    maps, later = 4 * dim * (2 * dim + 2), 4096 * dim * 2
    assert codes_bytes(layers, 48, 50_000, 2) == 2 * 3 * (53_125 * code + maps + later)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"cold": {"select": "host"}}, "as select says"),
        ({"cold": {"index": "graph"}}, "kind sketch or auto, got graph"),
    ],
)
def test_the_plan_says_why_the_host_searches(settings: dict[str, object], why: str) -> None:
    option = option_of(128 << 10, "hybrid", **settings)
    assert option.select.startswith("the host searches")
    assert why in option.select
    assert not {"codes", "search"} & option.device_bytes.keys()


def test_a_device_without_room_for_codes_leaves_the_search_to_the_host() -> None:
    option = option_of(128 << 10, "hybrid", replace(DESKTOP, device_bytes=20 * GIB))
    assert "codes of 16 B a key take" in option.select
    assert option.select.endswith("GiB, 0.8 are free")


def test_without_a_device_nobody_asks() -> None:
    here = Machine("cpu", None, 64 * GIB, HOST)
    assert option_of(128 << 10, "hybrid", here).select == ""


@pytest.mark.parametrize(
    ("method", "settings", "device", "host"),
    [
        ("full", {}, 128 << 10, 0),
        ("kivi", {}, 128 << 10, 0),  # codes, at the most
        ("quest", {}, (128 << 10) * 17 // 16, 0),  # and digests
        ("streaming_llm", {"sink_tokens": 16, "window_tokens": 496}, 512, 0),
        ("snapkv", {}, 1024, 0),
        ("snapkv", {"demote": "offload"}, 1024, (128 << 10) - 32),
        ("duo_attention", {"retrieval_ratio": 0.25}, 320 + ((128 << 10) - 320) // 4, 0),
        ("retrieval_attention", {"sink_tokens": 16, "window_tokens": 64}, 80, (128 << 10) - 80),
        ("chain", {}, 1024 - 32, 0),
    ],
)
def test_keys_and_values_lie_where_the_method_keeps_them(
    method: str, settings: dict[str, Any], device: int, host: int
) -> None:
    option = option_of(128 << 10, "hybrid", method=method, **settings)
    token = LLAMA_8B.kv_bytes_per_token
    assert option.device_bytes["kv"] == pytest.approx(device * token, rel=0.002)
    assert option.host_bytes["kv"] == host * token
    assert option.cold_tokens == host
    if not host and option.ms:
        assert option.ms["search"] == option.ms["cold_attention"] == option.ms["transfer"] == 0
    if method in ("full", "snapkv") and not host:
        read = option.ms["resident_attention"] * DESKTOP.rates.device * 1e6
        assert read == pytest.approx(device * token, rel=0.002)


def test_advice_names_no_index_where_nothing_is_cold() -> None:
    plan = make_plan(LLAMA_8B, DESKTOP, 128 << 10, HybridConfig(method="snapkv"))
    assert plan.advice.startswith("the method fits: what it keeps lies beside the weights")
    offloads = HybridConfig(method="snapkv", demote="offload")
    assert "found by an index" in make_plan(LLAMA_8B, DESKTOP, 128 << 10, offloads).advice
