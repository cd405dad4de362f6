"""Profiles: phases that add up, rows that stand alone, limits that are kept."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import hybrid_kv as hkv
from hybrid_kv.config import IndexConfig
from hybrid_kv.errors import CapacityError, ConfigError
from hybrid_kv.eval.filling import SyntheticContext, context_bytes
from hybrid_kv.eval.profiling import ProfileArguments, chrome_trace, open_bench, sweep
from hybrid_kv.eval.profiling import bench as sweep_module
from hybrid_kv.eval.profiling import row as row_module
from hybrid_kv.eval.profiling import steps as steps_module
from hybrid_kv.eval.profiling.bench import lack_of_room
from hybrid_kv.eval.profiling.row import Overtime
from hybrid_kv.eval.profiling.steps import StepWatch
from hybrid_kv.index import _auto_choice
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.load import load_model
from hybrid_kv.ops.host_memory import FreeMemory
from hybrid_kv.ops.native.library import engine_state
from hybrid_kv.planning.plan import model_facts
from hybrid_kv.planning.rates import BuildForecast, Rates
from hybrid_kv.planning.traffic import bytes_per_step, limit_ms
from hybrid_kv.report.profile import ProfileRow
from hybrid_kv.types import LayerShape, ModelInfo, Work
from hybrid_kv.watch import phases as phases_module
from hybrid_kv.watch.recorder import DEVICE, HOST, DeviceClock, TraceSpan
from tests.kit import every, sized

TINY = {"model": "random:tiny", "device": "cpu", "dtype": "float32"}
SMALL = {"new_tokens": 5, "warmup_tokens": 1}
SLIM = {"window_tokens": 32, "sink_tokens": 16}


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "measure_rates", lambda _: Rates(50, 50, 20))


def rows_of(**values: Any) -> dict[tuple[str, int], ProfileRow]:
    asked = ProfileArguments.of({**TINY, **SMALL, **values})
    return {(row.method, row.context_tokens): row for row in sweep(open_bench(asked))}


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[row_module.RowMeasurement]:
    """What has measured the rows, with the counts that it made them of."""
    run, seen = row_module.RowMeasurement.run, list[row_module.RowMeasurement]()

    def kept(self: row_module.RowMeasurement) -> None:
        seen.append(self)
        run(self)

    monkeypatch.setattr(row_module.RowMeasurement, "run", kept)
    return seen


def test_phases_add_up_to_the_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that moves by its own looks alone: what is lost shows, and nothing flakes.
    now = 0.0

    def look() -> float:
        nonlocal now
        now += 1e-4
        return now

    book_parts = phases_module.Phases.book_parts

    def booked_by_looks(
        phases: phases_module.Phases, begin: Any, parts: Sequence[tuple[str, float]]
    ) -> None:
        # The engine measures its parts by the real clock: on a busy machine they outlast a step.
        book_parts(phases, begin, [(phase, 1e-4) for phase, _ in parts])
        for _ in parts:
            look()

    monkeypatch.setattr(phases_module, "perf_counter", look)
    monkeypatch.setattr(steps_module, "perf_counter", look)
    monkeypatch.setattr(phases_module.Phases, "book_parts", booked_by_looks)
    rows = rows_of(
        contexts=(200,), methods=("full", "flat", "quest"), fill="synthetic", settings=SLIM
    )
    for row in rows.values():
        phases = {name: ms for name, ms in row.phases_ms if ms is not None}
        mean = sum(row.step_ms) / len(row.step_ms)
        assert sum(phases.values()) == pytest.approx(mean)
        assert abs(phases["other"]) <= 0.03 * mean, row.method
        assert phases["model"] > 0
        assert phases["python"] > 0
        assert phases["resident_attention"] > 0
    assert rows["flat", 200].phases_ms.search


def test_time_in_the_model_and_around_it_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    for module in (phases_module, steps_module):
        monkeypatch.setattr(module, "perf_counter", lambda: now)
    model = load_model("random:tiny", device="cpu", dtype="float32")
    with hkv.attach(model, hkv.HybridConfig(method="full")) as runtime:
        cache = runtime.cache()
        phases, watch = cache.kv.phases, StepWatch(model, cache, 1)
        watch.put(torch.zeros(1, 3))  # the prompt
        for _ in range(4):
            now += 0.5  # generate's own
            watch._switch("forward")
            now += 2.0
            with phases.measure("attention"):
                now += 0.25  # the runtime's own
                with phases.measure("search"):
                    now += 4.0
            watch._switch("between")
            now += 0.125
            watch.put(torch.zeros(1))
    assert watch.steps.step_s == [6.875, 6.875]
    parts = watch.steps.phases_s()
    assert parts["search"] == 4.0
    assert parts["model"] == 2.0
    assert parts["python"] == 0.875
    assert parts["other"] == 0.0


def test_warm_up_is_apart(measurements: list[row_module.RowMeasurement]) -> None:
    rows = rows_of(contexts=(100,), methods=("full",), warmup_tokens=3, new_tokens=6, audit_every=0)
    row = rows["full", 100]
    steps, work = measurements[0].steps, measurements[0].work
    assert steps is not None
    assert work is not None
    assert len(steps.times_s) == 1 + 3 + 6
    assert row.step_ms == tuple(1e3 * (b - a) for a, b in pairwise(steps.times_s[3:]))
    assert work.steps == 6 * 2 * 6  # of measured steps, two layers and six query heads
    assert row.tpot_ms == pytest.approx(sum(row.step_ms) / 6)
    assert row.audit is None


@pytest.mark.parametrize("fill", ["prefill", "synthetic"])
def test_rows_say_what_was_measured(fill: str) -> None:
    rows = rows_of(contexts=(150, 333), methods=("flat", "full"), fill=fill, settings=SLIM)
    assert list(rows) == [("flat", 150), ("full", 150), ("flat", 333), ("full", 333)]
    row = rows["flat", 333]
    assert row.status == "ok"
    assert row.reason is None
    assert (row.ttft_s is None, row.fill_s is None) == (fill == "synthetic", fill == "prefill")
    assert row.index_build_s is not None
    assert row.index_build_s > 0
    if row.ttft_s is not None and row.prefill_s is not None:
        assert 0 < row.prefill_s < row.ttft_s
    assert row.memory_bytes.host_kv
    assert row.predicted_ms["search"] > 0
    assert row.limit_ms is not None
    assert row.cache_limit_ms is not None
    assert 0 < row.cache_limit_ms < row.limit_ms
    weights = 1e-6 * (row.bytes_per_token.weights or 0) / 50
    assert row.limit_ms - row.cache_limit_ms == pytest.approx(weights)
    assert [step["layer"] for step in row.steps] == [0, 1]
    assert all("asked by Python" in step["reason"] for step in row.steps)  # torch scans for it
    if engine_state().isa is not None:
        assert [step["one_call"] for step in rows["full", 333].steps] == [True, True]
    assert row.recorder_ratio is not None
    assert row.recorder_ratio > 0
    assert row.audit is not None
    assert row.audit.looks == 2  # in 5 steps every second
    full = rows["full", 333]
    assert full.audit is not None
    assert row.audit.recall_at_k is not None
    assert row.audit.recall_at_k.mean == row.work.recall_at_k == 1.0
    assert full.audit.missed_mass is not None
    assert full.audit.missed_mass.mean < 1e-5
    assert full.memory_bytes.host_kv == 0
    assert full.audit.recall_at_k is None


def test_the_audit_takes_no_part_in_the_times(
    measurements: list[row_module.RowMeasurement],
) -> None:
    with_looks = rows_of(contexts=(300,), methods=("flat",), audit_every=1, settings=SLIM)[
        "flat", 300
    ]
    assert with_looks.audit is not None
    assert len(with_looks.step_ms) == 5
    assert with_looks.audit.looks == 5
    work = measurements[0].work
    assert work is not None
    assert work.steps == 5 * 2 * 6


def test_a_method_that_fails_says_why_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = sweep_module.RowMeasurement._fill

    def broken(self: Any, runtime: Any) -> Any:
        if self.row.method == "flat":
            raise RuntimeError("the disk\nis on fire")
        return fill(self, runtime)

    monkeypatch.setattr(sweep_module.RowMeasurement, "_fill", broken)
    rows = rows_of(contexts=(90,), methods=("full", "flat", "quest"))
    assert [row.status for row in rows.values()] == ["ok", "failed", "ok"]
    assert rows["flat", 90].reason == "RuntimeError: the disk is on fire"
    assert rows["flat", 90].tpot_ms is None


def test_a_context_that_cannot_be_made_fails_its_rows_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def short(info: Any, num_tokens: int, **rest: Any) -> SyntheticContext:
        if num_tokens > 100:
            raise MemoryError("no more of it")
        return SyntheticContext(info, num_tokens, **rest)

    monkeypatch.setattr(sweep_module, "SyntheticContext", short)
    rows = rows_of(contexts=(90, 200), methods=("full", "flat"), fill="synthetic")
    assert [row.status for row in rows.values()] == ["ok", "ok", "failed", "failed"]
    assert rows["flat", 200].reason == "MemoryError: no more of it"


def test_an_interrupt_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    put, seen = StepWatch.put, []

    def ended(self: StepWatch, value: Any) -> None:
        put(self, value)
        seen.append(value)
        if len(seen) == 15:
            raise KeyboardInterrupt

    monkeypatch.setattr(StepWatch, "put", ended)
    # A row hands over its prompt and 7 tokens, so that the second one ends with its sixth.
    rows = list(rows_of(contexts=(90,), methods=("full", "flat", "quest"), audit_every=0).values())
    assert [(row.method, row.status) for row in rows] == [("full", "ok"), ("flat", "interrupted")]
    assert len(rows[1].step_ms) == 4
    assert rows[1].tpot_ms is not None
    assert rows[1].work.attended_tokens


def test_a_row_that_takes_too_long_is_measured_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module.RowMeasurement, "_is_over", lambda self: True)
    row = rows_of(
        contexts=(90,), methods=("flat",), new_tokens=20, audit_every=0, row_limit_s=99.0
    )["flat", 90]
    assert row.status == "ok"
    assert len(row.step_ms) == 4
    assert row.reason == "4 of 20 steps were measured, the row limit is 99 s"
    looked = rows_of(
        contexts=(90,), methods=("flat",), new_tokens=20, audit_every=3, row_limit_s=99.0
    )["flat", 90]
    assert looked.audit is not None
    assert looked.audit.looks == 1


def test_filling_that_would_take_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 10**6, 70))
    monkeypatch.setattr(row_module, "perf_counter", lambda: float(next(now)))
    for fill in ("synthetic", "prefill"):
        row = rows_of(contexts=(900,), methods=("full",), fill=fill, row_limit_s=60.0)["full", 900]
        assert row.status == "skipped", fill
        assert row.reason is not None
        assert "the row limit is 60 s; raise --row-limit" in row.reason
        assert row.tpot_ms is None


def test_what_took_too_long_once_is_not_tried_with_more(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def slow(self: Any, done: int, total: int, build_s: float) -> None:
        tried.append(self.row.context_tokens)
        raise Overtime("filling would take about 300 s", 300.0)

    monkeypatch.setattr(row_module.RowMeasurement, "_layer_filled", slow)
    rows = rows_of(
        contexts=(100, 200), methods=("graph",), fill="synthetic", row_limit_s=120.0
    ).values()
    assert [row.status for row in rows] == ["skipped", "skipped"]
    assert tried == [100]
    assert "would take about 689 s" in str(list(rows)[1].reason)


def test_what_layers_share_is_not_expected_again() -> None:
    asked = ProfileArguments.of({**TINY, "row_limit_s": 100.0})
    around = row_module.SweepEnvironment(asked, *[None] * 5)  # type: ignore[arg-type]
    measurement = row_module.RowMeasurement(
        around, ProfileRow(method="hybrid", context_tokens=9, status="ok"), hkv.HybridConfig(), None
    )
    measurement._begin -= 80.0
    measurement._keep_to_limit("filling", 1, 2, 10.0)
    with pytest.raises(Overtime, match=r"about 110 s \(1 of 2 took 80 s\)"):
        measurement._keep_to_limit("filling", 1, 2, 30.0)
    with pytest.raises(Overtime, match="about 160 s"):
        measurement._keep_to_limit("prefill", 1, 2)
    measurement._keep_to_limit("prefill", 2, 2)


def test_builds_that_cannot_be_ended_are_foretold(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(self: BuildForecast, name: str, index: IndexConfig, *rest: Any) -> None:
        assert index.kind == "hnsw"
        self.note(name, 100, 60.0)

    monkeypatch.setattr(BuildForecast, "probe", slow)
    rows = rows_of(contexts=(400,), methods=("hnsw", "flat"), fill="synthetic", row_limit_s=120.0)
    assert rows["hnsw", 400].status == "skipped"
    assert rows["hnsw", 400].reason == (
        "building its hnsw index over 400 tokens would take about 317 s, judged by shorter ones; "
        "the row limit is 120 s; raise --row-limit"
    )
    assert rows["flat", 400].status == "ok"


def test_a_forecast_follows_what_was_measured() -> None:
    forecast = BuildForecast()
    assert forecast.seconds("ivf", 1000) is None
    assert not forecast.knows("ivf")
    forecast.note("ivf", 1000, 2.0)
    assert forecast.seconds("ivf", 2000) == pytest.approx(2.0 * 2**1.2)
    forecast.note("ivf", 4000, 16.0)  # an exponent of 1.5
    assert forecast.seconds("ivf", 16000) == pytest.approx(128.0)
    forecast.note("ivf", 8000, 3200.0)  # a busy machine: no steeper than a square
    assert forecast.seconds("ivf", 16000) == pytest.approx(12800.0)
    assert forecast.seconds("hnsw", 16000) is None


@pytest.mark.parametrize(
    ("serving", "counts"), [([], True), (["flat", "graph"], True), (["flat", "flat"], False)]
)
def test_a_graph_that_was_not_built_teaches_no_forecast(serving: list[str], counts: bool) -> None:
    served = tuple({"serves": name} for name in serving)
    row = ProfileRow(
        method="hybrid", context_tokens=1000, status="ok", index=served, index_build_s=2.0
    )
    bench = open_bench(ProfileArguments.of({**TINY, "contexts": (64,)}))
    bench.note_build(row)
    assert bench.forecast.knows("hybrid") is counts


def test_a_probe_builds_small_indexes() -> None:
    forecast = BuildForecast()
    keys = torch.randn(1, 2100, 16)
    forecast.probe("flat", IndexConfig(kind="flat"), keys, num_heads=16)
    assert forecast.knows("flat")


def test_contexts_beyond_memory_are_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweep_module, "load_model", lambda *a, **k: pytest.fail("loaded"))
    free = type("Memory", (), {"available": 2**30, "total": 2**33})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    asked = ProfileArguments.of(
        {**TINY, "contexts": (1024, 2**20), "methods": ("full",), "fill": "synthetic"}
    )
    with pytest.raises(CapacityError, match=r"1,048,576 tokens .* GiB of host memory \(.* KV \+"):
        open_bench(asked)


def test_only_the_methods_that_do_not_fit_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ProfileArguments.of({**TINY, **SMALL, "contexts": (2000,), "methods": ("full", "hnsw")})
    bench = open_bench(asked)
    free = type("Memory", (), {"available": 2_600_000, "total": 2**33})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    rows = list(sweep(bench))
    assert [row.status for row in rows] == ["ok", "skipped"]
    assert rows[1].reason is not None
    assert "GiB are free; profile a shorter context or fewer layers" in rows[1].reason


def test_kept_kv_is_given_back_before_a_row_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ProfileArguments.of(
        {**TINY, **SMALL, "contexts": (2000,), "methods": ("full", "hnsw"), "fill": "synthetic"}
    )
    opened, forgotten = open_bench(asked), list[bool]()
    free = [10**9, 10**9, 10, 10**9]  # when the context is made, for full, and twice for hnsw
    forget = SyntheticContext.forget_kv

    def heard(self: SyntheticContext) -> bool:
        forgotten.append(forget(self))
        return forgotten[-1]

    def available() -> Any:
        left = free.pop(0) if free else 10**9
        return type("Memory", (), {"available": left, "total": 2**40})

    monkeypatch.setattr(SyntheticContext, "forget_kv", heard)
    monkeypatch.setattr(sweep_module, "_predicted", lambda *_: {})
    monkeypatch.setattr(psutil, "virtual_memory", available)
    rows = list(sweep(opened))
    assert [row.status for row in rows] == ["ok", "ok"]
    assert forgotten == [True]


def test_the_arithmetic_of_memory_is_shown() -> None:
    needed = {"weights": 2**30, "KV": 3 * 2**30}
    assert lack_of_room(5, "full", needed, FreeMemory(8 * 2**30)) is None
    little = FreeMemory(2 * 2**30, " within the limit of the box")
    assert lack_of_room(5, "full", needed, little) == (
        "context of 5 tokens with method full needs 4.0 GiB of host memory (1.0 weights + 3.0 KV), "
        "2.0 GiB are free within the limit of the box; profile a shorter context or fewer layers"
    )


def test_the_limit_of_the_process_counts_before_the_machine_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine's memory alone was asked for, and a container's end came as a kill."""
    monkeypatch.setattr(sweep_module, "load_model", lambda *a, **k: pytest.fail("loaded"))
    mapped = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda _: (mapped + 10**6, mapped + 10**6))
    asked = ProfileArguments.of({**TINY, "contexts": (65536,), "methods": ("full",)})
    with pytest.raises(CapacityError, match=r"within the limit of this process \(ulimit -v\)"):
        open_bench(asked)


