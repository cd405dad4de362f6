"""scripts/gpu_check without a GPU: its rows, its ends, its words; on one, its measurements too."""

from __future__ import annotations

import ctypes
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
import torch

from benchmarks.gpu_check import (
    dense,
    device_memory,
    document,
    first_run,
    memops,
    plan,
    record,
    requirements,
    run,
    table,
    testing,
    timing,
)
from benchmarks.gpu_check.child import KINDS
from benchmarks.gpu_check.jobs import MARK, STATUSES, Budget, Job, make_row, run_job, run_jobs
from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.sizes import REHEARSAL
from hybrid_kv.errors import BackendUnavailable

CPU = torch.device("cpu")
ROW = {"name": "one", "status": "ok", "why": None, "settings": {"n": 3}, "values": {"us": 1.5}}
PRINT_ROW = f"print({MARK + json.dumps(ROW)!r}, flush=True)"

A_GPU = [pytest.param("cuda:0", marks=pytest.mark.gpu(real=True))]
DEVICES = ["cpu", *(A_GPU if torch.cuda.is_available() else [])]
"""An emulated device has no profiler, no events with times and no memory snapshot."""


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
    (row,) = run_job(job(), 3, command=python(code))
    assert (row["status"], row["why"]) == ("timed out", "did not end within 3 s")
    assert time.monotonic() - begin < 30
    assert ended(int((tmp_path / "pid").read_text()))


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
    (early,), (late,) = run_jobs(jobs, Budget(100, {"micro": 40}))
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "kind",
    sorted({*KINDS} - {"fault", "tests", "end_to_end", "decode_attention", "memops", "first_run"}),
)
def test_every_small_measurement_runs_with_the_rehearsals_sizes(kind: str, device: str) -> None:
    measured = rows_measured(kind, {"device": device})
    reasons = {row["why"] for row in measured if row["status"] == "skipped"}
    failed = {row["why"] for row in measured if row["status"] == "failed"}
    assert any(row["status"] == "ok" for row in measured)
    # Which of torch's back ends take a prompt's tiny float32 heads is for the device to say.
    assert not failed or (kind, device) == ("prefill_attention", "cuda:0"), failed
    assert all(("CUDA only" in why) == (device == "cpu") for why in reasons), reasons


@pytest.mark.parametrize("device", DEVICES)
def test_decode_attention_is_measured_for_whoever_is_there(device: str) -> None:
    measured = rows_measured(
        "decode_attention", {"device": device, "by": ["sdpa", "reference", "triton"]}
    )
    assert [row["status"] for row in measured if "triton" not in row["name"]] == ["ok"] * 4
    assert all(row["values"]["us"] > 0 for row in measured if row["status"] == "ok")


@pytest.mark.parametrize("device", DEVICES)
def test_systems_that_are_exact_write_the_same_tokens_end_to_end(device: str) -> None:
    tokens = {}
    for system in plan.SYSTEMS:
        settings = {"device": device, "system": system, "context": "32k", "cap_bytes": None}
        (row,) = rows_measured("end_to_end", settings)
        assert row["status"] == "ok", row["why"]
        values = row["values"]
        tokens[system] = values["token_ids"]
        assert values["tpot_ms"] > 0
        assert values["ttft_s"] > 0
        assert len(values["token_times_s"]) == values["new_tokens"] == len(tokens[system])
        assert (values["allocated_peak_bytes"] is None) == (device == "cpu")
        assert ("phases_ms" in values) == (
            system not in ("static", "static_transformers", "offloaded")
        )
    exact = [tokens[system] for system in ("full", "static", "static_transformers")]
    assert exact[0] == exact[1] == exact[2]
    assert tokens["offloaded"] == exact[0][: REHEARSAL.slow_new_tokens]


LOOKS = {look: "CUDA only" if look == "waits of a step" else None for look in first_run.LOOKS}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("look", LOOKS)
def test_every_look_of_a_first_run_is_taken(look: str, device: str) -> None:
    (row,) = rows_measured("first_run", {"device": device, "look": look})
    if device == "cpu" and LOOKS[look] is not None:
        assert (row["status"], row["why"].partition(":")[0]) == ("skipped", LOOKS[look])
        return
    assert row["status"] == "ok", row["why"]
    values = row["values"]
    if look == "agreement":
        assert values["same_tokens"] == values["tokens"] == REHEARSAL.new_tokens
        assert values["states_on_host_largest_difference"] == 0
        assert values["logits_largest_difference"] < 1e-3 * values["logits_deviation"]
    if look == "integrity":
        assert values["checked"] == ["prompt and steps", "crop", "fork"]
        assert values["compared_rows"] == 2 * 2 * 64
        assert values["different_values"] == 0
    if look == "prefill by layer":
        assert len(values["layers"]) == 2
        assert all(layer["seal_s"] > 0 for layer in values["layers"])
    if look == "times of steps":
        assert values.keys() == {"building", "built"}


def test_the_looks_are_jobs_of_their_own() -> None:
    found = plan.jobs(["first"], device="cpu", rehearse=True, cap_bytes=None)
    assert {job.settings["look"] for job in found if job.kind == "first_run"} == set(LOOKS)
    assert [job.kind for job in found[:2]] == ["facts", "kernels"]
    threads = {job.environment.get("HYBRID_KV_THREADS") for job in found} - {None}
    assert threads == {"1", "8", "16", "32"}
    assert found[-1].name == "a long answer"


