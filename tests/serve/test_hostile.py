"""Clients that hang, leave, stammer or come all at once; and the end of the server meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import httpx
import pytest

from hybrid_kv.api import LLM
from hybrid_kv.serve import Limits
from hybrid_kv.serve.http.app import Rules, application
from hybrid_kv.serve.http.server import Connection, Server, bound_socket
from hybrid_kv.serve.http.service import Ending, Service
from tests.serve.fake_engine import FakeEngine
from tests.serve.running import Running, serving
from tests.serve.test_http import CHAT, COMPLETIONS, MESSAGES, completion


def until(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Waits for it."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def posted(body: Any, path: str = COMPLETIONS, length: int | None = None) -> bytes:
    """A request as it goes over the wire."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content) if length is None else length}\r\n\r\n"
    )
    return head.encode() + content


def is_calm(server: Running, engine: FakeEngine) -> bool:
    """Whether nothing is in work."""
    return engine.running == 0 and server.service.num_open == 0


# Clients that leave ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(
    server: Running, engine: FakeEngine, stream: bool
) -> None:
    engine.pace_s = 0.02
    with closing(connected(server.url)) as wire:
        wire.sendall(posted(completion(max_tokens=900, stream=stream)))
        assert until(lambda: engine.running == 1)
    assert until(lambda: is_calm(server, engine))
    assert engine.ended == {"cancelled": 1}


def test_a_client_that_leaves_in_its_own_body(server: Running, engine: FakeEngine) -> None:
    for length in (10, 100_000):
        with closing(connected(server.url)) as wire:
            wire.sendall(posted(completion(), length=length)[:150])
    assert httpx.post(server.url + COMPLETIONS, json=completion()).status_code == 200
    assert is_calm(server, engine)


def test_a_client_that_never_reads(
    server: Running, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "stall_seconds", 0.5)
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 900, "n": 4, "stream": True}
    body |= {"logprobs": True, "top_logprobs": 20}
    wire = socket.socket()
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = server.url.removeprefix("http://").split(":")
    with closing(wire):
        wire.connect((host, int(port)))
        wire.sendall(posted(body, CHAT))
        assert until(lambda: engine.ended.total() == 4)
        assert server.service.num_open == 1  # what was made waits to be written
        assert until(lambda: server.service.num_open == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_own_side_gets_its_answer(
    server: Running, engine: FakeEngine, stream: bool
) -> None:
    engine.pace_s = 0.2
    with closing(connected(server.url)) as wire:
        wire.sendall(posted(completion(max_tokens=6, stream=stream)))
        wire.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: wire.recv(10_000), b""))
    assert b"HTTP/1.1 200" in answer
    assert b'"finish_reason":"length"' in answer.replace(b": ", b":")
    assert engine.ended == {"length": 1}


# Clients that hang -------------------------------------------------------------------------------


def test_a_head_that_does_not_come_ends_the_connection(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "head_seconds", 0.4)
    for beginning in (b"", b"POST /v1/comple"):
        with closing(connected(server.url)) as wire:
            wire.sendall(beginning)
            with suppress(ConnectionResetError):
                assert wire.recv(100) == b""


def test_a_body_that_does_not_come_is_refused(tiny: LLM) -> None:
    engine = FakeEngine(tiny.require_tokenizer())
    with (
        serving(tiny, engine, Rules(body_seconds=0.3)) as running,
        closing(connected(running.url)) as wire,
    ):
        wire.sendall(posted(completion(), length=5000))
        answer = wire.recv(10_000)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"body must arrive within 0.3 seconds" in answer + wire.recv(10_000)


