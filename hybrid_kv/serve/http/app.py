"""The routes, and the guard of every request before anything reads it.

The guard looks at host, key, type, size and rate.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybrid_kv.errors import HybridKVError
from hybrid_kv.serve.http.answers import (
    ChatForm,
    CompletionForm,
    Form,
    gathered,
    streamed,
    unless_left,
)
from hybrid_kv.serve.http.chat import CallReader, ChatRequest, TokenizeRequest
from hybrid_kv.serve.http.metrics import CONTENT_TYPE, RequestLine
from hybrid_kv.serve.http.page import PARTS, UPLOAD, add_page
from hybrid_kv.serve.http.responses import ResponsesRequest, answer_response
from hybrid_kv.serve.http.schemas import (
    ApiError,
    CompletionRequest,
    Generating,
    api_error,
    first_problem,
    lenient,
)
from hybrid_kv.serve.http.service import ParsedRequest, Service

log = logging.getLogger("hybrid_kv.serve")

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules by which requests are let in.

    api_key: that must be shown; None for none. hosts: names by which the server may be called; None
    for any. Where it serves this machine alone, no other name means it, and a page of somebody
    else's that has its own name lead here (DNS rebinding) is refused. max_body_bytes: of one body;
    max_bodies_bytes: of all that are being read or answered. body_seconds: for a body to arrive.
    lenient: settings that are not served are ignored, each with one warning, and not refused.
    """

    api_key: str | None = None
    hosts: tuple[str, ...] | None = None
    max_body_bytes: int = 32 * 2**20
    max_bodies_bytes: int = 256 * 2**20
    body_seconds: float = 30.0
    lenient: bool = False


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
        self._ignored: set[str] = set()

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
            with lenient(self._ignore) if self._rules.lenient else nullcontext():
                await self._app(scope, _replayed(bytes(body), receive), send)
        finally:
            self._held -= len(body)

    def _ignore(self, name: str) -> None:
        if name not in self._ignored and len(self._ignored) < _MOST_IGNORED:
            self._ignored.add(name)
            log.warning("'%s' of requests is ignored; it is not served here", name[:100])

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
_MOST_IGNORED = 1000
"""Names of settings that are remembered: clients may send any."""


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


_OPEN = {"/health", *PARTS}
"""Paths that need no key: they tell nothing of a model or a request."""


def application(service: Service, rules: Rules, cors_origins: Sequence[str] = ()) -> ASGIApp:
    """Everything that is served, behind its guard.

    Args:
        cors_origins: pages of other servers that may ask from a browser, such as
            "http://localhost:3000".
    """
    app = FastAPI(
        title="hybrid-kv",
        docs_url=None,  # their scripts come from another server
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_refusals(app)
    _add_answers(app, service)
    _add_facts(app, service)
    add_page(app, service)
    guarded: ASGIApp = Guard(
        app,
        rules,
        is_open=_OPEN.__contains__,
        documents=(UPLOAD,),
        responded=service.metrics.responded,
    )
    if cors_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return guarded


def _add_refusals(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    @app.exception_handler(ValidationError)
    async def invalid(
        http: HttpRequest, error: RequestValidationError | ValidationError
    ) -> Response:
        sentence, name = first_problem(list(error.errors()))
        return ApiError(400, sentence, name).response()

    @app.exception_handler(HTTPException)
    async def refused(http: HttpRequest, error: HTTPException) -> Response:
        sentences = {
            404: f"there is nothing at {http.url.path!r}; the interface is at /v1",
            405: f"{http.method} is not served at {http.url.path!r}; see the header 'allow'",
        }
        sentence = sentences.get(error.status_code, f"{error.detail}")
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        headers = dict(error.headers or {})
        return ApiError(error.status_code, sentence, code=code, headers=headers).response()

    @app.exception_handler(Exception)
    @app.exception_handler(ApiError)
    @app.exception_handler(HybridKVError)
    async def failed(http: HttpRequest, error: Exception) -> Response:
        refusal = api_error(error)
        if refusal.status == 500 and isinstance(error, HybridKVError):  # the guard logs all others
            log.error("%s %s failed", http.method, http.url.path, exc_info=error)
        return refusal.response()


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def chat(asked: ChatRequest, http: HttpRequest) -> Response:
        """Answers messages."""
        order = await unless_left(http, service.of_chat(asked))
        piece = service.texts.piece if asked.logprobs else None
        functions = [tool.rendered()["function"] for tool in asked.callable]
        forms = [
            ChatForm(piece, CallReader(functions) if functions else None) for _ in order.requests
        ]
        return await answer(asked, order, forms, http)

    @app.post("/v1/completions", response_model=None)
    async def complete(asked: CompletionRequest, http: HttpRequest) -> Response:
        """Continues one or more prompts."""
        order = await unless_left(http, service.of_completion(asked))
        piece = None if asked.logprobs is None else service.texts.piece
        return await answer(asked, order, [CompletionForm(piece) for _ in order.requests], http)

    @app.post("/v1/responses", response_model=None)
    async def respond(asked: ResponsesRequest, http: HttpRequest) -> Response:
        """Answers messages, in the form of OpenAI's newer interface."""
        return await answer_response(service, asked, http)

    async def answer(
        asked: Generating, order: ParsedRequest, forms: Sequence[Form], http: HttpRequest
    ) -> Response:
        extended = asked.hybrid_kv is not None
        if not asked.stream:
            return await gathered(service, order, forms, http, extended)
        options = asked.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        return streamed(service, order, forms, include_usage=wants_usage, extended=extended)


def _add_facts(app: FastAPI, service: Service) -> None:
    model = {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "hybrid_kv",
        "max_model_len": service.context,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        """The same, by name."""
        service.check_model(name)
        return model

    @app.post("/tokenize")
    async def tokenize(asked: TokenizeRequest) -> dict[str, Any]:
        """Token ids of a prompt, or of messages as the chat template renders them."""
        if asked.model is not None:
            service.check_model(asked.model)
        if asked.messages is not None:
            ids = await service.texts.encode_chat([each.rendered() for each in asked.messages])
        else:
            ids = await service.texts.encode(asked.prompt or "")
        return {"count": len(ids), "max_model_len": service.context, "tokens": ids}

    @app.get("/health")
    async def health() -> Response:
        """Whether requests are taken."""
        status = "ending" if service.closing else "ok"
        return JSONResponse({"status": status}, 503 if service.closing else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE})
