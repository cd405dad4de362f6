"""scripts/gpu_check without a GPU: its jobs on an emulated device, its rows, ends and words."""

from __future__ import annotations

import ctypes
import io
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from packaging.requirements import Requirement as PipRequirement
from torch.autograd import DeviceType

import hybrid_kv as hkv
from benchmarks.gpu_check import (
    busy,
    child,
    constants,
    dense,
    device_memory,
    document,
    kernels,
    memops,
    plan,
    record,
    requirements,
    right,
    run,
    table,
    testing,
    timing,
)
from benchmarks.gpu_check.jobs import MARK, Budget, Job, make_row, run_job, run_jobs
from benchmarks.gpu_check.limits import Difference
from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.sizes import TINY
from hybrid_kv.errors import BackendUnavailable
from hybrid_kv.ops.dispatch import Ops
from hybrid_kv.planning import rates
from hybrid_kv.runtime import select
from hybrid_kv.types import PartialAttention
from tests import forked
from tests.device import emulated, why_not

CPU = torch.device("cpu")
ROW = {"name": "one", "status": "ok", "why": None, "settings": {"n": 3}, "values": {"us": 1.5}}
PRINT_ROW = f"print({MARK + json.dumps(ROW)!r}, flush=True)"

needs_device = pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")
without_kernels = pytest.mark.filterwarnings(
    *(f"ignore::hybrid_kv.errors.{name}" for name in ("BackendWarning", "DeviceSelectWarning"))
)
"""Where Triton is not interpreted torch serves the device, and says so."""


def job(**changes: Any) -> Job:
    return Job(**{"part": "micro", "name": "a job", "kind": "fault", **changes})


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(MARK)) for line in text.splitlines()]


# Jobs and their ends ---------------------------------------------------------------------------


def test_rows_come_with_the_settings_of_their_job_and_chatter_is_left_out() -> None:
    code = f"print('loading'); {PRINT_ROW}; print('done')"
    (row,) = run_job(job(settings={"device": "cpu"}), 30, command=python(code))
    assert (row["part"], row["job"], row["name"], row["status"]) == ("micro", "a job", "one", "ok")
    assert row["settings"] == {"device": "cpu", "n": 3}
    assert row["values"] == {"us": 1.5}


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("import os; os.abort()", "crashed: SIGABRT"),
        ("import os; os.kill(os.getpid(), 9)", "crashed: SIGKILL, perhaps for memory"),
        ("raise ValueError('too wide')", "ended with code 1: ValueError: too wide"),
        ("import sys; sys.exit(3)", "ended with code 3: it said nothing"),
    ],
)
def test_a_job_that_ends_badly_keeps_its_rows_and_says_how(end: str, why: str) -> None:
    kept, last = run_job(job(), 30, command=python(f"{PRINT_ROW}\n{end}"))
    assert kept["status"] == "ok"
    assert (last["name"], last["status"], last["why"]) == ("a job", "failed", why)


def test_a_job_without_a_row_has_failed() -> None:
    (row,) = run_job(job(), 30, command=python("print('all is well')"))
    assert (row["status"], row["why"]) == ("failed", "ended without a row")


def test_a_job_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    sleep = f"{sys.executable!r}, '-c', 'import time; time.sleep(60)'"
    code = f"import subprocess, pathlib; p = subprocess.Popen([{sleep}])\n"
    code += f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(p.pid)); p.wait()"
    begin = time.monotonic()
    (row,) = run_job(job(), 1, command=python(code))
    assert (row["status"], row["why"]) == ("timed out", "did not end within 1 s")
    assert time.monotonic() - begin < 30
    assert ended(int((tmp_path / "pid").read_text()))


def test_a_row_is_handed_on_while_its_job_goes_on(tmp_path: Path) -> None:
    """The job goes on only when somebody has had its first row."""
    go = tmp_path / "go"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)"
    rows = run_job(job(), 60, command=python(f"{PRINT_ROW}\n{wait}\n{PRINT_ROW}"))
    assert next(rows)["status"] == "ok"
    go.touch()
    assert [row["status"] for row in rows] == ["ok"]


