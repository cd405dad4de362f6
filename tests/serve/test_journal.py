"""The line that each request leaves, without a word of its prompt."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from hybrid_kv.api import LLM
from hybrid_kv.cli.serve import TalkOptions, _requests_logged
from hybrid_kv.serve.http.metrics import log
from tests.serve.fake_engine import FakeEngine
from tests.serve.running import Running, serving
from tests.serve.test_http import COMPLETIONS, completion


@contextmanager
def only_of(running: Running) -> Iterator[None]:
    """A block without the lines of other servers in this process.

    One of them may write its last line after its client has gone on to another test.
    """

    def is_of_it(record: logging.LogRecord) -> bool:
        return record.thread == running.thread.ident

    log.addFilter(is_of_it)
    try:
        yield
    finally:
        log.removeFilter(is_of_it)


def ask(tiny: LLM, talk: TalkOptions) -> None:
    engine = FakeEngine(tiny.require_tokenizer())
    with _requests_logged(talk), serving(tiny, engine) as running, only_of(running):
        for stream in (False, True):
            body = completion(prompt="the river", max_tokens=3, n=2, stream=stream)
            assert httpx.post(running.url + COMPLETIONS, json=body).status_code == 200
        httpx.get(running.url + "/no%0Awhere")


def test_each_request_leaves_a_line(tiny: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    ask(tiny, TalkOptions())
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 3
    assert [line.rpartition(",")[0] for line in lines] == [
        "POST /v1/completions 200, 4 + 6 tokens",
        "POST /v1/completions 200, 4 + 6 tokens",
        "GET /no\\nwhere 404, 0 + 0 tokens",
    ]


def test_as_json_the_lines_are_on_stdout(tiny: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    ask(tiny, TalkOptions(json=True))
    out, err = capsys.readouterr()
    assert err == ""
    facts = [json.loads(line) for line in out.splitlines()]
    assert [(each["status"], each["completion_tokens"]) for each in facts] == [
        (200, 6),
        (200, 6),
        (404, 0),
    ]
    assert facts[2]["path"] == "/no\nwhere"
    assert all(each["seconds"] >= 0 for each in facts)


def test_quiet_leaves_none(tiny: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    ask(tiny, TalkOptions(quiet=True))
    assert capsys.readouterr() == ("", "")


def test_the_first_line_of_json_says_where() -> None:
    words = ["serve", "needle", "--port", "0", "--json", "--quiet"]
    command = [sys.executable, "-m", "hybrid_kv", *words]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            facts = json.loads(process.stdout.readline())
            assert facts["pid"] == process.pid
            assert facts["model"] == "needle"
            assert httpx.get(facts["url"] + "/health").status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.stdout.read() == ""
        finally:
            process.kill()