def test_what_is_asked_for_is_checked() -> None:
    def refused(**values: Any) -> str:
        with pytest.raises(ConfigError) as error:
            ProfileArguments.of({**TINY, **values})
        return str(error.value)

    assert "did you mean 'graph'" in refused(methods=("grap",))
    assert "contexts must be numbers of at least 1, got [0]" in refused(contexts=(0,))
    assert "new_tokens" in refused(new_tokens=0)
    assert "unknown" in refused(steps=3) or "extra" in refused(steps=3).lower()
    assert "known to none of the methods full" in refused(methods=("full",), settings={"top_k": 3})
    assert "--audit-every" in refused(settings={"audit_every": 3})
    asked = ProfileArguments.of({**TINY, "methods": ("graph", "full", "graph"), "contexts": (9, 3)})
    assert asked.methods == ("retrieval_attention", "full")
    assert asked.contexts == (3, 9)
    assert ProfileArguments.of(json.loads(asked.model_dump_json())) == asked


def test_settings_go_to_the_methods_that_know_them() -> None:
    asked = ProfileArguments.of({**TINY, "settings": {"top_k": 7, "cold.index.precision": "int8"}})
    configs = asked.configs()
    assert configs["flat"].cold.top_k == 7
    assert configs["flat"].cold.index.precision == "int8"
    assert {config.index_build for config in configs.values()} == {"wait"}