def ended(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":  # nobody has asked for its exit code yet
            return True
        time.sleep(0.05)
    return False


def test_what_no_time_is_left_for_is_listed() -> None:
    jobs = [job(name="early", least_s=50), job(part="128k", name="late", least_s=200)]
    early, late = run_jobs(jobs, Budget(100, {"micro": 40}))
    assert (early["status"], late["status"]) == ("not run", "not run")
    assert early["why"] == "time: 40 s are left, this needs 50 s or more"
    assert late["why"].endswith("this needs 200 s or more")


def test_a_part_that_used_up_its_share_leaves_the_rest_to_others() -> None:
    budget = Budget(100, {"micro": 40})
    budget.charge("micro", 35)
    budget.charge("128k", 35)
    assert budget.left_s("micro") == 5
    assert 99 < budget.left_s("128k") <= 100


# Rows ------------------------------------------------------------------------------------------


def failing(error: BaseException) -> Callable[[], dict[str, Any]]:
    def work() -> dict[str, Any]:
        raise error

    return work


def test_a_row_that_fails_says_why_and_the_next_one_is_measured() -> None:
    out = io.StringIO()
    recorder = Recorder(out)
    recorder.measure("memory", failing(torch.OutOfMemoryError("tried to allocate 9 GiB\nmore")))
    recorder.measure("here", failing(record.NotHere("no pytest")))
    recorder.measure("backend", failing(BackendUnavailable("no GPU")))
    recorder.measure("fine", lambda: {"us": 2.0}, tokens=37)
    assert [(row["name"], row["status"], row["why"]) for row in rows_of(out.getvalue())] == [
        ("memory", "failed", "out of device memory: tried to allocate 9 GiB"),
        ("here", "skipped", "no pytest"),
        ("backend", "skipped", "no GPU"),
        ("fine", "ok", None),
    ]


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (Difference(0.25, 0.1), "a_difference is 0.25, the limit is 0.1"),
        (Difference(float("nan"), 0.1), "a_difference is nan, the limit is 0.1"),
        (0.0, "a_difference is 0.0 and has no limit"),
    ],
)
def test_a_difference_beyond_its_limit_fails_the_row_and_is_kept(found: Any, why: str) -> None:
    out = io.StringIO()
    Recorder(out).measure("one", lambda: {"a_difference": found, "us": 2.0})
    (row,) = rows_of(out.getvalue())
    assert (row["status"], row["why"], row["values"]["us"]) == ("failed", why, 2.0)


# Jobs on an emulated device --------------------------------------------------------------------

JOBS = plan.jobs([*plan.PARTS, "micro", "long"], device="cuda:0", sizes="tiny", cap_bytes=24 << 30)
LACKING = (
    "CUDA only", "Triton's kernel", "must not copy from the host", "flashinfer", "nvidia-smi",
    "stream memory operations", "no kernels on an emulated device",
)  # fmt: skip
"""Words of the reasons why a row is skipped where there is no GPU and no kernel is interpreted."""
ON_A_GPU_ALONE = (
    "tests", "memops", "decode attention of flashinfer", "prefill attention",
    "steps, 4 threads", "a long answer", "device select",
)  # fmt: skip
"""Jobs of which nothing is left without a driver, FlashInfer or fused attention by name; and those
that do once more what `steps` and `kernels` do."""


def rehearsed(some: Job) -> list[dict[str, Any]]:
    out = io.StringIO()
    child.measure(some.kind, some.settings, Recorder(out))
    return rows_of(out.getvalue())


