"""`methods`, `doctor`, `--help`, `--version`."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import psutil
import pytest
import torch

import hybrid_kv
from hybrid_kv.cli import examination
from hybrid_kv.cli.main import app
from hybrid_kv.cli.method_pages import common_parameters, parameters_of
from hybrid_kv.ops.native.library import ISAS
from hybrid_kv.ops.native.linear import INSTRUCTIONS
from hybrid_kv.planning.rates import Rates
from hybrid_kv.plugins import INDEXES, METHODS
from hybrid_kv.report.run import MachineGbps
from tests.cli.support import call, report_of
from tests.models.gguf_files import write
from tests.ops.fake_cudart import Code, fake_cuda

VERBS = (
    *("generate", "chat", "demo", "profile", "plan", "report", "methods", "ls", "pull", "doctor"),
)


def test_help_lists_the_verbs_and_only_those() -> None:
    text = call("--help").output
    listed = [*VERBS, "eval", "heads", "serve"]
    assert all(f"│ {verb} " in text for verb in listed)
    assert len(app.registered_commands) == len(listed)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_json_quiet_and_debug(verb: str) -> None:
    result = call(verb, "--help")
    assert result.exit_code == 0
    assert all(option in result.output for option in ("--json", "--quiet", "--debug"))
    assert f"Example: hybrid-kv {verb}" in " ".join(result.output.split())


def test_version() -> None:
    assert call("--version").output == f"hybrid-kv {hybrid_kv.__version__}\n"


def test_methods_lists_everything_registered() -> None:
    output = call("methods").output
    assert all(name in output for name in (*METHODS, *INDEXES))


def test_methods_json() -> None:
    report = report_of(call("methods", "--json", "-"))
    assert report.command == "methods"
    assert [method.name for method in report.methods] == list(METHODS)
    assert [kind.name for kind in report.indexes] == list(INDEXES)


def test_one_method_has_its_parameters() -> None:
    output = call("methods", "hybrid").output
    assert "window_tokens" in output
    assert "page_size" in output
    assert "nprobe" not in output


@pytest.mark.parametrize("registry", [METHODS, INDEXES], ids=["methods", "indexes"])
def test_every_parameter_is_explained(registry: dict[str, object]) -> None:
    silent = [
        f"{name}: {parameter.name}"
        for name in registry
        for parameter in parameters_of(registry[name].params)
        if len(parameter.meaning) < 5
    ]
    assert silent == []


def test_every_common_setting_is_explained() -> None:
    assert all(len(parameter.meaning) > 5 for parameter in common_parameters())


def test_doctor_reports_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "check_needle", lambda: examination.check_package("torch"))
    report = report_of(call("doctor", "--no-measure", "--json", "-"))
    assert report.command == "doctor"
    assert report.bandwidth_gbps is None
    checks = {check.name: check for check in report.checks}
    assert checks["torch"].state == "ok"
    assert checks["backend reference"].state == "ok"
    assert report.ram_free_bytes > 0
    assert report.devices


@pytest.mark.parametrize("switch", ["0", "1"])
def test_doctor_says_how_a_step_is_made_and_searched(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_KV_ONE_CALL", switch)
    monkeypatch.setattr(examination, "check_needle", lambda: examination.check_package("torch"))
    report = report_of(call("doctor", "--no-measure", "--json", "-"))
    checks = {check.name: check for check in report.checks}
    step, engine = checks["decode step"], checks["native engine"].state == "ok"
    assert (step.state == "ok") == (engine and switch == "1")
    said = "one call of the engine" if step.state == "ok" else "op by op"
    assert said in step.detail
    assert ("HYBRID_KV_ONE_CALL=0" in step.detail) == (switch == "0")
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=has_gpu: found)
        ahead = examination.check_look_ahead()
        assert (ahead.state == "ok") == has_gpu
        assert ("nothing would be hidden" in ahead.detail) == (not has_gpu)


def test_doctor_and_plan_count_within_the_limit_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mapped = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda _: (mapped + 10**9, mapped + 10**9))
    report = report_of(call("doctor", "--no-measure", "--json", "-"))
    assert report.command == "doctor"
    assert report.ram_free_bytes < 1.1e9
    assert report.ram_limit == "within the limit of this process (ulimit -v)"
    assert "free within the limit of this process" in " ".join(
        call("doctor", "--no-measure").stdout.split()
    )
    planned = hybrid_kv.plan("random:llama-3-8b", 8192, rates=Rates(50, 50, 20))
    assert planned.machine.host_bytes < 1.1e9


def test_doctor_says_who_sees_to_flashinfer_s_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "installed_version", lambda _: None)
    detail = examination.check_package("flashinfer").detail
    assert "hybrid-kv[flashinfer]" in detail
    assert "whether the machine is x86-64 or aarch64 with CUDA is up to you" in detail


@pytest.mark.parametrize(
    ("isa", "state", "detail"),
    [
        ("baseline", "ok", "baseline, of baseline"),
        ("none", "absent", "switched off by HYBRID_KV_ISA=none"),
        (
            "mmx",
            "missing",
            "HYBRID_KV_ISA must be one of none, baseline, avx2, avxvnni, avx512, got",
        ),
    ],
)
def test_doctor_says_which_engine_serves(
    monkeypatch: pytest.MonkeyPatch, isa: str, state: str, detail: str
) -> None:
    monkeypatch.setenv("HYBRID_KV_ISA", isa)
    result = call("doctor", "--json", "-")
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    engine = checks["native engine"]
    assert engine["state"] == state
    assert engine["detail"].startswith(detail)
    assert result.exit_code == (1 if state == "missing" else 0)


def test_doctor_says_what_bandwidths_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 10 GB/s: 8,192 tokens x 32 layers x 8 heads x 129 bytes are 27 ms."""
    rates = Rates(device=100.0, dram=10.0, gather=5.0, h2d=20.0, d2h=25.0)
    monkeypatch.setattr(examination, "measure_rates", lambda _: rates)
    report = report_of(call("doctor", "--context", "8k", "--json", "-"))
    assert report.bandwidth_gbps == MachineGbps(device=100, dram=10, gather=5, h2d=20, d2h=25)
    assert (report.model, report.context_tokens) == ("random:llama-3-8b", 8192)
    lines = {check.name: check.detail for check in report.checks}
    assert "a scan in 8 bits (258.0 MiB) takes 27.1 ms a token" in lines["host bandwidth"]
    assert "reading all keys and values (1.0 GiB) 107.4 ms" in lines["host bandwidth"]
    assert "(64.0 MiB at most) takes 13.4 ms" in lines["host gather"]
    assert "would take 53.7 ms a token, a prompt's leave in 42.9 ms" in lines["bus to the GPU"]
    assert "100 GB/s" in lines["GPU bandwidth"]
    assert lines["weights"].startswith(
        "random:llama-3-8b has 15.0 GiB bfloat16; a token reads 14.0"
    )
    assert lines["weights"].endswith("in 1.50 s from the host's memory")


