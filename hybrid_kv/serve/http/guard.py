"""Guard of every request before anything reads it: host, key, type, size and rate."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybrid_kv.serve.http.errors import ApiError, api_error
from hybrid_kv.serve.http.metrics import RequestLine

log = logging.getLogger("hybrid_kv.serve")

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules by which requests are let in.

    api_key: that must be shown; None for none. hosts: names by which the server may be called; None
    for any. Where it serves this machine alone, no other name means it, and a page of somebody
    else's that has its own name lead here (DNS rebinding) is refused. max_body_bytes: of one body;
    max_bodies_bytes: of all that are being read or answered. body_seconds: for a body to arrive.
    """

    api_key: str | None = None
    hosts: tuple[str, ...] | None = None
    max_body_bytes: int = 32 * 2**20
    max_bodies_bytes: int = 256 * 2**20
    body_seconds: float = 30.0


class Guard:
    """Lets an application see whole bodies of requests that may be asked.

    Args:
        is_open: whether a path needs no key.
        documents: paths whose bodies are no JSON.
        responded: called with the status of each response.
    """

    def __init__(
        self,
        app: ASGIApp,
        rules: Rules,
        *,
        is_open: Callable[[str], bool],
        documents: tuple[str, ...],
        responded: Callable[[int], None],
    ) -> None:
        self._app, self._rules, self._is_open = app, rules, is_open
        self._documents, self._responded = documents, responded
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request of HTTP; of all else what the application says."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with RequestLine(scope["method"], scope["path"]) as line:
            await self._answer(scope, receive, send, line)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, line: RequestLine) -> None:
        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                line.status = message["status"]
                self._responded(line.status)
            await send(message)

        try:
            await self._let_in(scope, receive, noted)
        except Exception as error:
            refusal = api_error(error)
            if refusal.status == 500:
                log.exception("%s %s failed", scope["method"], scope["path"])
            if not line.status:
                await refusal.response()(scope, receive, noted)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        self._check_host(headers)
        if not self._is_open(scope["path"]):
            self._check_key(headers)
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            if scope["method"] == "HEAD":  # of which the server leaves out the body
                scope = {**scope, "method": "GET"}
            await self._app(scope, receive, send)
            return
        self._check_type(headers, scope["path"])
        body = bytearray()
        try:
            await self._read(headers, receive, body)
            await self._app(scope, _replayed(bytes(body), receive), send)
        finally:
            self._held -= len(body)

    def _check_host(self, headers: Headers) -> None:
        allowed = self._rules.hosts
        name = _host(headers.get("host", ""))
        if allowed is not None and name not in allowed:
            raise ApiError(
                403,
                f"host must be {' or '.join(allowed)} here, got {name[:100]!r}; start the server "
                "with --host 0.0.0.0 and --api-key to serve others",
                code="wrong_host",
            )

    def _check_key(self, headers: Headers) -> None:
        expected = self._rules.api_key
        if expected is None:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Headers are bytes that were read as latin-1.
        same = hmac.compare_digest(given.strip().encode("latin-1"), expected.encode())
        if scheme.lower() != "bearer" or not same:
            raise ApiError(
                401,
                "the server's API key is expected, as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _check_type(self, headers: Headers, path: str) -> None:
        """A page of somebody else's can send plain text without order; JSON it cannot."""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        expected = "application/octet-stream" if path in self._documents else "application/json"
        if kind != expected:
            raise ApiError(
                415,
                f"content-type must be {expected}, got {kind[:100]!r}",
                code="unsupported_media_type",
            )

    async def _read(self, headers: Headers, receive: Receive, body: bytearray) -> None:
        """The whole body, within the limits.

        Raises:
            ApiError: it is too long, too slow, or there is no room for it.
        """
        rules = self._rules
        announced = headers.get("content-length", "")
        if announced.isdigit() and int(announced) > rules.max_body_bytes:
            await self._too_long(receive)
        try:
            async with asyncio.timeout(rules.body_seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "body stops in the middle; send all of it")
                    part = message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) + len(part) > rules.max_body_bytes:
                        await self._too_long(receive)
                    if self._held + len(part) > rules.max_bodies_bytes:
                        raise ApiError(
                            503,
                            "the server holds too many long requests; ask again later",
                            code="no_room_now",
                            headers={"retry-after": "5", "connection": "close"},
                        )
                    self._held += len(part)
                    body += part
        except TimeoutError:
            raise ApiError(
                408,
                f"body must arrive within {rules.body_seconds:g} seconds, got {len(body):,} bytes "
                "of it",
                code="body_too_slow",
                headers={"connection": "close"},
            ) from None

    async def _too_long(self, receive: Receive) -> None:
        """Raises ApiError; before, takes what is on the way, or the client would not see it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
        raise ApiError(
            413,
            f"body must be at most {self._rules.max_body_bytes:,} bytes; shorten it or raise the "
            "server's --max-body",
            code="body_too_long",
            headers={"connection": "close"},
        )


_LAST_SECONDS = 1.0


def _host(header: str) -> str:
    """'localhost:8000' -> 'localhost', '[::1]:8000' -> '::1'."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Messages for an application: the body at once, then what else comes."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
