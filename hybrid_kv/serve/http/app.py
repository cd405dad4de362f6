"""The routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from hybrid_kv.errors import HybridKVError
from hybrid_kv.serve.http.answers import (
    ChatForm,
    CompletionForm,
    Form,
    gathered,
    streamed,
    unless_left,
)
from hybrid_kv.serve.http.errors import ApiError, api_error
from hybrid_kv.serve.http.guard import Guard, Rules, log
from hybrid_kv.serve.http.metrics import CONTENT_TYPE
from hybrid_kv.serve.http.page import PARTS, UPLOAD, add_page
from hybrid_kv.serve.http.schemas import (
    ChatRequest,
    CompletionRequest,
    Generating,
    TokenizeRequest,
    first_problem,
)
from hybrid_kv.serve.http.service import ParsedRequest, Service

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
    async def invalid(http: HttpRequest, error: RequestValidationError) -> Response:
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
        return await answer(asked, order, [ChatForm(piece) for _ in order.requests], http)

    @app.post("/v1/completions", response_model=None)
    async def complete(asked: CompletionRequest, http: HttpRequest) -> Response:
        """Continues one or more prompts."""
        order = await unless_left(http, service.of_completion(asked))
        piece = None if asked.logprobs is None else service.texts.piece
        return await answer(asked, order, [CompletionForm(piece) for _ in order.requests], http)

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