def test_the_offloaded_cache_is_filled_where_its_prompt_would_take_too_long() -> None:
    settings = {"device": "cpu", "system": "offloaded", "context": "128k", "cap_bytes": None}
    (row,) = rows_measured("end_to_end", settings)
    assert row["values"]["filled"]
    assert row["values"]["ttft_s"] is None
    assert row["values"]["tpot_ms"] > 0


def rows_measured(kind: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    out = io.StringIO()
    module = import_module(f"benchmarks.gpu_check.{KINDS[kind]}")
    module.measure(Recorder(out), REHEARSAL, {"rehearse": True, **settings})
    return rows_of(out.getvalue())


def test_a_buffer_in_place_holds_what_a_growing_cache_holds() -> None:
    layer = dense.InPlaceLayer(41)
    parts = [[torch.randn(1, 3, n, 8) for _ in "kv"] for n in (37, 1, 3)]
    for k, v in parts:
        keys, values = layer.update(k, v)
    assert torch.equal(keys, torch.cat([k for k, _ in parts], 2))
    assert torch.equal(values, torch.cat([v for _, v in parts], 2))
    assert layer.get_seq_length() == 41


# What only a GPU does, with stand-ins for it -----------------------------------------------------


class FakeCuda:
    """As much of torch.cuda as timing and the cap use; device time is 3 ms a batch."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.device = lambda device: _Nothing()
        self.Event = lambda enable_timing: SimpleNamespace(
            record=lambda: self.log.append("record"), elapsed_time=lambda end: 3.0
        )

    def synchronize(self, device: Any = None) -> None:
        self.log.append("synchronize")

    def _sleep(self, cycles: int) -> None:
        self.log.append(("sleep", cycles))

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(total_memory=140 * 2**30)

    def set_per_process_memory_fraction(self, fraction: float, device: Any) -> None:
        self.log.append(fraction)


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(timing.torch, "cuda", fake)
    return fake


GPU = SimpleNamespace(type="cuda")


def test_device_time_is_between_events_behind_a_sleep_that_outlasts_the_launches(
    cuda: FakeCuda,
) -> None:
    called = []
    values = timing.timed(
        [lambda: called.append(1), lambda: time.sleep(0.001)],
        GPU,  # type: ignore[arg-type]
        rounds=3,
        least=6,
    )
    assert values["us"] == 3e3 / 6
    assert values["issue_us"] >= 500
    last = cuda.log[-4:]
    assert [entry if isinstance(entry, str) else entry[0] for entry in last] == [
        *("sleep", "record", "record", "synchronize")
    ]
    assert last[0][1] >= 0.003 * 2e9
    assert len(called) == 1 + 3 * (3 + 3)


def test_the_cap_leaves_room_for_the_context(cuda: FakeCuda) -> None:
    limit = device_memory.cap_device(GPU, 24 * 2**30)  # type: ignore[arg-type]
    assert limit == 24 * 2**30 - plan.CONTEXT_BYTES
    assert cuda.log == [limit / (140 * 2**30)]
    assert device_memory.cap_device(GPU, None) is None  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cap must be above"):
        device_memory.cap_device(GPU, plan.CONTEXT_BYTES)  # type: ignore[arg-type]


def test_nothing_is_capped_on_the_cpu() -> None:
    assert device_memory.cap_device(CPU, 2**30) is None


@pytest.mark.gpu(real=True)
def test_an_allocation_beyond_the_cap_is_refused() -> None:
    device = torch.device("cuda:0")
    try:
        device_memory.cap_device(device, plan.CONTEXT_BYTES + 2**30)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**31, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


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


def test_without_a_gpu_it_says_so_in_one_sentence(tmp_path: Path) -> None:
    ended = gpu_check("--out", str(tmp_path / "none"))
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        "gpu_check: this machine has no NVIDIA GPU that torch can use; --rehearse needs none"
    )
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_rehearsal_goes_on_behind_a_crash_and_a_hang_and_cannot_be_taken_for_a_result(
    tmp_path: Path,
) -> None:
    chosen = ["--part", plan.FAULTS, "--part", "32k", "--system", "hybrid", "--system", "static"]
    code = run.main(["--rehearse", *chosen, "--out", str(tmp_path)])
    assert code == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        *("gpu_check-rehearsal.json", "gpu_check-rehearsal.md")
    }
    page = (tmp_path / "gpu_check-rehearsal.md").read_text()
    assert page.startswith(f"# {document.REHEARSAL_LABEL}\n")
    found = json.loads((tmp_path / "gpu_check-rehearsal.json").read_text())
    assert found["rehearsal"]
    assert found["label"] == document.REHEARSAL_LABEL
    assert {"benchmark", "schema", "date", "commit", "machine", "model", "cap_bytes"} <= set(found)
    assert {"packages", "engine", "elapsed_s", "rows"} <= set(found)
    assert {"environment", "cuda", "device"} <= set(found["machine"])
    by_name = {row["name"]: row for row in found["rows"]}
    assert by_name["deliberate crash"]["why"] == "crashed: SIGABRT"
    assert by_name["deliberate hang"]["status"] == "timed out"
    for name in ("hybrid", "static"):
        assert by_name[name]["status"] == "ok", by_name[name]["why"]
        assert by_name[name]["values"]["tpot_ms"] > 0
    keys = {"part", "job", "name", "status", "why", "settings", "values"}
    for row in found["rows"]:
        assert keys <= set(row)
        assert row["status"] in STATUSES
