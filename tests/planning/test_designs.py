"""The model of a step by design, on numbers that can be checked by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hybrid_kv.planning.designs import (
    HOST_COSTS,
    CoreCost,
    Designs,
    DesignStep,
    Host,
    PythonCost,
    exact_plans,
    host_attend_ms,
    host_rank_ms,
    host_search_ms,
)
from hybrid_kv.planning.rates import CARDS, Rates, rates_of_card
from hybrid_kv.types import LayerShape
from tests.planning.test_planner import LLAMA_8B

CARD = CARDS["rtx-4090"]
HOST = Host(16, 70.0, 35.0)
RATES = rates_of_card(CARD, Rates(70.0, 70.0, 35.0))
SHAPE = LayerShape(0, 32, 8, 128)
GIB = 2**30
COLD = 2**17 - 128 - 512  # sinks and window of `hybrid`
LEAVING = 128 * 1024
"""Bytes of a token that a page takes to the host."""


def steps(tokens: int = 2**17, host: Host = HOST, **changes: object) -> dict[str, DesignStep]:
    made = Designs(replace(LLAMA_8B, **changes), tokens, CARD, RATES, host).all()  # type: ignore[arg-type]
    return {re.sub(r", \d+ B a key", "", step.design): step for step in made}


def parts(step: DesignStep) -> dict[str, float]:
    return {part.name: part.ms for part in step.parts}


def test_every_design_reads_the_weights_and_its_parts_are_its_time() -> None:
    for step in steps().values():
        assert parts(step)["weights"] == pytest.approx(1e3 * 15_009_849_344 / (0.9 * 1008e9))
        assert step.ms == pytest.approx(sum(p.ms for p in step.parts if not p.hidden))
        assert step.host_bytes == COLD * 128 * 1024


def test_layers_that_are_not_tiered_have_kernels_and_states_but_no_search() -> None:
    changes = {"other_layers": 96, "fixed_bytes": GIB}
    for name, step in steps(**changes).items():
        before = steps()[name]
        assert step.host_core_ms == before.host_core_ms
        assert step.waits == before.waits
        if before.launches > 1:
            assert step.launches == before.launches + 96 * 38
        more = parts(step)["small kernels"] - parts(before)["small kernels"]
        assert more == pytest.approx(96 * 38 * 1.5e-3)
        assert parts(step)["states of fixed size"] == pytest.approx(1e3 * GIB / (0.9 * 1008e9))
        assert step.device_bytes == before.device_bytes + GIB


def test_a_model_with_sliding_windows_has_no_step_of_one_graph() -> None:
    found = {name: step.why_not for name, step in steps(window_bytes=2**20, other_layers=5).items()}
    assert found.pop("sketch on the device, one graph").endswith("own are not captured")
    assert set(found.values()) == {""}


def test_a_search_takes_its_work_or_its_bytes() -> None:
    cost = CoreCost(20.0, 100.0, 1.0, key_bytes=24.0)
    costs = replace(HOST_COSTS, search={"sketch": cost})
    alone = host_search_ms(SHAPE, "sketch", 2**18, Host(1, 70.0, 35.0), costs)
    assert alone == pytest.approx(8 * 220e-3), "one core's work"
    many = host_search_ms(SHAPE, "sketch", 2**18, Host(64, 70.0, 35.0), costs)
    assert many == pytest.approx(8 * 24 * 2**18 / 70e6), "the memory's bytes"


def test_a_graph_and_what_was_found_are_read_at_random_places() -> None:
    slow, free = Host(64, 70.0, 0.35), CoreCost(0.0, 0.0, 1.0)
    costs = replace(HOST_COSTS, attend=free, rank=free)
    walked = 8 * 1.5 * 9000 * 129  # rows of the graph and an estimate of its lists, at 128K keys
    for keys in (2**17, 2**18):
        found = host_search_ms(SHAPE, "graph", keys, slow, costs)
        assert found == pytest.approx(walked * (keys / 2**17) ** 0.6 / 0.35e6)
    values = 0.55 * 32 * 128 * 128 * 2  # of 128 entries a query head, a group shares
    assert host_attend_ms(SHAPE, 2**17, slow, costs) == pytest.approx(values / 0.35e6)
    assert host_rank_ms(SHAPE, 2**17, slow, costs) == pytest.approx(2 * values / 0.35e6), "keys"


def test_bytes_of_a_step_are_told_by_place() -> None:
    found = steps(window_bytes=GIB)
    resident = 640 * LEAVING + GIB
    for step in found.values():
        assert parts(step)["resident attention"] == pytest.approx(1e3 * resident / (0.9 * 1008e9))
    plain, ahead = found["sketch on the host"], found["sketch on the host, look-ahead"]
    assert plain.device_read_bytes == LLAMA_8B.read_bytes + resident
    assert plain.device_bytes == LLAMA_8B.weight_bytes + resident
    rows = 0.55 * 128 * 4 * 8  # of 128 entries a query head, keys and values
    assert plain.host_read_bytes == pytest.approx(32 * (8 * 24 * COLD + rows * 512), abs=1)
    queries, lse = 32 * 128 * 2, 32 * 4
    assert plain.bus_bytes == 32 * (2 * queries + lse) + LEAVING
    assert ahead.bus_bytes == plain.bus_bytes + 31 * queries, "the first layer has none before it"
    ranked = 32 * 8 * HOST_COSTS.rank.core_us(COLD) / 1e3
    assert ahead.host_core_ms == pytest.approx(plain.host_core_ms + ranked)
    assert (plain.waits, plain.launches) == (64, 32 * (38 + 2 + 3))
    assert parts(plain)["query out, result in"] == pytest.approx(64 * 0.04)
    streamed = found["full attention over the bus"]
    assert streamed.launches == 32 * (38 + 2 + 2)
    assert streamed.host_read_bytes == COLD * LEAVING


def test_codes_on_the_device_are_held_with_room_and_read_with_moments() -> None:
    step = steps()["sketch on the device, one graph"]
    later, maps = 4096 * 128 * 2, 4 * 128 * (2 * 128 + 2)
    held = 32 * 8 * ((COLD + COLD // 16) * 64 + later + maps)
    assert step.device_bytes == LLAMA_8B.weight_bytes + 640 * LEAVING + held
    moments = parts(step)["moments"] * 0.9 * 1008e6
    assert moments > 32 * 8 * 4 * 128 * 128, "at least a covariance of each KV head"
    scanned = 32 * 8 * COLD * 64 * 9 / 8
    known = LLAMA_8B.read_bytes + 640 * LEAVING + scanned + moments
    assert step.device_read_bytes == pytest.approx(known, abs=2)


def test_without_cold_entries_nothing_leaves() -> None:
    assert steps(512)["full attention over the bus"].bus_bytes == 0


def test_attention_of_what_was_found_has_a_head_for_a_thread() -> None:
    costs = replace(HOST_COSTS, attend=CoreCost(0.0, 200.0, 0.5))
    found = [host_attend_ms(SHAPE, 2**19, Host(n, 70.0, 35.0), costs) for n in (2, 64)]
    assert found == [pytest.approx(8 * 0.4 / 2), pytest.approx(0.4)]


def test_python_takes_longer_where_a_search_has_emptied_the_caches() -> None:
    cost = PythonCost(100.0, 60.0)
    assert [cost.at(keys) for keys in (0, 2**16, 2**17, 2**20)] == [100.0, 130.0, 160.0, 160.0]


def test_launching_shows_only_where_a_device_is_done_sooner() -> None:
    quick, slow = (
        Designs(LLAMA_8B, 2**17, CARD, RATES, HOST, replace(HOST_COSTS, launch=PythonCost(us, 0)))
        for us in (1.0, 900.0)
    )
    for design in range(4):
        one, other = quick.all()[design], slow.all()[design]
        device = sum(p.ms for p in one.parts if p.place == "device")
        launched = parts(other)["launching"] + parts(other)["launching beside"]
        assert "launching" not in parts(one)
        assert parts(other)["launching beside"] == pytest.approx(device)
        assert launched == pytest.approx(32 * (43 * 6.6e-3 + 0.9))
        assert other.ms == pytest.approx(one.ms + parts(other)["launching"])


def test_cores_are_left_to_others_as_the_pool_leaves_them() -> None:
    assert [Host(n, 1.0, 1.0).threads for n in (1, 2, 3, 4, 16)] == [1, 2, 3, 3, 15]


@pytest.mark.parametrize("kind", ["graph", "sketch"])
def test_look_ahead_hides_the_search_behind_a_layer(kind: str) -> None:
    found = steps()
    plain, ahead = found[f"{kind} on the host"], found[f"{kind} on the host, look-ahead"]
    assert ahead.ms < plain.ms
    assert parts(ahead)["search ahead"] == pytest.approx(parts(plain)["search"])
    assert "search" not in parts(ahead), "all of it is hidden"
    ranked = 32 * 8 * HOST_COSTS.rank.core_us(COLD) / 1e3
    assert ahead.waits == plain.waits
    assert ahead.host_core_ms == pytest.approx(plain.host_core_ms + ranked)
    assert parts(ahead)["ranking of what was found"] == pytest.approx(ranked / 8), "8 heads at once"
    slow = steps(host=Host(1, 70.0, 35.0))[f"{kind} on the host, look-ahead"]
    assert parts(slow)["search"] > 0, "a layer is too short to hide it"


def test_a_step_on_the_device_has_one_launch_and_no_wait() -> None:
    step = steps()["sketch on the device, one graph"]
    assert (step.launches, step.waits, step.host_core_ms) == (1, 0, 0.0)
    assert not any(part.place == "wait" for part in step.parts)
    assert parts(step)["scan of codes"] == pytest.approx(
        1e3 * 32 * COLD * 8 * 64 * 9 / 8 / (0.9 * 1008e9)
    ), "codes of 64 B, an eighth of them twice, for the limit"
    # Twice as many keys as one query head aims at (1.25 times those of the lab, where it had 100),
    # and the best's values.
    rows = 32 * 8 * (2 * 1.25 * 130 * 1.28 + 2 * 128)
    assert step.bus_bytes == pytest.approx(rows * 256 + LEAVING)
    assert all(step.ms < other.ms for name, other in steps().items() if "device" not in name)


def test_as_built_python_launches_what_is_no_graph() -> None:
    built, graph = (
        steps()["sketch on the device, as built"],
        steps()["sketch on the device, one graph"],
    )
    assert (built.launches, built.waits) == (32 * 42, 0)
    assert parts(built)["launching beside"] == pytest.approx(32 * (42 * 6.6e-3 + 0.1))
    assert "launching" not in parts(built), "the device computes longer"
    assert built.ms == pytest.approx(graph.ms + 1.5), "what generate does around a step"
    assert parts(built)["pages to the host"] == pytest.approx((10 + 1.2 * 6.6) / 16)
    slow = replace(HOST_COSTS, launch=PythonCost(900.0, 0.0))
    late = Designs(LLAMA_8B, 2**17, CARD, RATES, HOST, slow).all()[4]
    assert late.ms == pytest.approx(32 * (42 * 6.6e-3 + 0.9) + 2 + (10 + 1.2 * 6.6) / 16)


@pytest.mark.parametrize(("tokens", "size"), [(2**17, 64), (2**19, 48), (2**20, 24)])
def test_codes_become_shorter_until_they_fit(tokens: int, size: int) -> None:
    built, graph = Designs(LLAMA_8B, tokens, CARD, RATES, HOST).all()[4:6]
    assert built.design == f"sketch on the device, {size} B a key, as built"
    assert graph.design == f"sketch on the device, {size} B a key, one graph"
    assert not built.why_not
    told = Designs(LLAMA_8B, tokens, CARD, RATES, HOST, code_bytes=16).all()[4]
    assert "16 B a key" in told.design, "what a plan has found room for beside the prompt"


def test_codes_leave_a_gib_of_the_device_to_others() -> None:
    """And so they must fit beside weights, window and the process."""
    later, maps = 4096 * 128 * 2, 4 * 128 * (2 * 128 + 2)
    held = 32 * 8 * ((COLD + COLD // 16) * 64 + later + maps)
    needed = LLAMA_8B.weight_bytes + 640 * LEAVING + held + 600 * 2**20 + GIB
    for memory, size in ((needed, 64), (needed - 1, 48)):
        card = replace(CARD, memory_bytes=memory)
        made = Designs(LLAMA_8B, 2**17, card, RATES, HOST).all()[4]
        assert f"{size} B a key" in made.design


def test_codes_that_never_fit_are_refused_with_their_size() -> None:
    step = Designs(LLAMA_8B, 2**21, CARD, RATES, HOST).all()[4]
    assert step.why_not.startswith("codes of 16 bytes a key need 8.8 GiB of device memory, ")


def test_streaming_everything_waits_for_the_bus() -> None:
    step = steps()["full attention over the bus"]
    cold = COLD * 128 * 1024
    assert parts(step)["keys and values over the bus"] == pytest.approx(1e3 * cold / 25.6e9)
    assert step.bus_bytes == cold + LEAVING


def test_what_a_device_does_is_never_called_measured() -> None:
    marked = {part.name for step in steps().values() for part in step.parts if part.measured}
    host = {"search", "search ahead", "ranking of what was found", "cold attention"}
    assert marked == {"entering the host's part", *host}


def test_a_token_of_an_exact_answer_is_drafts_and_a_pass_over_the_tokens_of_both() -> None:
    made = Designs(LLAMA_8B, 2**17, CARD, RATES, HOST).all()
    *drafting, full = made
    plans = exact_plans(made, (0.5, 0.99))
    names = [one.design for one in drafting for _ in range(2)]
    assert [one.design for one in plans] == names, "what reads everything drafts nothing"
    for step, plan in zip(drafting, plans[::2], strict=True):
        drafts = plan.drafts
        tokens = sum(0.5**n for n in range(drafts + 1))
        assert plan.ms == pytest.approx((drafts * step.ms + full.ms) / tokens)
        for other in (drafts - 1, drafts + 1):
            taken = (other * step.ms + full.ms) / sum(0.5**n for n in range(other + 1))
            assert taken > plan.ms, "no other number of drafts is better"
        beside = plan.beside_drafts
        again = (1 - 0.5**beside) * beside * step.ms
        tokens = sum(0.5**n for n in range(beside))
        assert plan.beside_ms == pytest.approx((max(full.ms, beside * step.ms) + again) / tokens)
    for poor, rich in zip(plans[::2], plans[1::2], strict=True):
        assert rich.ms < poor.ms
        assert rich.beside_ms < rich.ms
        assert poor.drafts < rich.drafts <= 48


def test_a_design_that_cannot_run_drafts_nothing() -> None:
    made = Designs(replace(LLAMA_8B, window_bytes=2**20, other_layers=5), 2**17, CARD, RATES, HOST)
    assert not any("one graph" in one.design for one in exact_plans(made.all(), (0.9,)))
