"""A hub of a few repositories on this machine: the two endpoints that a download asks."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

COMMIT = "c0ffee" + "0" * 34
_INFO = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+?)(/revision/(?P<revision>.+))?")
_FILE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass
class Hub:
    """Repositories by name, and what was asked of them.

    gated: repositories whose files nobody gets. statuses: answers in place of files, by their
    names. sizes: those that the hub tells, where they are not the files'. sent: files that were
    given. stalls: the file that is begun and not ended; `stalled` is set then.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    statuses: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    stalls: str = ""
    stalled: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    address: str = ""

    def answer(self, path: str) -> tuple[int, Mapping[str, str], bytes, str]:
        """Status, headers, body, and the name of the file where it is one."""
        if (asked := _INFO.fullmatch(path)) is not None:
            return *self._info(asked["name"], asked["revision"]), ""
        asked = _FILE.fullmatch(path)
        if asked is None:  # the hub's package asks more of its own accord
            return 404, {}, b"", ""
        if asked["name"] in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"", ""
        if (status := self.statuses.get(asked["file"])) is not None:
            return status, {}, b"", ""
        body = self.repositories[asked["name"]][asked["file"]]
        headers = {"ETag": f'"{_digest(body)}"', "X-Repo-Commit": COMMIT}
        return 200, headers, body, asked["file"]

    def _info(self, name: str, revision: str | None) -> tuple[int, Mapping[str, str], bytes]:
        if name not in self.repositories:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        if revision not in (None, "main", "v1", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        siblings = [
            {
                "rfilename": file,
                "size": self.sizes.get(file, len(body)),
                "blobId": _digest(body),
            }
            for file, body in self.repositories[name].items()
        ]
        told: dict[str, Any] = {"id": name, "sha": COMMIT, "siblings": siblings}
        return 200, {"Content-Type": "application/json"}, json.dumps(told).encode()


def _digest(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub, served at its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body, file = hub.answer(self.path.partition("?")[0])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "GET":
                return
            if file and file == hub.stalls:
                self.wfile.write(body[:10])
                hub.stalled.set()
                hub.ended.wait(60)
                return
            hub.sent += [file] if file else []
            self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        hub.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


def use_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The hub's cache in a folder of a test."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    """The hub's package asks this address, and caches in a folder of a test."""
    use_cache(monkeypatch, cache)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    close_session()