@needs_device
@without_kernels
@pytest.mark.parametrize(
    "some", [pytest.param(one, id=one.name) for one in JOBS if one.name not in ON_A_GPU_ALONE]
)
def test_a_job_runs_on_an_emulated_device(some: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_HOST_BUFFER_BYTES", "_DEVICE_BUFFER_BYTES"):
        monkeypatch.setattr(rates, name, 2**22)  # the rates of no device are of use
    if some.kind == "steps":
        some = replace(some, settings={**some.settings, "contexts": ["128k"]})
    with emulated(schedule="late"):
        rows = rehearsed(some)
    if some.kind == "steps":
        assert rows[0]["values"]["indexes"].keys() == {"device sketch"}
    assert any(row["status"] == "ok" for row in rows)
    for row in rows:
        assert row["status"] in ("ok", "skipped"), row["why"]
        assert row["status"] == "ok" or any(words in row["why"] for words in LACKING), row["why"]


def test_what_is_run_fits_into_twenty_minutes_and_values_come_first() -> None:
    assert sum(plan.SHARES_S.values()) <= 1200
    found = plan.jobs(plan.PARTS, device="cuda:0", sizes="full", cap_bytes=None)
    assert [one.part for one in found] == sorted((one.part for one in found), key=plan.PARTS.index)
    assert {one.kind for one in found} >= {"kernels", "right", "constants", "steps", "prompt"}
    threads = {one.environment.get("HYBRID_KV_THREADS") for one in found if one.kind == "steps"}
    assert threads == {None, "4"}


@needs_device
@without_kernels
def test_the_wrong_row_is_found_and_its_figure_is_in_the_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when rows that share entries shared a capture: each got the last one's result."""
    plain = select._attend_row
    model, ids = right.model_and_ids(TINY)
    config = hkv.HybridConfig(**right.ON_DEVICE)

    def wrong(step: Any, row: Any, budget: Any) -> PartialAttention:
        return plain(step, step.layer.rows[-1], budget)

    out = io.StringIO()
    with emulated():
        model = model.to("cuda")
        for name, attend in (("right", plain), ("wrong", wrong)):
            monkeypatch.setattr(select, "_attend_row", attend)
            work = lambda: right.rows_of_one_prompt(model, ids, config)  # noqa: E731
            Recorder(out).measure(name, work)
    fine, bad = rows_of(out.getvalue())
    assert fine["status"] == "ok", fine["why"]
    assert bad["status"] == "failed"
    assert bad["why"].startswith("logits_largest_difference is ")
    assert f"the limit is {bad['values']['logits_largest_difference_limit']:.4g}" in bad["why"]


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Ops.merge

    def wrong(self: Ops, parts: Any, dtype: torch.dtype) -> PartialAttention:
        merged = plain(self, parts, dtype)
        return merged if self.backend == "reference" else merged._replace(out=merged.out + 0.01)

    out = io.StringIO()
    for merge in (plain, wrong):
        monkeypatch.setattr(Ops, "merge", merge)
        Recorder(out).measure("merge", lambda: kernels.merge(TINY, CPU, torch.float32))
    fine, bad = rows_of(out.getvalue())
    assert (fine["status"], bad["status"]) == ("ok", "failed")
    assert "largest_difference is 0.01, the limit is 0.002" in bad["why"]


@needs_device
def test_a_kernel_is_counted_once_and_not_in_the_operator_that_launched_it() -> None:
    with emulated(schedule="late"):
        x = torch.ones(300, 300, device="cuda")
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work = busy.profiled(lambda: [x @ x, x.add_(1)])
        whole_us = 1e6 * (time.perf_counter() - begin)
    assert (work.num_kernels, work.num_launches, work.num_copies) == (2, 2, 0)
    kernels_us = sum(us for times in work.kernel_us.values() for us in times)
    assert 0 < work.busy_us <= whole_us
    assert work.busy_us == pytest.approx(kernels_us)


def profiled_event(name: str, kind: DeviceType, begin: float, end: float, **more: Any) -> Any:
    times = SimpleNamespace(start=begin, end=end, elapsed_us=lambda: end - begin)
    return SimpleNamespace(
        **{"name": name, "device_type": kind, "time_range": times, "is_user_annotation": False},
        **more,
    )


def test_streams_that_work_at_once_and_named_ranges_are_not_counted_twice() -> None:
    named = profiled_event("a range", DeviceType.CUDA, 0, 100)
    named.is_user_annotation = True
    work = busy.device_work(
        [
            named,
            profiled_event("aten::mm", DeviceType.CPU, 0, 2),
            profiled_event("cudaLaunchKernel", DeviceType.CPU, 1, 2),
            profiled_event("cudaGraphLaunch", DeviceType.CPU, 2, 3),
            profiled_event("mm", DeviceType.CUDA, 10, 30),
            profiled_event("mm", DeviceType.CUDA, 20, 40),
            profiled_event("Memcpy HtoD", DeviceType.CUDA, 50, 55),
        ]
    )
    assert work.busy_us == 35
    assert work.kernel_us == {"mm": [20, 20]}
    assert (work.num_kernels, work.num_copies, work.num_launches, work.num_graphs) == (2, 1, 1, 1)


@needs_device
def test_a_graph_of_many_nodes_has_each_of_them() -> None:
    with emulated():
        values = constants.replayed(torch.device("cuda:0"), TINY, 7)
    assert values["kernels"] == 7


def test_systems_that_are_exact_write_the_same_tokens_end_to_end() -> None:
    tokens = {}
    for system in ("full", "static", "static_transformers", "offloaded"):
        settings = {"device": "cpu", "system": system, "context": "32k", "cap_bytes": None}
        (row,) = rows_measured("end_to_end", settings)
        assert row["status"] == "ok", row["why"]
        tokens[system] = row["values"]["token_ids"]
        assert row["values"]["tpot_ms"] > 0
    exact = [tokens[system] for system in ("full", "static", "static_transformers")]
    assert exact[0] == exact[1] == exact[2]
    assert tokens["offloaded"] == exact[0][: TINY.slow_new_tokens]


def rows_measured(kind: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    out = io.StringIO()
    child.measure(kind, {"sizes": "tiny", **settings}, Recorder(out))
    return rows_of(out.getvalue())


def test_a_buffer_in_place_holds_what_a_growing_cache_holds() -> None:
    layer = dense.InPlaceLayer(41)
    parts = [[torch.randn(1, 3, n, 8) for _ in "kv"] for n in (37, 1, 3)]
    for k, v in parts:
        keys, values = layer.update(k, v)
    assert torch.equal(keys, torch.cat([k for k, _ in parts], 2))
    assert torch.equal(values, torch.cat([v for _, v in parts], 2))
    assert layer.get_seq_length() == 41


# What only a GPU does ----------------------------------------------------------------------------


@needs_device
def test_device_time_is_between_events_behind_a_sleep_that_outlasts_the_launches() -> None:
    called = []
    with emulated() as gpu, gpu.recorded() as told:
        x = torch.ones(3, device="cuda")
        calls = [lambda: called.append(x.add_(1)), lambda: time.sleep(0.001)]
        values = timing.timed(calls, torch.device("cuda:0"), rounds=3, least=6)
    assert len(called) == 1 + 3 * (3 + 3)
    assert values["us"] >= values["issue_us"] / 2 >= 250  # nothing runs while the host sleeps
    names = [launch.name for launch in told]
    (*_, sleep) = (launch for launch in told if launch.name == "spin_kernel")
    assert names[-4:] == ["spin_kernel", *["aten.add_.Tensor"] * 3]
    assert sleep.operands[0] >= 0.003 * 2e9


@needs_device
def test_an_allocation_beyond_the_cap_is_refused() -> None:
    device, cap = torch.device("cuda:0"), plan.CONTEXT_BYTES + 2**20
    with emulated():
        assert device_memory.cap_device(device, cap) == 2**20
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**21, dtype=torch.uint8, device=device)
        torch.empty(2**19, dtype=torch.uint8, device=device)
        assert device_memory.cap_device(device, None) is None
        with pytest.raises(ValueError, match="cap must be above"):
            device_memory.cap_device(device, plan.CONTEXT_BYTES)


def test_nothing_is_capped_on_the_cpu() -> None:
    assert device_memory.cap_device(CPU, 2**30) is None


class Driver:
    """Answers at once, or refuses, or never answers."""

    def __init__(self, words: torch.Tensor, code: int = 0, answers: bool = True) -> None:
        self._words, self._code, self._answers = words, code, answers
        self.asked: list[tuple[int, int]] = []

    def cuStreamWaitValue32(self, stream: Any, address: Any, turn: Any, flags: Any) -> int:  # noqa: N802
        self.asked.append((address.value - self._words.data_ptr(), turn.value))
        return self._code

    def cuStreamWriteValue32(self, stream: Any, address: Any, turn: Any, flags: Any) -> int:  # noqa: N802
        if self._answers:
            ctypes.c_uint32.from_address(address.value).value = turn.value
        return 0


def test_a_round_trip_waits_for_the_word_of_its_own_turn() -> None:
    words = torch.zeros(32, dtype=torch.int32)
    driver = Driver(words)
    trip = memops.RoundTrip(driver, 0, words.data_ptr())
    for turn in (1, 2, 3):
        trip.run()
        assert (int(words[0]), int(words[16])) == (turn, turn)
    assert driver.asked == [(0, 1), (0, 2), (0, 3)]
    trip.release()
    assert int(words[0]) > 3


def test_a_driver_that_refuses_or_never_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memops, "_PATIENCE_S", 0.05)
    words = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="cuStreamWaitValue32 returned CUDA error 801"):
        memops.RoundTrip(Driver(words, code=801), 0, words.data_ptr()).run()
    with pytest.raises(RuntimeError, match="no answer from the device"):
        memops.RoundTrip(Driver(words, answers=False), 0, words.data_ptr()).run()


