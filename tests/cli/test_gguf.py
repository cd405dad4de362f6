"""A GGUF file as MODEL: what loading it says on the terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="the package gguf is not installed")

from tests.cli.support import words_of_ours
from tests.models.gguf_files import write


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def generate(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    asked = ("--prompt-tokens", "37", "--max-new-tokens", "2", "--device", "cpu")
    command = (sys.executable, "-m", "hybrid_kv", "generate", str(file), *asked, *options)
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_packed_weights_are_no_news(file: Path) -> None:
    assert words_of_ours(generate(file, "--quiet").stderr) == ""


def test_the_memory_that_unpacked_weights_take_is_one_line(file: Path) -> None:
    lines = generate(file, "--dequantize").stderr.splitlines()
    said = [line for line in lines if "unpacked from GGUF to bfloat16" in line]
    assert len(said) == 1
    assert said[0].startswith("hybrid-kv: the weights of ")
    assert words_of_ours(generate(file, "--dequantize", "--quiet").stderr) == ""
