"""`hybrid-kv eval`: a folder with tables, report and page; mistakes are one sentence."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from hybrid_kv.cli import evaluate
from hybrid_kv.contest.folder import ResultsFolder
from hybrid_kv.contest.prompts import Contains, PromptBuilder
from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.tasks import TaskConfig, TextQuestion
from hybrid_kv.eval.tasks.base import rouge_l
from hybrid_kv.report.schema import EvalReport, parse_report
from tests.cli.support import call, refused

FEW = ("--tasks", "passkey:records=5", "--context", "301", "--methods", "streaming_llm")
BUDGET = ("--budget", "80", "--samples", "1")


def results(folder: Path) -> EvalReport:
    report = parse_report((folder / "results.json").read_text())
    assert isinstance(report, EvalReport)
    return report


@pytest.fixture(scope="module")
def done(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("eval") / "results"
    result = call("eval", model, *FEW, *BUDGET, "-o", folder)
    assert result.exit_code == 0, result.output
    return folder, result


def test_a_run_leaves_a_table_a_report_and_a_page(done: Any) -> None:
    folder, result = done
    report = results(folder)
    assert [(row.method, row.budget) for row in report.rows] == [
        ("full", None),
        ("streaming_llm", "80"),
    ]
    table = list(csv.DictReader((folder / "results.csv").read_text().splitlines()))
    assert [row["method"] for row in table] == ["full", "streaming_llm"]
    assert float(table[1]["attended_tokens"]) == pytest.approx(80, abs=16)
    assert "301 tokens, question after the eviction" in result.stdout
    assert "<svg" in (folder / "index.html").read_text()
    assert "2 of 2: passkey:records=5 at 301, context 1" in result.stderr


def test_without_a_folder_the_tables_are_printed_and_nothing_is_kept(
    done: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    result = call("eval", model, *FEW, *BUDGET)
    assert result.exit_code == 0, result.output
    table, timeless = result.stdout.splitlines()[0], done[1].stdout.splitlines()[0]
    assert table == timeless
    assert "streaming_llm" in result.stdout
    assert "nothing was kept; --output FOLDER keeps results" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_measures_nothing_and_writes_the_same(done: Any, model: Path) -> None:
    folder, _ = done
    before = results(folder)
    cells = {path: path.stat().st_mtime_ns for path in (folder / "cells").iterdir()}
    again = call("eval", model, *FEW, *BUDGET, "-o", folder, "--json", "-", "--quiet")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["command"] == "eval"
    assert (results(folder), again.stderr) == (before, "")
    assert {path: path.stat().st_mtime_ns for path in (folder / "cells").iterdir()} == cells


def test_refused_budgets_are_named_and_the_others_measured(done: Any, model: Path) -> None:
    folder, _ = done
    words = ("--budget", "80,7", "--samples", "1", "--skip-refused")
    before = results(folder)
    result = call("eval", model, *FEW, *words, "-o", folder)
    assert result.exit_code == 0, result.output
    assert "left out: budget 7 of 301 tokens cannot be given to streaming_llm" in result.stderr
    full, kept, refusal = results(folder).rows
    assert (full, kept) == before.rows
    assert (refusal.method, refusal.budget, refusal.refused) == ("streaming_llm", "7", True)
    assert (refusal.score, refusal.samples) == (None, 0)
    assert "cannot be given to streaming_llm" in (folder / "index.html").read_text()
    assert "cannot be given to streaming_llm" in (folder / "results.csv").read_text()
    again = call("eval", model, *FEW, *BUDGET, "-o", folder)
    assert again.exit_code == 0
    assert results(folder).rows == before.rows


def test_ctrl_c_keeps_what_was_measured(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = ResultsFolder.add

    def interrupted(self: ResultsFolder, cell: Any) -> None:
        add(self, cell)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ResultsFolder, "add", interrupted)
        ended = call("eval", model, *FEW, *BUDGET, "-o", tmp_path / "results")
    assert ended.exit_code == 130
    report = results(tmp_path / "results")
    assert (report.interrupted, [row.method for row in report.rows]) == (True, ["full"])
    assert "Interrupted." in (tmp_path / "results" / "index.html").read_text()


def test_other_settings_for_one_folder_are_refused(done: Any, model: Path) -> None:
    folder, _ = done
    error = refused("eval", model, *FEW, *BUDGET, "-o", folder, "--seed", "1")
    assert "differs in seed (there 0, now 1)" in error


def test_two_runs_into_one_folder_are_refused(
    done: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = done
    inner, errors = evaluate._measured, []

    def measured(*args: Any) -> Any:
        errors.append(refused("eval", model, *FEW, *BUDGET, "-o", folder))
        return inner(*args)

    monkeypatch.setattr(evaluate, "_measured", measured)
    assert call("eval", model, *FEW, *BUDGET, "-o", folder).exit_code == 0
    assert "is in use by another run" in errors[0]


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("--tasks", "pasky"), "unknown task 'pasky'; did you mean 'passkey'"),
    (("--methods", "snap"), "unknown method 'snap'"),
    (("--budget", "0.5%"), "budget 0.5% of 4096 tokens cannot be given to quest: a budget must be"),
    (("--budget", "much"), "a budget must be a share of the context such as 5%"),
    (("--question", "never"), "question: input should be 'after', 'before' or 'both'"),
    (("--tasks", "qa_2"), "task 'qa_2' is not written in the needle language"),
    (("--text", "no/such/file"), "text 'no/such/file' cannot be read"),
    (("--context", "0"), "a count must be a whole number"),
    (("--plugin", "no_such_module"), "no_such_module"),
]


@pytest.mark.parametrize(("words", "text"), REFUSED)
def test_mistakes_are_said_before_anything_is_computed(
    model: Path, tmp_path: Path, words: tuple[str, ...], text: str
) -> None:
    assert text in refused("eval", model, "-o", tmp_path / "results", *words)


def test_a_text_that_is_shorter_than_the_context_is_refused(model: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("the river and the hill. " * 30)
    words = ("--tasks", "perplexity", "--context", "301", "--text", book, *BUDGET)
    error = refused("eval", model, "--methods", "full", *words, "-o", tmp_path / "results")
    assert (
        f"text '{book}' must have 558 tokens for a context of 301 and 256 to read on, got" in error
    )


def english_tokenizer() -> PreTrainedTokenizerFast:
    """Reads English words as unknown ones, and has no chat template."""
    inner = Tokenizer(WordLevel({"<unk>": 0, "the": 1}, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def test_a_model_without_a_chat_template_is_asked_with_raw_only() -> None:
    task = TaskConfig(task="passkey").build()
    with pytest.raises(ConfigError, match=r"need a chat template, .* has none; give --raw"):
        PromptBuilder(english_tokenizer()).prompt("passkey", task, 301, 0, 1, 0)
    prompt = PromptBuilder(english_tokenizer(), raw=True).prompt("passkey", task, 301, 0, 1, 0)
    (asked,) = prompt.asked
    assert 250 <= len(prompt.context) + len(asked.ids) <= 301


def test_more_samples_than_a_file_has_contexts_are_refused(model: Path, tmp_path: Path) -> None:
    row = {"input": "A text.\nAnd what is asked?", "outputs": ["4"]}
    path = tmp_path / "validation.jsonl"
    path.write_text(json.dumps(row))
    task = f"ruler_files:path={path}"
    error = refused("eval", model, "--tasks", task, "--samples", "2", "-o", tmp_path / "results")
    assert f"samples must be at most 1 for task '{task}'" in error
    error = refused("eval", model, "--tasks", f"longbench:path={path}", "-o", tmp_path / "results")
    assert f"line 1 of '{path}' must be a JSON object with input, context, answers" in error


def test_an_answer_ends_early_only_where_more_would_not_lower_its_score() -> None:
    tokenizer = english_tokenizer()
    said: list[int] = tokenizer("the the")["input_ids"]
    for measure, over in ((None, True), (rouge_l, False)):
        question = TextQuestion("", "", ("the the",), measure=measure)
        judge = Contains(question, tokenizer, frozenset())
        assert judge.is_over(said) is over


def test_a_method_that_fails_is_named_with_its_reason(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybrid_kv.methods.windows import StreamingLLM

    def broken(self: StreamingLLM, layer_idx: int, q: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(StreamingLLM, "read", broken)
    result = call("eval", model, *FEW, *BUDGET, "-o", tmp_path / "results")
    assert result.exit_code == 1
    assert "failed" in result.stdout
    assert "RuntimeError: out of luck" in result.stderr
    assert "out of luck" in (tmp_path / "results" / "index.html").read_text()