@pytest.mark.gpu(real=True)
def test_the_memory_operations_of_a_stream_answer() -> None:
    (row,) = rows_measured("memops", {"device": "cuda:0"})
    assert row["status"] == "ok", row["why"]


# The report --------------------------------------------------------------------------------------


def test_outcomes_of_tests_are_counted_with_reasons(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite><testcase classname='a' name='fine'/>"
        "<testcase classname='a' name='bad'><failure message='1 is not 2'/></testcase>"
        "<testcase classname='b' name='off'><skipped message='no FlashInfer'/></testcase>"
        "<testcase classname='b' name='broken'><error message='no module'/></testcase>"
        "</testsuite></testsuites>"
    )
    failures: list[tuple[str, str]] = []
    assert testing.read_report(report, failures) == {
        **{"passed": 1, "failed": 2, "skipped": 1},
        "skip_reasons": {"no FlashInfer": 1},
    }
    assert failures == [("a::bad", "1 is not 2"), ("b::broken", "no module")]


def row_of(part: str, name: str, status: str, **values: Any) -> dict[str, Any]:
    return make_row(part, name, name, status, None if status == "ok" else "why", {}, values)


def test_a_second_call_replaces_what_it_measured_and_keeps_the_rest() -> None:
    before = [row_of("micro", "a", "ok", us=1), row_of("tests", "t", "failed")]
    now = [
        row_of("micro", "a", "not run"),
        row_of("tests", "t", "ok"),
        row_of("128k", "b", "not run"),
    ]
    joined = document.joined(before, now)
    assert [(row["name"], row["status"]) for row in joined] == [
        *(("a", "ok"), ("t", "ok"), ("b", "not run"))
    ]


