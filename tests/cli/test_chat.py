"""`hybrid-kv chat` with piped messages."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybrid_kv.cli import generate
from hybrid_kv.cli.generate import Session
from hybrid_kv.cli.options import OutputOptions
from hybrid_kv.errors import DeviceMemoryError
from tests.cli.support import call, report_of

OPTIONS = ("--max-new-tokens", 4)


def test_each_line_is_a_turn_and_the_end_of_stdin_is_no_error(model: Path) -> None:
    result = call("chat", model, *OPTIONS, stdin="the river\nthe hill\n")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 2


def test_commands(model: Path) -> None:
    lines = "/stats\nthe river\n/stats\n/reset\n/rest\nthe river\n/quit\nthe hill\n"
    result = call("chat", model, *OPTIONS, stdin=lines)
    assert result.exit_code == 0
    first, second = result.stdout.splitlines()  # nothing after /quit
    assert first == second  # /reset forgot the first turn
    for text in ("nothing has been answered", "TTFT", "begins anew", "unknown command '/rest'"):
        assert text in result.stderr


def test_json_holds_all_turns(model: Path) -> None:
    report = report_of(call("chat", model, *OPTIONS, "--json", "-", stdin="the river\nthe hill\n"))
    assert report.command == "chat"
    assert [turn.context_tokens for turn in report.turns] == [2, 2 + 4 + 2]


def test_exact_turns_are_those_of_full_attention(model: Path) -> None:
    few = [f"--set={one}" for one in ("page_size=4", "sink_tokens=4", "window_tokens=8", "top_k=2")]
    words = ("chat", model, "--max-new-tokens", 9, "--json", "-")
    lines = "the river " * 30 + "\nthe hill\n/stats\n"
    whole = report_of(call(*words, "--method", "full", stdin=lines))
    result = call(*words, *few, "--exact", stdin=lines)
    found = report_of(result)
    assert [turn.token_ids for turn in found.turns] == [turn.token_ids for turn in whole.turns]
    assert all(turn.exact.passes > 0 for turn in found.turns)
    assert "accepted in" in result.stderr


@pytest.mark.parametrize("terminal", [True, False])
def test_memory_that_runs_out_ends_an_answer_and_not_the_talk_at_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    lines = ["a long one", "a short one", "/quit"]
    sent: list[str] = []

    def send(message: str, **_: object) -> _Stream:
        sent.append(message)
        if message == "a long one":
            raise DeviceMemoryError("GPU memory ran out at prefill: shorten the prompt")
        return _Stream("yes")

    talk = SimpleNamespace(send=send)
    session = Session(
        lambda: talk,  # type: ignore[arg-type,return-value]
        SimpleNamespace(as_options=dict),  # type: ignore[arg-type]
        OutputOptions(),
    )
    monkeypatch.setattr(generate, "read_line", lambda: lines.pop(0))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: terminal))
    if not terminal:  # a script wants to know
        with pytest.raises(DeviceMemoryError):
            session.run()
        return
    session.run()
    assert sent == ["a long one", "a short one"]
    printed = capsys.readouterr()
    assert printed.err == "error: GPU memory ran out at prefill: shorten the prompt\n"
    assert printed.out == "yes\n"
    assert len(session.outcomes) == 1


class _Stream(list[str]):
    result = None

    def __init__(self, text: str) -> None:
        super().__init__([text])

    def close(self) -> None:
        pass
