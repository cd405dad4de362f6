"""`hybrid-kv generate`: text on stdout, everything else elsewhere."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from hybrid_kv.cli import model_run
from hybrid_kv.report import read_report
from tests.cli.support import PROMPT, TINY, call, refused, run_of


def test_text_goes_to_stdout_and_stats_to_stderr(model: Path) -> None:
    result = call("generate", model, PROMPT, "--max-new-tokens", 5)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()
    for word in ("prompt", "TTFT", "TPOT", "attended", "host KV"):
        assert word in result.stderr
        assert word not in result.stdout


def test_what_sparse_prefill_lost_is_told(model: Path) -> None:
    words = ("generate", model, "word " * 400, "--max-new-tokens", 2, "--json", "-")
    exact = call(*words)
    assert "prefill read" not in exact.stderr
    assert run_of(exact).prefill is None
    sparse = call(*words, "--set", "prefill=sparse", "--set", "prefill_chunk_tokens=128")
    lost = run_of(sparse).prefill
    assert 0 < lost.density <= 1
    assert f"prefill read {lost.density:.1%} (error {lost.error:.1%})" in sparse.stderr


FEW = ("--set", "page_size=4", "--set", "sink_tokens=4", "--set", "window_tokens=8")
FEW = (*FEW, "--set", "top_k=2")


def test_exact_decoding_is_told(model: Path) -> None:
    asked = ("generate", model, "word " * 60, "--max-new-tokens", 12, "--json", "-")
    plain = run_of(call(*asked, *FEW))
    whole = run_of(call(*asked, "--method", "full"))
    result = call(*asked, *FEW, "--exact")
    run = run_of(result)
    assert plain.exact is None
    assert run.token_ids == whole.token_ids
    work = run.exact
    words = f"{work.drafted} tokens drafted, {work.accepted} accepted in {work.passes} passes"
    assert f", exact: {words}, " in result.stderr
    assert work.drafted >= work.accepted
    assert work.passes > 0


def test_exact_decoding_that_needs_no_pass_says_so(model: Path) -> None:
    result = call("generate", model, PROMPT, "--max-new-tokens", 4, "--method", "full", "--exact")
    assert "exact: every step read everything" in result.stderr
    assert result.exit_code == 0


def test_a_method_that_drops_entries_is_refused_with_exact(model: Path) -> None:
    result = call("generate", model, PROMPT, "--method", "streaming_llm", "--exact")
    assert result.exit_code == 2
    assert (
        "must have a method that keeps every entry as it is, got 'streaming_llm'" in result.stderr
    )


def test_quiet_leaves_stderr_empty(model: Path) -> None:
    assert call("generate", model, PROMPT, "--max-new-tokens", 2, "--quiet").stderr == ""


def test_no_control_codes_without_a_terminal(model: Path) -> None:
    result = call("generate", model, PROMPT, "--max-new-tokens", 2)
    assert "\x1b" not in result.output
    assert "\r" not in result.output


def test_streamed_text_is_the_text(model: Path) -> None:
    words = ("generate", model, PROMPT, "--max-new-tokens", 9)
    assert call(*words).stdout == call(*words, "--no-stream").stdout


def test_seed_reproduces_and_another_seed_differs(model: Path) -> None:
    words = ("generate", model, PROMPT, "--max-new-tokens", 12, "--temperature", 2, "--seed")
    first, again, other = (call(*words, seed).stdout for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_stop_text_ends_the_output(model: Path) -> None:
    words = ("generate", model, PROMPT, "--max-new-tokens", 12)
    text = call(*words).stdout.strip()
    stop = text.split()[4]
    expected = text[: text.index(stop)]
    assert call(*words, "--stop", stop).stdout.strip("\n") == expected


def test_beams_are_printed_at_the_end(model: Path) -> None:
    result = call("generate", model, PROMPT, "--max-new-tokens", 4, "--num-beams", 2)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_prompt_may_come_from_elsewhere(model: Path, tmp_path: Path, source: str) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    words = ("generate", model, "--max-new-tokens", 4, "--prompt-file")
    given = call(*words, file) if source == "file" else call(*words, "-", stdin=PROMPT)
    assert given.stdout == call("generate", model, PROMPT, "--max-new-tokens", 4).stdout


def test_json_takes_the_place_of_the_text(model: Path) -> None:
    report = run_of(call("generate", model, PROMPT, "--max-new-tokens", 4, "--json", "-"))
    assert report.text.strip()


def test_json_has_the_run() -> None:
    report = run_of(call("generate", *TINY, "--json", "-", "--set", "window_tokens=32"))
    assert report.command == "generate"
    assert report.method == "hybrid"
    assert report.config["window_tokens"] == 32
    assert report.context_tokens == 100
    assert report.new_tokens == len(report.token_ids) == 4
    assert report.itl_ms.p50 <= report.itl_ms.p99
    assert report.work.recall_at_k is None
    assert not report.interrupted


def test_ids_stand_for_text_where_there_is_no_tokenizer() -> None:
    report = run_of(call("generate", *TINY, "--json", "-"))
    printed = call("generate", *TINY).stdout.split()
    assert [int(word) for word in printed] == list(report.token_ids)


def test_layers_cut_a_random_model() -> None:
    words = (
        "generate",
        *TINY,
        "--set",
        "window_tokens=16",
        "--set",
        "sink_tokens=16",
        "--json",
        "-",
    )
    whole, half = (run_of(call(*words, "--layers", n)).memory_bytes.host_kv for n in (2, 1))
    assert whole == 2 * half > 0


def test_human_numbers() -> None:
    report = run_of(
        call(
            "generate",
            "random:tiny",
            "--prompt-tokens",
            "0.5k",
            "--max-new-tokens",
            1,
            "--json",
            "-",
        )
    )
    assert report.context_tokens == 512


def test_budget_beyond_the_cache_is_noticed() -> None:
    settings = ("--set", "window_tokens=16", "--set", "sink_tokens=16", "--set")
    large = call("generate", *TINY, *settings, "top_k=9999")
    assert "top_k=9999 covers the whole cache of 100 tokens: attention was exact" in large.stderr
    assert "attention was exact" not in call("generate", *TINY, *settings, "top_k=9").stderr


def test_ctrl_c_keeps_what_was_generated(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[str] = []

    def write(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        print(piece, end="")

    monkeypatch.setattr(model_run, "write_now", write)
    file = tmp_path / "run.json"
    result = call("generate", model, PROMPT, "--max-new-tokens", 500, "--json", file)
    assert result.exit_code == 130, result.output
    assert "interrupted" in result.stderr
    report = read_report(file)
    assert report.command == "generate"
    assert report.interrupted
    assert 3 <= report.new_tokens < 500
    assert result.stdout.strip() == report.text.strip()


TIERED = ("--set", "top_k=3", "--set", "window_tokens=16", "--set", "sink_tokens=16")


def test_token_errors_are_told_in_a_line_and_in_the_report(model: Path) -> None:
    words = ("generate", model, "word " * 200, "--max-new-tokens", 12, *TIERED)
    plain = call(*words, "--json", "-")
    assert "token errors" not in plain.stderr
    assert run_of(plain).token_errors is None
    result = call(*words, "--json", "-", "--token-errors")
    found = run_of(result)
    assert found.token_ids == run_of(plain).token_ids
    assert len(found.token_errors) == 12
    assert found.token_errors[0].kl == found.token_errors[0].flip == 0
    assert all(0 < one.kl < one.kl_bar and 0 < one.flip < 1 for one in found.token_errors[1:])
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("token errors: "))
    doubtful = [place for place, one in enumerate(found.token_errors) if one.flip >= 0.1]
    assert f"nats a token, {len(doubtful)} of 12 tokens doubtful (risk of another one" in line
    assert call(*words, "--token-errors", "--quiet").stderr == ""


def test_doubtful_tokens_are_named_with_their_risk(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid_kv.cli.generate._DOUBTFUL", 1e-9)
    monkeypatch.setattr("hybrid_kv.cli.generate._NAMED", 2)
    words = ("generate", model, "word " * 200, "--max-new-tokens", 6, *TIERED, "--token-errors")
    result = call(*words)
    line = next(line for line in result.stderr.splitlines() if line.startswith("token errors: "))
    named = line.partition("): ")[2]
    assert re.fullmatch(r"\d '.*' \d+\.\d%, \d '.*' \d+\.\d% and 3 more", named), line


def test_a_method_that_cannot_tell_is_refused_before_the_prompt(model: Path) -> None:
    said = refused("generate", model, PROMPT, "--method", "streaming_llm", "--token-errors")
    assert "token_errors must go with a method whose steps can tell" in said
    assert "got streaming_llm, which drops entries" in said