def test_results_of_another_machine_are_not_mixed_in(tmp_path: Path) -> None:
    kept = {"schema": document.SCHEMA, "label": "memory-capped NVIDIA H200", "rows": [ROW]}
    (tmp_path / "gpu_check.json").write_text(json.dumps(kept))
    same = document.read(tmp_path, rehearse=False, label=kept["label"])
    assert same == [ROW]
    assert document.read(tmp_path, rehearse=True, label="x") == []
    with pytest.raises(ValueError, match="choose another --out"):
        document.read(tmp_path, rehearse=False, label="memory-capped NVIDIA L4")


def test_a_label_never_names_a_card_that_was_not_there() -> None:
    device = {"name": "NVIDIA H200"}
    assert document.label_of(device, False) == "memory-capped NVIDIA H200"
    assert document.label_of(device, True) == document.REHEARSAL_LABEL
    assert document.folder_name("NVIDIA H200 (NVL)", "2026-11-21") == "nvidia-h200-nvl-2026-11-21"


def test_the_table_has_phases_whatever_they_are_called_and_the_reasons() -> None:
    values = {"tpot_median_ms": 44.25, "phases_ms": {"wait": 3.0, "select": 0.0}}
    values |= {"allocated_peak_bytes": 22 * 2**30, "indexes": {"graph, build done": 256}}
    about = {"system": "hybrid", "cap_bytes": 24 * 2**30, "tokens": 131072}
    rows = [
        {**make_row("128k", "h", "h", "ok", None, about, values)},
        {**make_row("128k", "s", "s", "failed", "crashed: SIGSEGV", about, {})},
        row_of("micro", "copy | d2h", "ok", us=7.123456, gbps=None),
    ]
    text = table.markdown({**about_run(), "rows": rows})
    assert text.startswith("# memory-capped NVIDIA H200\n")
    assert "End to end, 131072 tokens" in text
    assert "| hybrid | 24 GiB | – | – | – | 44.25 | wait 3 | 22.00, –, – | –, – |" in text
    assert "256 heads by graph, build done" in text
    assert "failed: crashed: SIGSEGV" in text
    assert "| copy / d2h |  | us 7.123 |  |" in text
    assert "held to 23.4 GiB" in text


