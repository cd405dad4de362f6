"""Malformed requests made by hypothesis from well-formed ones: none is a 500, none leaves a trace.

`HYBRID_KV_FUZZ=1000` makes that many of each kind, and as many for a real engine.
"""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.fake_engine import FakeEngine
from tests.serve.processes import needle_that_chats, serve_process
from tests.serve.running import Running
from tests.serve.test_hostile import is_calm, until
from tests.serve.test_http import CHAT, COMPLETIONS, MESSAGES, TEXT

EXAMPLES = int(os.environ.get("HYBRID_KV_FUZZ", "60"))
PATHS = [CHAT, COMPLETIONS, "/tokenize", "/hybrid_kv/ask", "/hybrid_kv/read"]
BEST = {
    "model": "tiny",
    "messages": MESSAGES,
    "prompt": TEXT,
    "max_tokens": 2,
    "stream": False,
    "stream_options": {"include_usage": True},
    "stop": ["hill"],
    "seed": 1,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "logprobs": 1,
    "top_logprobs": 2,
    "n": 1,
    "tools": [],
    "user": "ada",
    "hybrid_kv": {"method": "flat", "set": {"window_tokens": 64}, "budget": "50%", "audit": 4},
    "document": "0" * 32,
    "question": "the river",
    "turns": [{"question": "a", "answer": "b"}],
}

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["tiny", "user", "the", "../../etc/passwd", "\ud800", "{0}", "%s", "2%"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*BEST, "role", "content", "type", "x"]), inner)
    ),
    max_leaves=8,
)


@st.composite
def nearly_right(draw: st.DrawFn) -> dict[str, Any]:
    """Some settings of a good request, of which one to three are something else."""
    kept = draw(st.sets(st.sampled_from(sorted(BEST))))
    body = {name: copy.deepcopy(BEST[name]) for name in {"model", "prompt", "messages"} | kept}
    for name in draw(st.lists(st.sampled_from(sorted(BEST)), min_size=1, max_size=3)):
        if isinstance(body.get(name), dict) and draw(st.booleans()):
            inner: Any = body[name]
            inner[draw(st.sampled_from([*inner, "new"]))] = draw(values)
        else:
            body[name] = draw(values)
    for name in draw(st.sets(st.sampled_from(sorted(body)), max_size=2)):
        del body[name]
    return body


def check(answer: httpx.Response) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


quickly = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@quickly
@given(path=st.sampled_from(PATHS), body=nearly_right())
def test_malformed_requests(
    server: Running, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    content = json.dumps(body).encode()
    kind = {"content-type": "application/json"}
    check(httpx.post(server.url + path, content=content, headers=kind, timeout=30))
    assert until(lambda: is_calm(server, engine))


@quickly
@given(
    path=st.sampled_from(PATHS),
    content=st.binary(max_size=200) | st.text(max_size=100).map(str.encode),
    cut=st.integers(0, 400),
    method=st.sampled_from(["POST", "PUT", "DELETE", "PATCH", "GET"]),
)
def test_malformed_bodies(
    server: Running, engine: FakeEngine, path: str, content: bytes, cut: int, method: str
) -> None:
    kind = {"content-type": "application/json"}
    for body in (content, json.dumps(BEST).encode()[:cut] + content):
        check(httpx.request(method, server.url + path, content=body, headers=kind, timeout=30))
    assert until(lambda: is_calm(server, engine))
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}


@pytest.mark.slow
@pytest.mark.skipif("HYBRID_KV_FUZZ" not in os.environ, reason="HYBRID_KV_FUZZ=1000 runs it")
def test_malformed_requests_to_a_real_engine(tmp_path: Path) -> None:
    words = (needle_that_chats(tmp_path), "--name", "tiny", "--max-prompt-tokens", "2k")
    seen: Counter[int] = Counter()
    with serve_process(*words, "--timeout", "5", "--prefix-memory", "16MiB") as running:
        process = psutil.Process(running.process.pid)

        @quickly
        @given(path=st.sampled_from(PATHS), body=nearly_right())
        def ask(path: str, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            head = {"content-type": "application/json"}
            answer = wire.post(path, content=content, headers=head)
            seen[answer.status_code] += 1
            if answer.status_code != 504:  # no token within the time, as asked
                check(answer)

        with httpx.Client(base_url=running.url, timeout=60) as wire:
            sizes = []
            for _ in range(2):
                ask()
                sizes.append(process.memory_info().rss / 2**20)
            good = {"model": "tiny", "prompt": TEXT, "max_tokens": 4, "temperature": 0}
            assert wire.post(COMPLETIONS, json=good).status_code == 200
            figures = wire.get("/metrics").text
        print(f"statuses {dict(seen)}; RSS in MiB after each round {sizes}")
        for state in ("queued", "prefilling", "running"):
            assert f'hybrid_kv_requests{{state="{state}"}} 0.0' in figures
        assert not any("Traceback" in line for line in running.lines), running.lines
    assert sizes[1] < 1.1 * sizes[0] + 32