def test_quest_of_a_model_cut_down_is_not_dense_and_says_so() -> None:
    asked = ProfileArguments.of({**TINY, "layers": 2, "methods": ("quest", "full")})
    quest, full = asked.configs().values()
    assert quest.dense_layers == 0
    assert "dense_layers=0" in str(asked.changed(quest))
    assert asked.changed(full) is None
    deep = ProfileArguments.of({**TINY, "model": "random:llama-3-8b", "layers": 5})
    assert deep.configs()["quest"].dense_layers == 2
    kept = ProfileArguments.of({**TINY, "layers": 2, "settings": {"dense_layers": 2}})
    assert kept.configs()["quest"].dense_layers == 2
    assert kept.changed(kept.configs()["quest"]) is None


def test_traffic_is_what_steps_have_read_over_their_number() -> None:
    facts = model_facts("random:tiny", dtype="float32")
    model = load_model("random:tiny", device="cpu", dtype="float32")
    config = hkv.HybridConfig(method="flat", window_tokens=32, sink_tokens=16)
    with hkv.attach(model, config) as runtime, torch.inference_mode():
        cache = runtime.cache()
        model(torch.randint(0, 500, (1, 200)), **passing(cache))
        cache.kv.layers.seal(0)
        cache.kv.layers.seal(1)
        # Two layers of 6 query heads: three steps.
        work = Work(
            steps=3 * 12,
            resident_bytes=3000,
            select_bytes=33,
            search_bytes=60,
            cold_bytes=90,
            estimate_bytes=12,
            transfer_bytes=6,
        )
        read = bytes_per_step(facts, cache.kv, work, on_device=True)
        assert work.read_bytes == 3000 + 33 + 60 + 90 + 12
        assert bytes_per_step(facts, cache.kv, Work(), on_device=False) == {}
        others = replace(facts, window_bytes=500, untiered_kv_bytes=8, fixed_bytes=30)
        beside = bytes_per_step(others, cache.kv, work, on_device=True)
        short = runtime.cache()
        model(torch.randint(0, 500, (1, 20)), **passing(short))
        assert bytes_per_step(facts, short.kv, work, on_device=True)["transfer"] == 2
        at_home = bytes_per_step(facts, cache.kv, work, on_device=False)
    assert beside["resident_attention"] == 1000 + 500 + 200 * 8
    assert beside["states"] == 60, "read and written"
    assert at_home["transfer"] == 2
    assert read == {
        "weights": facts.read_bytes,
        "resident_attention": 1000,
        "select": 11,
        "search": 20,
        "cold_attention": 30,
        "estimate": 4,
        "transfer": 2 + facts.kv_bytes_per_token,
    }


