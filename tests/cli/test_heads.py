"""`heads`: scores of a model's KV heads, and what cannot be scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hybrid_kv
from hybrid_kv.api import planning
from hybrid_kv.api.turn import Turn
from tests.cli.support import call, refused

TEXT = "".join(
    f"key {n % 16:x}{n * 7 % 16:x}: {n % 251:02x} {n * 3 % 241:02x}. " for n in range(400)
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    return path


def test_scores_of_the_shipped_model_are_written_and_followed(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "heads.json"
    result = call("heads", "needle", "--text", text, "-o", out, "--tokens", "1k")
    assert result.exit_code == 0, result.output
    assert f"--method duo_attention --set heads={out}" in result.output
    scores = json.loads(out.read_text())["heads"]
    with hybrid_kv.load("needle", config={"method": "duo_attention", "heads": str(out)}) as llm:
        shapes = llm.runtime.cache().kv.info.layers
        assert [len(layer) for layer in scores] == [shape.num_kv_heads for shape in shapes]
        assert llm.generate(TEXT[:2000], max_new_tokens=3).token_ids
    flat = [score for layer in scores for score in layer]
    assert 0 <= min(flat) < 0.5 < max(flat) <= 1, "some look back, others do not"


def test_the_text_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second copy every token has something to look up; read once it may have nothing."""
    seen: list[list[int]] = []

    class Watched(Turn):
        def __init__(self, llm: Any, cache: Any, ids: Any, options: Any) -> None:
            seen.extend(ids.tolist())
            super().__init__(llm, cache, ids, options)

    monkeypatch.setattr(planning, "Turn", Watched)
    with hybrid_kv.load("needle", config=planning.observing()) as llm:
        planning.observe_heads(llm, TEXT, 600)
    assert len(seen[0]) == 1200
    assert seen[0][:600] == seen[0][600:]


def test_what_cannot_be_scored_is_refused(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "heads.json"
    short = tmp_path / "short.txt"
    short.write_text("key a1: 00.")
    assert "at least 576 tokens, got" in refused("heads", "needle", "--text", short, "-o", out)
    assert "must be a file in a folder that is there" in refused(
        "heads", "needle", "--text", text, "-o", tmp_path / "no" / "heads.json"
    )
    assert "cannot be read" in refused("heads", "needle", "--text", tmp_path / "no", "-o", out)
    assert "has none" in refused("heads", "random:llama-3-8b", "--text", text, "-o", out)
    assert not out.exists()