def about_run() -> dict[str, Any]:
    environment = {"versions": {"torch": "2.11"}, "cpu": {"model": "a", "threads": 16}}
    device = {"name": "NVIDIA H200", "memory_bytes": 2**37, "capability": "9.0"}
    return {
        **{"label": "memory-capped NVIDIA H200", "rehearsal": False, "date": "2026-11-21"},
        **{"commit": None, "model": "random:llama-3-8b", "elapsed_s": 99.0, "engine": "avx512"},
        **{"cap_bytes": 24 * 2**30, "limit_bytes": int(23.4 * 2**30)},
        "machine": {
            **{"environment": {**environment, "ram_bytes": 2**37}, "device": device},
            **{"cuda": "13.0", "cudnn": None},
        },
    }


# What must be there ------------------------------------------------------------------------------


def test_a_missing_package_is_named_with_a_way_to_bring_it() -> None:
    wanted = [
        requirements.Requirement("torch", "torch", "everything", (999,)),
        requirements.Requirement("pydantic", "no_such_module", "settings"),
        requirements.Requirement("faiss-cpu", "no_such_module", "ivf", for_all=False),
        requirements.Requirement("numpy", "numpy", "the package", (1,)),
    ]
    found = requirements.find_packages(wanted)
    assert [finding.state for finding in found] == ["missing", "missing", "absent", "ok"]
    assert "999 at least is needed" in found[0].detail
    assert requirements.missing(found) == ["torch", "pydantic"]
    text = requirements.instructions(found)
    assert "torch is not carried along" in text
    assert "\n        --platform manylinux2014_x86_64 pydantic\n" in text
    assert requirements.instructions(found[2:]) == ""


def test_what_the_runtime_imports_is_among_the_requirements() -> None:
    """A dependency that joins pyproject.toml must be thought of here as well."""
    text = (requirements.ROOT / "pyproject.toml").read_text()
    listed = text.split("\ndependencies = [")[1].split("]\n")[0]
    names = {line.strip(' ",').split(">")[0] for line in listed.splitlines() if line.strip()}
    assert names <= {requirement.package for requirement in requirements.REQUIREMENTS}