@pytest.mark.parametrize(
    ("method", "selects", "slower"),
    [
        ("flat", False, {"search": 20, "cold_attention": 10, "estimate": 20}),
        ("hnsw", False, {"search": 10, "cold_attention": 10, "estimate": 20}),
        ("hybrid", True, {"search": 20, "cold_attention": 5, "estimate": 100}),
    ],
)
def test_the_limit_of_a_step_is_its_bytes_by_where_they_are_read(
    method: str, selects: bool, slower: dict[str, int]
) -> None:
    rates = Rates(device=100, dram=20, gather=10, h2d=5, d2h=4)
    index = SimpleNamespace(selector=object() if selects else None)
    span = SimpleNamespace(extent=SimpleNamespace(index=index))
    cache: Any = SimpleNamespace(
        config=hkv.HybridConfig(
            method=method, **({"cold": {"index": "sketch"}} if selects else {})
        ),
        stores={0: SimpleNamespace(cold=SimpleNamespace(spans=lambda: [span]))},
    )
    on_device = dict.fromkeys(("weights", "resident_attention", "states", "select"), 100)
    for what, gbps in {**on_device, **slower, "transfer": 4}.items():
        assert limit_ms({what: 10**9}, cache, rates) == pytest.approx(1e3 / gbps), what
    assert limit_ms({}, cache, rates) is None
    at_home = Rates(device=100, dram=20, gather=10)
    assert limit_ms({"transfer": 10**9}, cache, at_home) == pytest.approx(50)


