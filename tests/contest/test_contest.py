"""Evaluations of a tiny model: complete, resumable, one prefill a context, no failure ends all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import hybrid_kv as hkv
from hybrid_kv.contest.arguments import EvalArguments
from hybrid_kv.contest.evaluation import Evaluation, rows_of
from hybrid_kv.contest.folder import ResultsFolder
from hybrid_kv.contest.prompts import SharedPrompt
from hybrid_kv.errors import MethodError
from hybrid_kv.methods.windows import Quest
from hybrid_kv.report.evaluation import Cell, EvalRow
from hybrid_kv.types import Needs
from scripts.needle.tokenizer import build_tokenizer

ASKED: dict[str, Any] = {
    "tasks": ("key_value:records=9", "perplexity:then=21:step=8"),
    "contexts": (391,),
    "methods": ("hybrid", "quest", "streaming_llm"),
    "budgets": ("25%",),
    "question": "both",
    "samples": 1,
    "dtype": "float32",
    "settings": {"page_size": 8},
}
FEW: dict[str, Any] = {
    "tasks": ("key_value:records=9:questions=2",),
    "methods": ("quest", "streaming_llm"),
    "question": "after",
    "samples": 2,
}
TIMES = {"seconds", "counters"}


def arguments(folder: Path, **changes: Any) -> EvalArguments:
    return EvalArguments.of({"model": str(folder), **ASKED, **changes})


def evaluate(llm: hkv.LLM, asked: EvalArguments, path: Path, told: Any = None) -> list[Cell]:
    contest = Evaluation(llm, asked)
    with ResultsFolder(path, asked.identity()) as results:
        contest.run(results, told)
        return [results.cells[key] for key in contest.wanted()]


def plain(cells: list[Cell]) -> list[dict[str, Any]]:
    return [cell.model_dump(exclude=TIMES) for cell in cells]


def row(rows: list[EvalRow], method: str, asking: str) -> EvalRow:
    return next(one for one in rows if (one.method, one.asking) == (method, asking))


def test_every_cell_is_measured_and_full_attention_is_the_measure(
    llm: hkv.LLM, folder: Path, tmp_path: Path
) -> None:
    cells = evaluate(llm, arguments(folder), tmp_path / "results")
    assert len(cells) == 2 * 4 + 4
    assert {cell.error for cell in cells} == {None}
    rows = [*rows_of(cells)]
    assert len(rows) == 3 * 4
    full, quest = (row(rows, name, "none") for name in ("full", "quest"))
    assert full.score is not None
    assert full.kl is not None
    assert (full.score.mean, full.kl.mean, full.budget) == (1, 0, None)
    assert quest.kl is not None
    assert (quest.kl.mean > 0, quest.budget, quest.questions) == (True, "25%", 21)
    assert full.counters.missed_mass is not None
    assert full.counters.missed_mass < 1e-5
    for method in ("hybrid", "quest", "streaming_llm"):
        for asking in ("after", "before", "none"):
            counters = row(rows, method, asking).counters
            assert counters.attended_tokens == pytest.approx(0.25 * 391, abs=12)
            assert counters.missed_mass is not None
            least = 0 if method == "hybrid" else 0.01  # hybrid estimates the rest
            assert counters.missed_mass > least
    assert row(rows, "hybrid", "after").counters.recall is not None


def test_an_evaluation_that_was_ended_is_continued(
    llm: hkv.LLM, folder: Path, tmp_path: Path
) -> None:
    few = arguments(folder, **FEW)
    whole = evaluate(llm, few, tmp_path / "whole")
    seen: list[int] = []

    def end(cell: Cell, done: int, total: int, left_s: float) -> None:
        seen.append(total)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(llm, few, tmp_path / "parts", end)
    parts = evaluate(llm, few, tmp_path / "parts", lambda *told: seen.append(told[2]))
    assert plain(parts) == plain(whole)
    assert seen == [6] * 4 + [2] * 2


def test_more_may_be_asked_of_the_same_folder(llm: hkv.LLM, folder: Path, tmp_path: Path) -> None:
    more = arguments(folder, **FEW | {"question": "both", "samples": 2})
    evaluate(llm, arguments(folder, **FEW | {"methods": ("quest",)}), tmp_path / "results")
    grown = evaluate(llm, more, tmp_path / "results")
    assert plain(grown) == plain(evaluate(llm, more, tmp_path / "fresh"))


def test_each_context_is_computed_once_and_no_cell_twice(
    llm: hkv.LLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    inner = llm.model.forward

    def forward(ids: torch.Tensor, **rest: Any) -> Any:
        sizes.append(ids.shape[1])
        return inner(ids, **rest)

    monkeypatch.setattr(llm.model, "forward", forward)
    both = arguments(folder, **FEW | {"question": "both"})
    cells = evaluate(llm, both, tmp_path / "results")
    assert sum(size > 300 for size in sizes) == 2
    sizes.clear()
    assert evaluate(llm, both, tmp_path / "results") == cells
    assert sizes == []


def test_a_method_that_fails_ends_no_other_and_is_tried_again(
    llm: hkv.LLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = arguments(folder, **FEW)

    def broken(self: Quest, layer_idx: int, q: torch.Tensor) -> Any:
        raise MethodError("quest must answer, got lost; mend it")

    with monkeypatch.context() as patch:
        patch.setattr(Quest, "read", broken)
        cells = evaluate(llm, few, tmp_path / "results")
    assert {cell.error for cell in cells if cell.method == "quest"} == {
        "quest must answer, got lost; mend it"
    }
    assert {cell.error for cell in cells if cell.method != "quest"} == {None}
    again: list[str] = []
    evaluate(llm, few, tmp_path / "results", lambda cell, *_: again.append(cell.method))
    assert again == ["quest", "quest"]


def sliding_model(folder: Path) -> Path:
    """A random Gemma 3 that reads the needle language, with a window of 24 tokens."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=24,
        layer_types=kinds,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_layers_with_a_sliding_window_are_copied_to_every_method(tmp_path: Path) -> None:
    """Regression: such models were refused."""
    folder = sliding_model(tmp_path / "model")
    with hkv.load(folder, dtype="float32", config="full") as llm:
        asked = arguments(folder, methods=("hybrid", "quest"))
        cells = evaluate(llm, asked, tmp_path / "results")
        assert {cell.error for cell in cells} == {None}
        rows = [*rows_of(cells)]
        full, quest = row(rows, "full", "none"), row(rows, "quest", "none")
        assert full.kl is not None
        assert quest.kl is not None
        assert (full.kl.mean, quest.kl.mean > 0) == (0, True)
        assert full.counters.missed_mass is not None
        assert full.counters.missed_mass < 1e-5
        context, question = list(range(20, 121)), [5, 6, 40, 50]
        shared = SharedPrompt(llm.runtime, context, Needs())
        for _ in range(2):  # a question leaves no trace for the next
            for asked_ids in (question[:2], question):
                _, first = shared.with_question(asked_ids)
                with torch.inference_mode():
                    plain_logits = llm.model(torch.tensor([context + asked_ids])).logits[0, -1]
                assert first == int(plain_logits.argmax())
