"""What a shell is offered, asked as its script asks, without a shell."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest
from typer.testing import CliRunner

from hybrid_kv.cli.main import app
from hybrid_kv.models.shapes import SHAPES
from hybrid_kv.plugins import METHODS


def asked(line: str, variables: Mapping[str, str] = os.environ) -> tuple[int, list[str], str]:
    """Exit code, offers and stderr for the last word of a line; a blank at its end begins one."""
    env = {
        **variables,
        "_HYBRID_KV_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "COLUMNS": "200",
    }
    result = CliRunner().invoke(app, [], env=env, prog_name="hybrid-kv")
    words = [row.split("\t")[0] for row in result.stdout.splitlines() if row]
    return result.exit_code, words, result.stderr


def offered(line: str) -> list[str]:
    code, words, stderr = asked(line)
    assert (code, stderr) == (0, ""), (code, stderr)
    return words


def test_verbs_are_offered() -> None:
    assert {"generate", "chat", "doctor"} <= set(offered("hybrid-kv "))


def test_models_with_a_name_are_offered() -> None:
    assert offered("hybrid-kv generate ") == ["needle", "smollm2", "random:"]
    assert offered("hybrid-kv plan random:lla") == [
        f"random:{shape}" for shape in SHAPES if shape.startswith("lla")
    ]
    assert "random:llama-3-8b" in offered("hybrid-kv doctor --model ra")
    assert offered("hybrid-kv profile sm") == ["smollm2"]
    assert offered("hybrid-kv chat ./fold") == []


def test_methods_are_offered() -> None:
    assert offered("hybrid-kv generate needle --method ") == list(METHODS)
    assert offered("hybrid-kv demo --method hy") == ["hybrid"]
    assert {"quest", "hnsw"} <= set(offered("hybrid-kv methods "))


def test_settings_are_those_of_the_method_that_was_named() -> None:
    assert offered("hybrid-kv generate needle --set window") == ["window_tokens="]
    assert offered("hybrid-kv generate needle --set top_k") == ["top_k="]
    assert offered("hybrid-kv chat needle --set index.t") == ["index.target_recall="]
    assert offered("hybrid-kv chat needle --method full --set top_k") == []
    assert "page_budget=" in offered("hybrid-kv chat needle --method quest --set pa")
    assert "index=graph" in offered("hybrid-kv chat needle --set index=g")
    assert offered("hybrid-kv chat needle --method nonsense --set top") == []


@pytest.mark.parametrize("line", ["hybrid-kv nonsense ", "hybrid-kv generate m --top-k x --set "])
def test_a_line_that_cannot_be_right_prints_nothing(line: str) -> None:
    """A sentence would stand in the middle of what is being typed."""
    _, words, stderr = asked(line)
    assert stderr == ""
    assert not any(" " in word for word in words)
