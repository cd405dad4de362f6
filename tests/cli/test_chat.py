"""`hybrid-kv chat` with piped messages."""

from __future__ import annotations

from pathlib import Path

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
