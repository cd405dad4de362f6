"""The page at / and what it asks: documents, their prefill, questions about them.

What is asked and answered is kept by the server, so that every tab finds it again.
"""

from __future__ import annotations

import asyncio
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
from hybrid_kv.serve.http.answers import EventStream, error_of, event, merged, report_of
from hybrid_kv.serve.http.documents import Document, DocumentEncoder, text_of
from hybrid_kv.serve.http.library import MAX_DOCUMENTS, Library, ident_of
from hybrid_kv.serve.http.schemas import ApiError, Extensions, StrictSchema, Text, ended_early
from hybrid_kv.serve.http.service import ParsedRequest, Service, new_ident
from hybrid_kv.serve.requests import Finished, Prefilled, Request, RequestHandle, Sampling, Token

UPLOAD = "/hybrid_kv/documents"

PARTS = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/hybrid_kv/page.css": ("page.css", "text/css; charset=utf-8"),
    "/hybrid_kv/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/hybrid_kv/words.js": ("words.js", "text/javascript; charset=utf-8"),
    "/hybrid_kv/markdown.js": ("markdown.js", "text/javascript; charset=utf-8"),
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


class DocumentRequest(StrictSchema):
    """POST /hybrid_kv/read, clear and remove. document: as it was named when it was sent."""

    document: str


class AskRequest(StrictSchema):
    """POST /hybrid_kv/ask. document: as it was named when it was sent; None for none."""

    document: str | None = None
    question: Annotated[Text, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] = 256
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] = 0.0
    hybrid_kv: Extensions = Extensions()


def add_page(app: FastAPI, service: Service) -> None:
    """The page, and its part of the interface.

    Raises:
        ConfigError: the folder of documents cannot be used.
    """
    library, encoder = Library(service.documents_folder), DocumentEncoder(service.texts)
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
            "kept": service.documents_folder is not None,
            "most_documents": MAX_DOCUMENTS,
        }

    _add_documents(app, service, library, encoder)
    _add_questions(app, service, library, encoder)


def _add_documents(
    app: FastAPI, service: Service, library: Library, encoder: DocumentEncoder
) -> None:
    reading_files = asyncio.Semaphore(_MOST_FILES)

    @app.get(UPLOAD)
    async def listed() -> dict[str, Any]:
        """The documents, and how many questions were asked without one."""
        found = [document.facts(service.name) for document in library.all()]
        return {"documents": found, "free_questions": len(library.get(None).turns)}

    @app.get(f"{UPLOAD}/{{ident}}")
    async def whole(ident: str, text: bool = True) -> dict[str, Any]:
        """A document with its text, and what was asked about it; 'none' is no document."""
        document = library.get(ident)
        own = {"text": document.text} if text else {}
        return {**document.facts(service.name), **own, "turns": document.turns}

    @app.post(UPLOAD)
    async def add(http: HttpRequest, name: str = "Document") -> dict[str, Any]:
        """Keeps a text in UTF-8 or the text of a PDF, the whole body, to be asked about."""
        content = await http.body()
        async with reading_files:
            text = await asyncio.to_thread(text_of, content)
        service.texts.check_size(len(text.encode()), "document")
        # Before it is kept: one that is too long has no use, and others would give way to it.
        encoded = await encoder.encode(ident_of(text), text)
        _check_length(service, len(encoded.ids))
        document = library.add(text, " ".join(name.split())[:_LONGEST_NAME] or "Document")
        library.counted(document, service.name, len(encoded.ids))
        return document.facts(service.name)

    @app.post("/hybrid_kv/clear")
    async def clear(asked: DocumentRequest) -> dict[str, Any]:
        """Forgets what was asked about a document."""
        library.clear(document := library.get(asked.document))
        return document.facts(service.name)

    @app.post("/hybrid_kv/remove")
    async def remove(asked: DocumentRequest) -> dict[str, Any]:
        """Forgets a document and what was asked about it."""
        library.remove(document := library.get(asked.document))
        return document.facts(service.name)