@pytest.mark.parametrize("kind", ["sketch", "auto"])
@pytest.mark.parametrize(("later", "in_8_bits"), [(0, False), (37, False), (300, True)])
def test_a_sketch_reads_codes_and_later_keys_as_they_are_scored(
    kind: str, later: int, in_8_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "auto":  # whatever this machine would choose
        monkeypatch.setattr(_auto_choice, "cheapest", lambda costs, pace: (costs[0].kind, "wanted"))
        if engine_state().isa is None:
            pytest.skip("without an engine nothing is timed")
    always = {"min_keys": 1, "gain": 0, "target_recall": 1e-6, "target_mass": 1e-6}
    always |= {"graph_tokens": 0} if kind == "auto" else {}
    model = load_model("random:tiny", device="cpu", dtype="float32")
    config = hkv.HybridConfig(
        method="hybrid",
        cold={"index": sized(kind, codes="64", num_rerank=10, **always), "top_k": 10},
        **{"window_tokens": 32, "sink_tokens": 16, "spare_tokens": 0, "index_build": "wait"},
    )
    with hkv.attach(model, config) as runtime, torch.inference_mode():
        cache = runtime.cache()
        model(torch.randint(0, 500, (1, 700)), **passing(cache))
        if later:
            model(torch.randint(0, 500, (1, later)), **passing(cache))
        serving = [head["serves"] for head in cache.kv.layers.describe_indexes()]
        (stored,) = {len(row.cold) for row in every(cache)}
        cache.kv.work = Work()
        model(torch.tensor([[7]]), **passing(cache))
        read = cache.kv.work.search_bytes
    assert serving == ["sketch"] * 4
    coded, row = 640, 16 * 4  # of 700 tokens, on whole pages before the window
    assert (stored > coded) == bool(later)
    head, beyond = coded * 8 + 3 * 10 * row, stored - coded  # 64 B at 128 channels, of 16
    if in_8_bits:
        head += 17 * -(-beyond // 16) * 16 + 4 * (2 * 16 + 256) + 3 * 42 * row
    else:
        head += beyond * row
    maps = read - 4 * head
    assert 0 < maps <= 4 * 16 * 4 * 32, "what turns a query of 16 channels into codes"


def test_a_trace_nests_step_layer_and_phase() -> None:
    asked = ProfileArguments.of(
        {**TINY, **SMALL, "contexts": (200,), "methods": ("flat", "full"), "settings": SLIM}
    )
    kept: list[tuple[str, Sequence[TraceSpan]]] = []
    list(sweep(open_bench(asked), keep=lambda row, spans: kept.append((row.method, spans))))
    trace = chrome_trace(kept, {"model": "tiny"})
    assert json.loads(json.dumps(trace)) == trace
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["flat", "full"]
    events = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 0]
    chain = ["step", "forward", "layer 1", "attention 1", "search"]
    inner = [e for e in events if e["cat"] == "search" and e["args"]["layer"] == 1]
    assert len(inner) == len([e for e in events if e["cat"] == "step"]) == 3
    for event in inner:
        around = [e["name"] for e in events if _holds(e, event)]
        assert around == chain
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events)