def test_what_a_gpu_needs_is_installed_beside_the_oldest_torch() -> None:
    """Wheels of torch with CUDA pin a version of Triton: pip found none for torch 2.9 and ours."""
    project = tomllib.loads((requirements.ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (kernels_need,) = map(PipRequirement, extras["triton"])
    (ours,) = (PipRequirement(one) for one in project["dependencies"] if one.startswith("torch>"))
    for torch_version, its_triton in (("2.9.0", "3.5.0"), ("2.9.1", "3.5.1"), ("2.11.0", "3.6.0")):
        assert ours.specifier.contains(torch_version)
        assert kernels_need.specifier.contains(its_triton)
    least = {one.package: one.least for one in requirements.REQUIREMENTS}
    for name, wanted in (("torch", ours), ("triton", kernels_need)):
        assert wanted.specifier.contains(".".join(map(str, least[name])))


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"got .* without any"):
        requirements.unpack_wheels(tmp_path, tmp_path / "target")


def test_a_carried_wheel_can_be_imported_here_and_in_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "before")
    about, name = "carried_thing-1.0.dist-info", "carried_thing-1.0-py3-none-any.whl"
    with ZipFile(tmp_path / name, "w") as wheel:
        wheel.writestr("carried_thing.py", "")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        text = "Metadata-Version: 2.1\nName: carried-thing\nVersion: 1.0\n"
        wheel.writestr(f"{about}/METADATA", text)
        wheel.writestr(f"{about}/RECORD", "")
    target = tmp_path / "target"
    requirements.unpack_wheels(tmp_path, target)
    wanted = requirements.Requirement("carried-thing", "carried_thing", "a test", (1,))
    assert requirements.find_packages([wanted])[0].state == "ok"
    assert os.environ["PYTHONPATH"] == f"{target}{os.pathsep}before"


def test_an_engine_that_is_there_is_not_compiled_again(tmp_path: Path) -> None:
    (tmp_path / "engine_avx2.so").touch()
    found = requirements.build_engine(tmp_path)
    assert (found.state, found.detail) == ("ok", "engine_avx2")


# The command -------------------------------------------------------------------------------------


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(requirements.ROOT / "scripts" / "gpu_check"), *arguments],
        env={**os.environ, "HYBRID_KV_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_is_needed_can_be_listed_before_anything_is_imported() -> None:
    ended = gpu_check("--missing")
    assert ended.returncode == 0
    assert "pydantic" in ended.stderr


def test_without_a_gpu_it_says_so_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "probe", lambda sizes: {"device": None})
    assert run.main(["--out", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "gpu_check: this machine has no NVIDIA GPU that torch can use; --sizes tiny needs none"
    )
    assert not (tmp_path / "none").exists()


def rows_on_disk(folder: Path) -> list[dict[str, Any]]:
    path = folder / "gpu_check-rehearsal.json"
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


@pytest.fixture
def running_check(tmp_path: Path) -> Iterator[forked.Forked]:
    """A check whose first job crashes and whose second one hangs behind its first row."""
    words = ["-m", "benchmarks.gpu_check.run", "--sizes", "tiny"]
    words += ["--part", plan.FAULTS, "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(requirements.ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with forked.start(*words, cwd=requirements.ROOT, env=environment) as process:
        yield process


def test_a_check_that_is_killed_leaves_each_row_that_was_measured(
    running_check: forked.Forked, tmp_path: Path
) -> None:
    def is_hanging() -> bool:
        return any(row["job"] == "deliberate hang" for row in rows_on_disk(tmp_path))

    until = time.monotonic() + 200
    while not is_hanging():
        assert running_check.poll() is None
        assert time.monotonic() < until
        time.sleep(0.1)
    (child_pid,) = children_of(running_check.pid)
    running_check.send_signal(signal.SIGKILL)
    running_check.wait()
    assert ended(child_pid)
    rows = rows_on_disk(tmp_path)
    assert [(row["job"], row["name"], row["status"], row["why"]) for row in rows] == [
        ("deliberate crash", "before the fault", "ok", None),
        ("deliberate crash", "deliberate crash", "failed", "crashed: SIGABRT"),
        ("deliberate hang", "before the fault", "ok", None),
    ]
    page = (tmp_path / "gpu_check-rehearsal.md").read_text()
    assert page.startswith(f"# {document.REHEARSAL_LABEL}\n")
    assert "failed: crashed: SIGABRT" in page
    found = json.loads((tmp_path / "gpu_check-rehearsal.json").read_text())
    assert {"benchmark", "schema", "date", "commit", "machine", "model", "cap_bytes"} <= set(found)
    assert {"environment", "cuda", "device"} <= set(found["machine"])
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md"}


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(one) for one in text.split()]
