"""A tiny model that reads the needle language, with a chat template, loaded once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from hybrid_kv.api import LLM, load
from hybrid_kv.serve import Limits
from tests.cli.support import save_model
from tests.serve import browsing
from tests.serve.fake_engine import FakeEngine
from tests.serve.running import CHAT, Running, serving


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer than the five seconds that httpx waits by default."""
    for name in ("get", "post"):
        monkeypatch.setattr(httpx, name, partial(getattr(httpx, name), timeout=60))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Iterator[LLM]:
    with load(tiny_folder, config={"index_build": "wait"}) as llm:
        llm.require_tokenizer().chat_template = CHAT
        yield llm


@pytest.fixture(scope="session")
def counting_server(tiny: LLM) -> Iterator[Running]:
    """Serves an engine that counts; ask for `server`, `engine` and `client`."""
    limits = Limits(max_running=4, max_queue=4)
    with serving(tiny, FakeEngine(tiny.require_tokenizer(), limits)) as running:
        yield running


@pytest.fixture
def server(counting_server: Running) -> Running:
    engine = counting_server.service.engine
    assert isinstance(engine, FakeEngine)
    engine.drain(10)
    engine.forget()
    return counting_server


@pytest.fixture
def engine(server: Running) -> FakeEngine:
    assert isinstance(server.service.engine, FakeEngine)
    return server.service.engine


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture
def emptied(server: Running) -> None:
    """Nothing is left of the documents and answers of the test before."""
    browsing.empty(server.url)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing.browsing() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, server: Running, emptied: None) -> Iterator[Any]:
    """The page, connected; what it says on the console or fails with ends the test."""
    said: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.on("weberror", lambda error: said.append(str(error.error)))
    context.on("console", lambda message: said.append(message.text))
    yield browsing.opened(context, server.url)
    context.close()
    assert [text for text in said if "Failed to load resource" not in text] == []
