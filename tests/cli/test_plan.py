"""`hybrid-kv plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.api import planning
from hybrid_kv.planning.plan import PromptRates
from hybrid_kv.planning.rates import Rates
from hybrid_kv.report import probe_environment
from hybrid_kv.report.schema import ProfileReport, to_json
from tests.cli.support import call, refused, report_of

PLAN = ("plan", "random:llama-3-8b", "--card", "rtx-4090", "--host-memory", "64GiB")


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "measure_rates", lambda _: Rates(50, 50, 20))
    monkeypatch.setattr(planning, "measure_prompt_rates", lambda *_: PromptRates(100, 50))


def planned(*words: str) -> Any:
    return report_of(call(*words, "--json", "-"))


def test_128k_on_a_24_gb_card_is_hybrid() -> None:
    report = planned(*PLAN, "--context", "128k")
    assert report.command == "plan"
    assert report.context_tokens == 131072
    assert report.recommended == "hybrid"
    assert [option.mode for option in report.options] == ["dense", "dense_8bit", "hybrid"]
    assert report.rates_assumed
    assert report.prompt_rates.assumed
    assert report.bandwidth_gbps.dram == 50


def test_people_see_bytes_times_and_the_advice() -> None:
    output = call(*PLAN, "--context", "128k").output
    parts = "15.0 GiB weights", "16.0 GiB kv", "GiB codes", "cold_attention"
    for part in (*parts, "s to the first token", "54.6 attention", "70% and 50%"):
        assert part in output
    sparse = call(*PLAN, "--context", "128k", "--set", "prefill=sparse").output
    for part in ("54.6 attention", "18.6 sparse attention", "sparse prefill reading 30% (assumed)"):
        assert (part in sparse, part in output) == (True, part == "54.6 attention")
    assert "select=device" in output
    assert "the device selects: codes of 64 B a key fit (computed" in output
    by_host = call(*PLAN, "--context", "128k", "--set", "cold.select=host").output
    for part in ("GiB index", "spare_tokens=", "the host searches, as select says"):
        assert part in by_host
    assert "hybrid: cold keys and values in host memory" in output


def test_four_bit_weights_make_96k_fit_densely() -> None:
    words = (*PLAN, "--context", "96k", "--weights", "int4")
    report = planned(*words)
    assert report.recommended == "dense"
    assert report.weights["int4"] + report.weights["bfloat16"] == report.weight_bytes
    assert "GiB int4" in call(*words).output


def test_settings_of_the_method_count() -> None:
    by_host = (*PLAN, "--context", "128k", "--set", "cold.select=host")
    wide = planned(*by_host, "--set", "window_tokens=16k").options[2]
    slim = planned(*PLAN, "--context", "128k", "--method", "retrieval_attention").options[2]
    assert slim.settings == {}
    assert wide.settings["spare_tokens"] < planned(*by_host).options[2].settings["spare_tokens"]


def test_this_machine_is_planned_for_by_default() -> None:
    report = planned("plan", "needle", "--context", "4k", "--device", "cpu")
    assert report.device_bytes is None
    assert not report.rates_assumed
    assert report.recommended == "dense"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--card", "rtx-4900"), "unknown card 'rtx-4900'; did you mean 'rtx-4090'?"),
        (("--context", "0"), "a count must be a whole number of at least 1"),
        (("--context", "4m"), "context must be at most 2097152 tokens for this model, got 4194304"),
        (("--weights", "int5"), "unknown weights 'int5'; did you mean 'int"),
        (("--device-memory", "24GiB", "--device", "cpu"), "device_bytes is the memory of a GPU"),
        (("--method", "by_layer"), "got by_layer of streaming_llm, snapkv; plan for its parts one"),
    ],
)
def test_mistakes_are_one_sentence(words: tuple[str, ...], sentence: str) -> None:
    assert sentence in refused("plan", "random:llama-3-8b", *words)


# Beside a measurement


def profiled(tmp_path: Path, **changes: Any) -> Path:
    """A profile of one layer of the 8B shape at 4K tokens."""
    rows = [
        {"method": method, "context_tokens": 4096, "status": "ok", "tpot_ms": ms, "ttft_s": s}
        for method, ms, s in (("full", 12.5, 3.25), ("hybrid", 7.25, None), ("quest", 9.0, 1.0))
    ]
    rows.append({"method": "hybrid", "context_tokens": 8192, "status": "failed", "reason": "-"})
    values: dict[str, Any] = {
        "environment": probe_environment("cpu"),
        "arguments": {},
        "model": "random:llama-3-8b",
        "layers": 1,
        "fill": "synthetic",
        "new_tokens": 4,
        "warmup_tokens": 1,
        "threads": {},
        "bandwidth_gbps": {"device": 1, "dram": 1, "gather": 1},
        "recorder_us": 0.5,
        "rows": rows,
    }
    file = tmp_path / "run.json"
    file.write_text(to_json(ProfileReport(**{**values, **changes})))
    return file


ONE_LAYER = ("plan", "random:llama-3-8b", "--layers", "1", "--device", "cpu", "--context")


def test_a_profile_stands_beside_the_prediction(tmp_path: Path) -> None:
    words = (*ONE_LAYER, "4k", "--beside", str(profiled(tmp_path)))
    options = {option.mode: option for option in planned(*words).options}
    assert options["dense"].measured_tpot_ms == 12.5
    assert options["dense_8bit"].measured_tpot_ms is None
    assert options["hybrid"].measured_tpot_ms == 7.25
    assert options["hybrid"].tpot_ms is not None
    assert (options["dense"].measured_ttft_s, options["hybrid"].measured_ttft_s) == (3.25, None)
    output = call(*words).output
    assert "measured" in output
    assert "12.5 ms" in output
    assert "3.25 s to the first" in output
    assert "measured" not in call(*ONE_LAYER, "4k").output.replace("measured now", "")


@pytest.mark.parametrize(
    ("context", "changes", "sentence"),
    [
        (
            "4k",
            {"layers": 2},
            "profile of random:llama-3-8b with 1 layers, got random:llama-3-8b wi",
        ),
        ("4k", {"model": "needle"}, "with 1 layers, got needle with 1; give the same model"),
        ("8k", {}, "neither full nor hybrid at 8192 tokens; it has the contexts 4096"),
    ],
)
def test_another_profile_is_refused(
    tmp_path: Path, context: str, changes: dict[str, Any], sentence: str
) -> None:
    words = (*ONE_LAYER, context, "--beside", str(profiled(tmp_path, **changes)))
    assert sentence in refused(*words)


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(call(*ONE_LAYER, "4k", "--json", "-").stdout)
    sentence = refused(*ONE_LAYER, "4k", "--beside", str(file))
    assert "takes what the verb profile has written, got a run of 'plan'" in sentence


def test_cores_beside_a_card_show_what_a_step_takes_by_design() -> None:
    words = (*PLAN, "--context", "128k", "--cores", "16")
    designs = {one.design: one for one in planned(*words).designs}
    graph = designs["sketch on the device, 64 B a key, one graph"]
    assert (graph.waits, graph.launches, graph.measured_parts) == (0, 1, ())
    built = designs["sketch on the device, 64 B a key, as built"]
    assert built.tpot_ms > graph.tpot_ms
    assert "codes of 64 B a key fit" in call(*words).output, "the plan's own are the same"
    assert "search" in designs["graph on the host"].measured_parts
    assert designs["graph on the host, look-ahead"].hidden_ms_per_token["search ahead"] > 1
    for one in designs.values():
        assert one.tpot_ms == pytest.approx(sum(one.ms_per_token.values()))
    output = call(*words).output
    for part in ("search ahead*", "query out, result in", "full attention over the bus"):
        assert part in output
    exact = [one for one in planned(*words).exact if one.design == built.design]
    assert [one.accepted for one in exact] == [0.95, 0.987, 0.995]
    full = designs["full attention over the bus"].tpot_ms
    assert full > exact[0].tpot_ms > exact[1].tpot_ms > exact[2].tpot_ms > built.tpot_ms
    assert f"{exact[2].tpot_ms:.1f}, {exact[2].drafts}" in output
    assert planned(*PLAN).designs == planned(*PLAN).exact == ()


def test_cores_without_a_card_are_refused() -> None:
    assert "--card rtx-4090" in refused("plan", "random:llama-3-8b", "--cores", "16")