def test_what_is_no_http_is_refused_in_json(server: Running) -> None:
    with closing(connected(server.url)) as wire:
        wire.sendall(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
        answer = wire.recv(10_000)
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "no_http"


def test_bodies_together_have_a_limit(tiny: LLM) -> None:
    engine = FakeEngine(tiny.require_tokenizer())
    rules = Rules(max_bodies_bytes=50_000)
    with serving(tiny, engine, rules) as running, closing(connected(running.url)) as wire:
        wire.sendall(posted(completion(), length=60_000) + b" " * 40_000)  # waits for more
        padded = completion(prompt="the " * 5000)
        refused: list[httpx.Response] = []

        def refuses() -> bool:  # as soon as the server has read what lies on the wire
            refused.append(httpx.post(running.url + COMPLETIONS, json=padded))
            return refused[-1].status_code == 503

        assert until(refuses)
        assert refused[-1].json()["error"]["code"] == "no_room_now"
        wire.close()
        assert until(
            lambda: httpx.post(running.url + COMPLETIONS, json=padded).status_code == 400
        )  # read, and too long for the context


# All at once -------------------------------------------------------------------------------------


def test_500_connections_at_once(tiny: LLM) -> None:
    engine = FakeEngine(tiny.require_tokenizer(), Limits(max_running=16, max_queue=64), 0.01)

    async def one(url: str) -> int:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(posted(completion()))
        status = int((await reader.readline()).split()[1])
        writer.close()
        return status

    async def everyone(url: str) -> Counter[int]:
        return Counter(await asyncio.gather(*(one(url) for _ in range(500))))

    with serving(tiny, engine) as running:
        statuses = asyncio.run(everyone(running.url))
        assert set(statuses) <= {200, 429}
        assert statuses.total() == 500
        assert statuses[200] >= 80
        assert until(lambda: is_calm(running, engine))
        assert httpx.get(running.url + "/health").status_code == 200


def test_idle_connections_hold_nobody_up(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "max_connections", 50)
    engine = FakeEngine(tiny.require_tokenizer())
    with serving(tiny, engine) as running:
        idle = [connected(running.url) for _ in range(49)]
        assert httpx.post(running.url + COMPLETIONS, json=completion()).status_code == 200
        idle += [connected(running.url) for _ in range(5)]
        answer = httpx.get(running.url + "/health")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_room_now")
        for wire in idle:
            wire.close()
        assert until(lambda: httpx.get(running.url + "/health").status_code == 200)


# The end -----------------------------------------------------------------------------------------


def test_the_end_says_what_finished_and_what_was_cancelled(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid_kv.serve.http.server.END_SECONDS", 2.0)
    engine = FakeEngine(tiny.require_tokenizer(), pace_s=0.5)  # neither ends before the server does
    endings: list[Ending] = []
    answers: dict[int, httpx.Response] = {}

    def asked(url: str, tokens: int) -> None:
        body = completion(max_tokens=tokens)
        answers[tokens] = httpx.post(url + COMPLETIONS, json=body, timeout=30)

    with serving(tiny, engine, on_end=endings.append) as running:
        threads = [
            threading.Thread(target=asked, args=(running.url, tokens)) for tokens in (8, 900)
        ]
        for thread in threads:
            thread.start()
        assert until(lambda: engine.running == 2)
        engine.pace_s = 0.01  # a fraction of the time for the short one, a multiple for the long
        running.server.should_exit = True
        for thread in threads:
            thread.join(60)
    assert [len(endings[0].finished), len(endings[0].cancelled)] == [1, 1]
    assert answers[8].status_code == 200
    assert answers[900].status_code == 503
    assert answers[900].json()["error"]["code"] == "shutting_down"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_requests_in_their_middle(
    tiny: LLM, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid_kv.serve.http.server.END_SECONDS", 0.3)
    engine, endings = FakeEngine(tiny.require_tokenizer()), list[Ending]()
    engine.pace_s = 0.05
    service, started = Service(tiny, engine, "tiny"), threading.Event()
    app = application(service, Rules(), ())
    server = Server(app, service, started.set, endings.append)
    before = signal.getsignal(number)
    with bound_socket("127.0.0.1", 0) as bound:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}{COMPLETIONS}"

        def ask() -> None:
            assert started.wait(20)
            body = completion(max_tokens=900, stream=True)
            with httpx.stream("POST", url, json=body, timeout=30) as stream:
                lines = stream.iter_lines()
                next(lines)
                os.kill(os.getpid(), number)
                list(lines)

        thread = threading.Thread(target=ask)
        thread.start()
        server.run([bound])
        thread.join(10)
    assert server.signal == number
    assert signal.getsignal(number) is before
    assert [len(endings[0].finished), len(endings[0].cancelled)] == [0, 1]


def test_the_end_cuts_off_a_client_that_does_not_read_without_a_traceback(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hybrid_kv.serve.http.server.END_SECONDS", 2.0)
    monkeypatch.setattr("hybrid_kv.serve.http.server.LAST_SECONDS", 0.2)
    engine = FakeEngine(tiny.require_tokenizer())
    wire = socket.socket()
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 900, "n": 4, "stream": True}
    body |= {"logprobs": True, "top_logprobs": 20}
    with closing(wire), serving(tiny, engine) as running:
        host, port = running.url.removeprefix("http://").split(":")
        wire.connect((host, int(port)))
        wire.sendall(posted(body, CHAT))
        assert until(lambda: engine.ended.total() == 4)
        assert running.service.num_open == 1  # what was made waits to be written
    assert [record.getMessage() for record in caplog.records] == []