def _holds(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    last = inner["ts"] + inner["dur"]
    return bool(
        outer["tid"] == inner["tid"]
        and outer["ts"] <= inner["ts"]
        and last <= outer["ts"] + outer["dur"] + 1e-6
    )


def test_a_device_has_times_of_its_own(
    monkeypatch: pytest.MonkeyPatch, measurements: list[row_module.RowMeasurement]
) -> None:
    told = 0

    class Event:
        def record(self) -> None:
            nonlocal told
            told += 1
            self.place = told

        def query(self) -> bool:
            return True

        def elapsed_time(self, end: Any) -> float:
            return 1e3 * (end.place - self.place)  # a second from one event to the next

    clock = lambda device, now: DeviceClock(Event, now())  # noqa: E731
    monkeypatch.setattr(row_module, "device_clock", clock)
    monkeypatch.setenv("HYBRID_KV_ONE_CALL", "0")  # as a device serves: op by op
    asked = ProfileArguments.of(
        {**TINY, **SMALL, "contexts": (200,), "methods": ("full",), "audit_every": 0}
    )
    row = next(iter(sweep(open_bench(asked), keep=lambda *_: None)))
    steps = measurements[0].steps
    assert steps is not None
    device = steps.device_phases_s()
    assert row.device_phases_ms.merge == 1e3 * device["merge"]
    # In each of two layers: attention begins, its parts begin and end, attention ends.
    parts = sum(steps.device_s[name] for name in ("resident_attention", "select", "merge")) / 5
    assert parts == device["resident_attention"] + device["select"] + device["merge"]
    assert device["merge"] == 2
    assert device["model"] == 3  # before, between and behind the layers
    assert {span.lane for span in measurements[0].spans} == {HOST, DEVICE}
    assert sum(steps.phases_s().values()) == pytest.approx(1e-3 * row.tpot_ms)  # type: ignore[operator]


def test_a_trace_has_a_lane_for_the_device() -> None:
    spans = [
        TraceSpan(2.0, 2.5, "merge", 0, HOST),
        TraceSpan(2.25, 2.75, "merge", 0, DEVICE),
    ]
    events = chrome_trace([("nothing", []), ("row", spans)], {})["traceEvents"]
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert set(lanes) == {HOST, DEVICE}
    device = next(e for e in events if e["ph"] == "X" and e["tid"] == lanes[DEVICE])
    assert (device["ts"], device["dur"], device["pid"]) == (250_000, 500_000, 0)


def test_a_kept_context_gives_equal_tensors() -> None:
    info = ModelInfo((LayerShape(0, 6, 2, 16), LayerShape(1, 6, 2, 16)))
    made, kept = (SyntheticContext(info, 300, max_steps=3, keep=keep) for keep in (False, True))
    for dtype in (torch.float32, torch.bfloat16):
        for first, second in zip(made.kv(1, dtype), kept.kv(1, dtype), strict=True):
            assert torch.equal(first, second)
    assert kept.kv(1, torch.bfloat16)[0] is kept.kv(1, torch.bfloat16)[0]
    assert made.kv(1, torch.bfloat16)[0] is not made.kv(1, torch.bfloat16)[0]
    assert kept.forget_kv()
    assert not kept.forget_kv()
    assert kept.kv(1, torch.bfloat16)[0] is not kept.kv(1, torch.bfloat16)[0]


def test_memory_of_a_made_up_context_is_bounded_from_above() -> None:
    info = ModelInfo((LayerShape(0, 8, 2, 128),))
    context = SyntheticContext(info, 5000, max_steps=3)
    held = context._values.nbytes + sum(
        value.nbytes
        for head in context._made
        for value in vars(head).values()
        if hasattr(value, "nbytes") and 5000 <= len(value) < 6000
    )
    assert 0 < held < context_bytes(info.layers, 5000, 2) < 3 * held


def watch_reports(tell: list[str]) -> Callable[[ProfileRow, str, int, int], None]:
    return lambda row, what, done, total: tell.append(what)


def test_nothing_is_told_while_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    put = StepWatch.put

    def heard(self: StepWatch, value: Any) -> None:
        told.append("token")
        put(self, value)

    monkeypatch.setattr(StepWatch, "put", heard)
    asked = ProfileArguments.of(
        {**TINY, **SMALL, "contexts": (50,), "methods": ("full",), "audit_every": 0}
    )
    list(sweep(open_bench(asked), watch_reports(told)))
    prompt = told.index("token")
    first = told.index("token", prompt + 1)
    assert "prefill" in told[prompt:first]
    assert told[first:] == ["token"] * (1 + 1 + 5)
