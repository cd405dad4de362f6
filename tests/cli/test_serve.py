"""`hybrid-kv serve`: what is refused before a model is loaded, and what its limits become."""

from __future__ import annotations

import importlib.util
import socket
from typing import Any

import pytest

from hybrid_kv.cli import serve
from tests.cli.support import refused


def test_a_missing_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    lacking = {"uvicorn", "fastapi"}
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name in lacking else find(name))
    error = refused("serve", "random:tiny")
    assert "serving needs fastapi, uvicorn, got an environment without" in error
    assert "pip install 'hybrid-kv[serve]'" in error


def test_a_port_in_use_is_said_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("hybrid_kv.cli.model_run.opened", load)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = refused("serve", "needle", "--port", port)
    assert f"--port must be free at 127.0.0.1, got {port} (Address already in use)" in error
    assert "or 0 for any that is free" in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--host", "nowhere.invalid"), "--host must be an address of this machine, got 'nowhere"),
        (("--max-body", "much"), "--max-body must be bytes such as 512MiB, got 'much'"),
        (
            ("--reproducible", "64", "--cache-dir", "x"),
            "--reproducible must go without --cache-dir, got both",
        ),
        (("--prefix-memory", "-1"), "--prefix-memory must be bytes such as 512MiB, got '-1'"),
        (("--api-key", " "), "--api-key is empty"),
    ],
)
def test_a_wrong_option_is_refused_before_the_model_is_loaded(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid_kv.cli.model_run.opened", lambda *_: pytest.fail("loaded"))
    assert said in refused("serve", "needle", *words)


def test_a_model_without_text_is_refused() -> None:
    assert "serving needs a tokenizer, and model 'random:tiny' has none" in refused(
        "serve", "random:tiny"
    )


def test_limits_are_those_of_the_engine() -> None:
    limits = serve.LimitOptions(max_stall=250.0, timeout=0, prefix_memory="2MiB").as_limits()
    assert limits.max_stall_ms == 250
    assert limits.request_timeout_s is None
    assert limits.prefix_bytes == 2**21
    assert serve.LimitOptions().as_limits().max_stall_ms == 100
    assert serve.LimitOptions().as_limits().reproducible is None
    assert serve.LimitOptions(reproducible=64).as_limits().reproducible == 64
