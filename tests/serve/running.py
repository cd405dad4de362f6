"""A server in a thread of this process, with an engine of the test's choice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_kv.api import LLM
from hybrid_kv.serve.http.app import Rules, application
from hybrid_kv.serve.http.server import Server, bound_socket
from hybrid_kv.serve.http.service import Ending, Service

CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass
class Running:
    """A server that answers at `url`."""

    url: str
    service: Service
    server: Server
    thread: threading.Thread


@contextmanager
def serving(
    llm: LLM,
    engine: Any,
    rules: Rules | None = None,
    cors_origins: tuple[str, ...] = (),
    on_end: Callable[[Ending], None] = lambda ending: None,
    documents_folder: Path | None = None,
    port: int = 0,
) -> Iterator[Running]:
    service = Service(llm, engine, "tiny", documents_folder)
    started = threading.Event()
    app = application(service, rules or Rules(), cors_origins)
    server = Server(app, service, started.set, on_end)
    bound = bound_socket("127.0.0.1", port)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield Running(url, service, server, thread)
    finally:
        server.should_exit = True
        thread.join(60)
        bound.close()
        assert not thread.is_alive()
