"""The page at / and what it asks: documents, their prefill, questions about them.

Documents are kept in memory, and found again in a prompt.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import Field, FiniteFloat
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from hybrid_kv.api.tokens import AskedMessages
from hybrid_kv.plugins import METHODS
from hybrid_kv.serve.http.answers import EventStream, error_of, event, merged, report_of
from hybrid_kv.serve.http.schemas import ApiError, Extensions, StrictSchema, Text, ended_early
from hybrid_kv.serve.http.service import ParsedRequest, Service, new_ident
from hybrid_kv.serve.http.tokenizer import Encoder, Texts
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
                told = {} if happened.error is None else {"error": error_of(happened)}
                yield event({"text": text, **told}, "token")
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


# Documents ---------------------------------------------------------------------------------------

MAX_DOCUMENTS = 16
MAX_CHARACTERS = 64 * 2**20
"""Of all documents together; the oldest give way."""

_ANCHOR = 64
"""Tokens by which a document is found in a prompt."""
_MOST_BEFORE = 4096
"""Tokens that a chat template may write before a document."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text and how it is taken apart by itself.

    ids: without special tokens. offsets: [(begin, end)] of each, in characters; empty where the
    tokenizer does not tell.
    """

    ident: str
    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]

    def spans(
        self, prompt: Sequence[int], places: Sequence[tuple[int, float]]
    ) -> list[dict[str, Any]]:
        """Places of a prompt as characters of the text; those outside of it are left out."""
        start = self._start_in(prompt)
        if start is None or not self.offsets:
            return []
        found = []
        for position, weight in places:
            at = position - start
            if 0 <= at < len(self.ids) and prompt[position] == self.ids[at]:
                begin, end = self.offsets[at]
                found.append({"begin": begin, "end": end, "weight": weight})
        return found

    def _start_in(self, prompt: Sequence[int]) -> int | None:
        """Place of the text in a prompt, in tokens.

        The first tokens may differ, because a word joins with what stands before it.
        """
        for skipped in range(min(4, len(self.ids))):
            anchor = self.ids[skipped : skipped + _ANCHOR]
            last = min(len(prompt) - len(anchor), _MOST_BEFORE) + 1
            for start in range(max(0, last)):
                if prompt[start] == anchor[0] and list(prompt[start:][: len(anchor)]) == anchor:
                    return start - skipped
        return None


class Documents:
    """The latest documents, by a name that their content gives."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._kept: OrderedDict[str, Document] = OrderedDict()

    async def add(self, content: bytes) -> Document:
        """Keeps a text.

        Raises:
            ApiError: it is none, or empty.
        """
        text = _decoded(content)
        ident = sha256(text.encode()).hexdigest()[:32]
        if ident not in self._kept:
            ids, offsets = await self._texts.encode_with_offsets(text)
            self._kept[ident] = Document(ident, text, ids, offsets)
        self._kept.move_to_end(ident)
        while len(self._kept) > MAX_DOCUMENTS or self._characters > MAX_CHARACTERS:
            self._kept.popitem(last=False)
            if len(self._kept) == 1:
                break
        return self._kept[ident]

    def get(self, ident: str) -> Document:
        """A document that was added.

        Raises:
            ApiError: it is not here, or no longer.
        """
        if ident not in self._kept:
            raise ApiError(
                404,
                "document is not on the server, or no longer; send it again",
                "document",
                "document_not_found",
            )
        self._kept.move_to_end(ident)
        return self._kept[ident]

    @property
    def _characters(self) -> int:
        return sum(len(document.text) for document in self._kept.values())

    async def before_question(self, document: Document) -> tuple[int, ...]:
        """The tokens of a prompt that come out the same whatever is asked about a document."""
        if not self._texts.has_template:
            return await self._texts.encode(document.text)

        def encode(own: Encoder) -> tuple[int, ...]:
            assert own.template is not None
            asked = AskedMessages(own.template, [{"role": "user", "content": document.text}])
            return tuple(asked.before_question())

        return await self._texts.in_thread(encode)

    async def prompt(
        self, document: Document | None, turns: Sequence[tuple[str, str]], question: str
    ) -> tuple[int, ...]:
        """A question about a document, after others and their answers.

        Without a chat template the question follows the document as it is, and turns are left out.
        """
        if not self._texts.has_template:
            if document is None:
                return await self._texts.encode(question, "question")
            before = await self._texts.encode(document.text)
            return before + tuple(await self._texts.encode_more(f"\n\n{question}"))
        asked = [*(ask for ask, _ in turns), question]
        if document is not None:
            asked[0] = f"{document.text}\n\n{asked[0]}"
        messages = []
        for ask, answer in zip(asked, [*(answer for _, answer in turns), None], strict=True):
            messages.append({"role": "user", "content": ask})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return await self._texts.encode_chat(messages, "question")


def _decoded(content: bytes) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        kind = "a PDF" if content.startswith(b"%PDF-") else f"byte {error.start} that is none"
        raise ApiError(
            400,
            f"document must be text in UTF-8, got {kind}; convert it to text first",
            "document",
            "unreadable_document",
        ) from None
    if "\0" in text:
        raise ApiError(
            400,
            "document must be text, got bytes of zero in it; convert it to text first",
            "document",
            "unreadable_document",
        )
    if not text.strip():
        raise ApiError(400, "document is empty; send some text", "document", "empty_document")
    return text
