"""A GGUF file as MODEL: what loading it says on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="the package gguf is not installed")

from hybrid_kv.api import planning
from hybrid_kv.planning.rates import Rates
from tests.cli.support import call, refused, report_of, run_of
from tests.models.gguf_files import write


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def generate(file: Path, *options: str) -> str:
    """What is said on stderr."""
    asked = ("--prompt-tokens", "37", "--max-new-tokens", "2", "--device", "cpu")
    result = call("generate", file, *asked, *options)
    assert result.exit_code == 0, result.output
    return result.stderr


def test_packed_weights_are_no_news(file: Path) -> None:
    assert generate(file, "--quiet") == ""
    assert "packed" not in generate(file)


def test_the_memory_that_unpacked_weights_take_is_one_line(file: Path) -> None:
    said = generate(file, "--dequantize")
    (line,) = [line for line in said.splitlines() if "unpacked from GGUF to bfloat16" in line]
    assert line.startswith("hybrid-kv: the weights of ")
    assert "%|" not in said, "a bar"
    assert generate(file, "--dequantize", "--quiet") == ""


def weights_planned(file: Path, *options: str) -> int:
    asked = ("--context", "200", "--device", "cpu", "--json", "-")
    report: Any = report_of(call("plan", file, *asked, *options))
    return int(report.weight_bytes)


def test_a_plan_counts_what_a_run_would_hold(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "measure_rates", lambda _: Rates(50, 50, 20))
    packed, plain = weights_planned(file), weights_planned(file, "--dequantize")
    assert packed < 1.2 * file.stat().st_size < plain
    error = refused("plan", file, "--context", "200", "--exact-products")
    assert error.startswith("error: --exact-products changes nothing that is planned")
    error = refused("plan", "random:llama-3-8b", "--context", "200", "--dequantize")
    assert error == (
        "error: dequantize is for weights that are stored packed (GGUF, awq, compressed-tensors, "
        "gptq, mxfp4), got MODEL 'random:llama-3-8b'; leave it out"
    )


@pytest.mark.parametrize("option", ["--dequantize", "--exact-products"])
def test_a_profile_measures_the_products_that_are_asked_for(file: Path, option: str) -> None:
    asked = ("--context", "64", "--methods", "full", "--new-tokens", "2", "--device", "cpu")
    run = run_of(call("profile", file, *asked, option, "--audit-every", "0", "--json", "-"))
    name = option.removeprefix("--").replace("-", "_")
    assert run.arguments[name] is True
    error = refused("profile", "needle", *asked, option)
    assert error.startswith(
        f"error: {name} is for weights that are stored packed (GGUF, awq, compressed-tensors, "
        "gptq, mxfp4), got MODEL 'needle'"
    )