def test_doctor_says_what_a_packed_model_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "tiny.gguf", kinds=("Q5_0",))
    monkeypatch.setattr(examination, "measure_rates", lambda _: Rates(10.0, 10.0, 5.0))
    report = report_of(call("doctor", "--model", str(path), "--context", "512", "--json", "-"))
    lines = {check.name: check.detail for check in report.checks}
    assert "KiB Q5_0" in lines["weights"]


@pytest.mark.parametrize(("isa", "said"), [("baseline", "plain C++"), ("none", "--dequantize")])
def test_doctor_says_which_weights_are_multiplied_packed(
    monkeypatch: pytest.MonkeyPatch, isa: str, said: str
) -> None:
    monkeypatch.setenv("HYBRID_KV_ISA", isa)
    check = examination.check_packed_weights()
    assert check.state == ("absent" if isa == "none" else "ok")
    assert said in check.detail
    assert ("Q4_0, Q4_1" in check.detail) == (isa == "baseline")
    assert set(INSTRUCTIONS) == set(ISAS)


@pytest.mark.parametrize(("nodes", "said"), [(0, "one node"), (1, "one node"), (2, "2 nodes")])
def test_doctor_counts_numa_nodes(
    nodes: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(nodes):
        (tmp_path / f"node{number}").mkdir()
    (tmp_path / "possible").touch()
    monkeypatch.setattr(examination, "_NODES", tmp_path)
    monkeypatch.setattr(examination, "measure_rates", lambda _: Rates(1.0, 1.0, 1.0))
    report = report_of(call("doctor", "--json", "-"))
    (line,) = [check for check in report.checks if check.name == "NUMA"]
    assert line.detail.startswith(said)
    assert not [check for check in report.checks if check.name == "bus to the GPU"]


def test_doctor_fails_where_something_needed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "installed_version", lambda _: None)
    result = call("doctor")
    assert result.exit_code == 1
    assert "not installed; pip install torch" in result.output
    assert "absent" in result.output  # flashinfer is optional


def test_doctor_says_whether_memory_can_be_locked_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not list(examination.check_pinned_memory())  # nothing to lock it for
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * 2**20, 8 * 2**20))
    with fake_cuda(monkeypatch) as cuda:
        (check,) = examination.check_pinned_memory()
        assert (check.name, check.state) == ("pinned memory", "ok")
        assert "limit of 8.0 MiB" in check.detail
        cuda.refuses = Code.out_of_memory
        monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
        (check,) = examination.check_pinned_memory()
        assert check.state == "absent"
        assert "CUDA refuses: out of memory (2); slow transfers" in check.detail
        assert "the system sets no limit" in check.detail