def _add_questions(
    app: FastAPI, service: Service, library: Library, encoder: DocumentEncoder
) -> None:
    @app.post("/hybrid_kv/read", response_model=None)
    async def read(asked: DocumentRequest) -> Response:
        """Computes a document, so that questions about it need not; streams how far it is."""
        ids = await encoder.before_question(library.get(asked.document).text)
        _check_length(service, len(ids))
        # Greedily one token: what counts is what stays of the prompt.
        return _streamed(service, Request(ids, 1, Sampling(temperature=0)))

    @app.post("/hybrid_kv/ask", response_model=None)
    async def ask(asked: AskRequest) -> Response:
        """Answers a question; streams prefill, text, and where in the document it looked."""
        kept = library.get(asked.document)
        ids = await encoder.prompt(kept.text, kept.answered, asked.question)
        room = service.check_room(len(ids), 1, "question")
        ends = service.texts.chat_end_ids if service.texts.has_template else service.texts.end_ids
        plain = Request(
            ids,
            min(asked.max_tokens, room),
            Sampling(temperature=asked.temperature),
            end_ids=ends,
        )
        document = await encoder.encode(kept.ident, kept.text) if kept.text else None
        request = replace(service.extended(plain, asked.hybrid_kv), places=document is not None)
        turn = _Turn(library, kept.ident, asked.question)
        return _streamed(service, request, document, turn)


_MOST_FILES = 2
"""Files whose text is being read at a time."""

_LONGEST_NAME = 200


def _part(content: bytes, headers: dict[str, str]) -> Any:
    async def part() -> Response:
        return Response(content, headers=headers)

    return part


def _check_length(service: Service, tokens: int) -> None:
    """Raises ApiError for a document that leaves no room for a question."""
    longest = service.longest_prompt
    if longest is not None and tokens > longest:
        raise ApiError(
            400,
            f"a document must be at most {longest:,} tokens here, got {tokens:,}; send a part of "
            "it, or serve a model that reads more",
            "document",
            "context_length_exceeded",
        )


class _Turn:
    """A question, and what came of it: kept however its stream ends, if there is any text.

    asked: seconds since 1970.
    """

    def __init__(self, library: Library, ident: str, question: str) -> None:
        self._library, self._ident = library, ident
        self._question, self.asked = question, time.time()
        self._text, self._tokens = "", list[dict[str, Any]]()
        self._is_kept = False

    def add(self, told: dict[str, Any]) -> None:
        """A token, as it was sent."""
        self._text += told["text"]
        self._tokens.append(told)

    def end(self, done: dict[str, Any] | None, problem: str | None = None) -> str | None:
        """Keeps it, once.

        Args:
            done: what was sent at its end; None where it has none. problem: why.

        Returns:
            A sentence where it could not be kept.
        """
        if self._is_kept or (done is None and not self._text):
            return None
        self._is_kept = True
        turn = {"question": self._question, "answer": self._text, "asked": self.asked}
        if any("error" in told for told in self._tokens):
            turn["tokens"] = self._tokens
        return self._library.answer(self._ident, {**turn, "done": done, "problem": problem})


def _streamed(
    service: Service,
    request: Request,
    document: Document | None = None,
    turn: _Turn | None = None,
) -> EventStream:
    order = ParsedRequest(new_ident("page"), int(time.time()), [request], 1)
    tickets = service.submit(order)
    return EventStream(service, tickets, _events(service, tickets, document, turn))


async def _events(
    service: Service,
    tickets: list[RequestHandle],
    document: Document | None,
    turn: _Turn | None,
) -> AsyncIterator[str]:
    """`asked`, `prefill`, `token` and at last `done`, or `error`."""
    ids = tickets[0].request.ids
    try:
        if turn is not None:
            yield event({"asked": turn.asked}, "asked")
        async for _, happened in merged(tickets):
            match happened:
                case Prefilled(done=done, total=total, reused=reused):
                    yield event({"done": done, "total": total, "reused": reused}, "prefill")
                case Token(text=text):
                    told = {} if happened.error is None else {"error": error_of(happened)}
                    if turn is not None:
                        turn.add({"text": text, **told})
                    yield event({"text": text, **told}, "token")
                case Finished():
                    service.ended(happened)
                    if happened.reason in ("error", "cancelled"):
                        refused = ended_early(happened.reason, happened.error)
                        if turn is not None:
                            turn.end(None, refused.message)
                        yield event(refused.body, "error")
                        return
                    usage = happened.usage
                    ended = {
                        **report_of(happened),
                        "places": document.spans(ids, happened.report.places) if document else [],
                        "prompt_tokens": usage.prompt_tokens,
                        "completion_tokens": usage.completion_tokens,
                        "reused_tokens": usage.reused_tokens,
                    }
                    not_kept = None if turn is None else turn.end(ended)
                    yield event({**ended, "not_kept": not_kept}, "done")
    finally:
        if turn is not None:
            turn.end(None, "stopped")  # by who asked, who may also have closed the page
