"""The page at / and what it asks: documents, their prefill, questions about them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import Field, FiniteFloat
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from hybrid_kv.plugins import METHODS
from hybrid_kv.serve.http.answers import EventStream, event, merged
from hybrid_kv.serve.http.documents import Document, Documents
from hybrid_kv.serve.http.errors import ended_early
from hybrid_kv.serve.http.forms import report_of
from hybrid_kv.serve.http.schemas import Extensions, StrictSchema, Text
from hybrid_kv.serve.http.service import ParsedRequest, Service, new_ident
from hybrid_kv.serve.requests import Finished, Prefilled, Request, RequestHandle, Sampling, Token

UPLOAD = "/hybrid_kv/documents"

PARTS = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/hybrid_kv/page.css": ("page.css", "text/css; charset=utf-8"),
    "/hybrid_kv/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
"""Files of the page; they hold nothing of a model or a request."""

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class ReadRequest(StrictSchema):
    """POST /hybrid_kv/read."""

    document: str


class PageTurn(StrictSchema):
    """A question and its answer."""

    question: Text
    answer: Text


class AskRequest(StrictSchema):
    """POST /hybrid_kv/ask. document: as it was named when it was sent; None for none."""

    document: str | None = None
    question: Annotated[Text, Field(min_length=1)]
    turns: Annotated[list[PageTurn], Field(max_length=200)] = []  # noqa: RUF012 (pydantic copies it)
    max_tokens: Annotated[int, Field(ge=1)] = 256
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] = 0.0
    hybrid_kv: Extensions = Extensions()


def add_page(app: FastAPI, service: Service) -> None:
    """The page, and its part of the interface."""
    documents = Documents(service.texts)
    folder = files("hybrid_kv.serve.http") / "static"
    for path, (name, kind) in PARTS.items():
        content = (folder / name).read_bytes()
        app.get(path, include_in_schema=False)(_part(content, {**_HEADERS, "content-type": kind}))

    @app.get("/hybrid_kv/info")
    async def info() -> dict[str, Any]:
        """Facts for the page: the model that is served, and its settings."""
        return {
            "model": service.name,
            "chat": service.texts.has_template,
            "context": service.context,
            "method": service.config.method,
            "methods": sorted(METHODS),
        }

    @app.post(UPLOAD)
    async def add(http: HttpRequest) -> dict[str, Any]:
        """Keeps a text in UTF-8, the whole body, to be asked about."""
        content = await http.body()
        service.texts.check_size(len(content), "document")
        document = await documents.add(content)
        service.check_room(len(document.ids), 1, "document")
        counts = {"tokens": len(document.ids), "characters": len(document.text)}
        return {"document": document.ident, **counts}

    @app.post("/hybrid_kv/read", response_model=None)
    async def read(asked: ReadRequest) -> Response:
        """Computes a document, so that questions about it need not; streams how far it is."""
        ids = await documents.before_question(documents.get(asked.document))
        service.check_room(len(ids), 1, "document")
        # Greedily one token: what counts is what stays of the prompt.
        return _streamed(service, Request(ids, 1, Sampling(temperature=0)), None)

    @app.post("/hybrid_kv/ask", response_model=None)
    async def ask(asked: AskRequest) -> Response:
        """Answers a question; streams prefill, text, and where in the document it looked."""
        document = None if asked.document is None else documents.get(asked.document)
        turns = [(turn.question, turn.answer) for turn in asked.turns]
        ids = await documents.prompt(document, turns, asked.question)
        room = service.check_room(len(ids), 1, "question")
        ends = service.texts.chat_end_ids if service.texts.has_template else service.texts.end_ids
        plain = Request(
            ids,
            min(asked.max_tokens, room),
            Sampling(temperature=asked.temperature),
            end_ids=ends,
        )
        request = replace(service.extended(plain, asked.hybrid_kv), places=document is not None)
        return _streamed(service, request, document)


def _part(content: bytes, headers: dict[str, str]) -> Any:
    async def part() -> Response:
        return Response(content, headers=headers)

    return part


def _streamed(service: Service, request: Request, document: Document | None) -> EventStream:
    order = ParsedRequest(new_ident("page"), int(time.time()), [request], 1)
    tickets = service.submit(order)
    return EventStream(service, tickets, _events(service, tickets, document))


async def _events(
    service: Service, tickets: list[RequestHandle], document: Document | None
) -> AsyncIterator[str]:
    """`prefill`, `token` and at last `done`, or `error`."""
    ids = tickets[0].request.ids
    async for _, happened in merged(tickets):
        match happened:
            case Prefilled(done=done, total=total, reused=reused):
                yield event({"done": done, "total": total, "reused": reused}, "prefill")
            case Token(text=text):
                yield event({"text": text}, "token")
            case Finished():
                service.ended(happened)
                if happened.reason in ("error", "cancelled"):
                    yield event(ended_early(happened.reason, happened.error).body, "error")
                    return
                report = report_of(happened)
                spans = document.spans(ids, happened.report.places) if document else []
                usage = happened.usage
                yield event(
                    {
                        **report,
                        "places": spans,
                        "prompt_tokens": usage.prompt_tokens,
                        "completion_tokens": usage.completion_tokens,
                        "reused_tokens": usage.reused_tokens,
                    },
                    "done",
                )
