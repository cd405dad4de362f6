"""Arithmetic of the comparison with llama.cpp: layers, prompts, best sides, where ours is ahead."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import run


def _row(side: str, context: int, ms: float) -> dict[str, Any]:
    return {"side": side, "context_tokens": context, "threads": 1, "ms": ms, "cpu_ms": ms}


@pytest.mark.parametrize(
    ("cache_bytes", "layers"), [(0, 2), (32 * 2**20, 2), (96 * 2**20, 4), (384 * 2**20, 14)]
)
def test_the_smallest_weights_are_several_last_level_caches(cache_bytes: int, layers: int) -> None:
    assert run.enough_layers(cache_bytes) == layers


def test_a_prompt_is_all_layers_less_all_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # llama.cpp's last layer computes its FFN for one token: with one layer it seemed 4 times faster
    taken = {3: [[110.0, 210.0]], 2: [[60.0, 120.0]]}

    class Files:
        def command(self, side: str, layers: int, *more: object) -> int:
            assert "--prompt" in more[-1]  # type: ignore[operator]
            return layers

    monkeypatch.setattr(run, "_run", lambda layers: {"times_ms": taken[layers]})
    found = run._of_a_prompt(argparse.Namespace(), Files(), 3, (2048, 1, "full"))  # type: ignore[arg-type]
    assert (found["ms"], found["cpu_ms"]) == (50.0, 90.0)


def test_a_prompt_of_one_layer_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["run.py", "--prompt", "--layers", "1"])
    with pytest.raises(SystemExit):
        run.main()
    assert "--layers: expected 2 or more with --prompt, got 1" in capsys.readouterr().err


def test_ratios_are_to_the_best_side_of_each_kind_of_weights() -> None:
    rows = [
        _row("llama.cpp bf16", 8192, 26.0),
        _row("llama.cpp f16", 8192, 25.0),
        _row("llama.cpp bf16, flash attention", 8192, 42.0),
        _row("llama.cpp q4_k_s", 8192, 16.0),
        _row("hybrid", 8192, 20.0),
    ]
    lines = "\n".join(run.table(rows, 1, "ms"))
    assert "16-bit weights, its best | 25.0 (f16) |" in lines
    assert "`hybrid`, 16-bit weights | 20.0 (0.80, –, 1.25) |" in lines


@pytest.mark.parametrize("side", ["hybrid", "hybrid q4_k_s", "flat int8", "llama.cpp q4_k_s"])
def test_packed_weights_of_both_sides_are_of_one_file(side: str, tmp_path: Path) -> None:
    (tmp_path / "2-q4_k_s.gguf").touch()
    command = run.Files(tmp_path, tmp_path).command(side, 2, 8192, 1, [])
    assert (str(tmp_path / "2-q4_k_s.gguf") in command) is ("q4_k_s" in side)
    if "llama" not in side:
        assert command[command.index("--side") + 1] == side.removesuffix(" q4_k_s")


def test_the_crossing_is_between_the_contexts_that_it_lies_between() -> None:
    theirs = [(8192, 16.0), (32768, 40.0), (131072, 130.0)]
    assert run.crossing([(8192, 20.0), (32768, 20.0), (131072, 20.0)], theirs) == pytest.approx(
        8192 + 24576 * 4 / 24
    )
    assert run.crossing([(8192, 10.0), (32768, 10.0)], theirs) is None  # ahead from the start
    assert run.crossing([(8192, 50.0), (32768, 50.0)], theirs) is None


def test_the_table_says_from_where_on_ours_is_ahead_of_4_bits() -> None:
    rows = [
        _row("llama.cpp q4_k_s", 8192, 16.0),
        _row("llama.cpp q4_k_s", 32768, 40.0),
        _row("hybrid", 8192, 20.0),
        _row("hybrid", 32768, 20.0),
    ]
    lines = "\n".join(run.table(rows, 1, "ms"))
    assert "`hybrid` is quicker than 4-bit weights from 12,288 tokens on." in lines
