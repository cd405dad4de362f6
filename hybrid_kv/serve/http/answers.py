"""Answers on their way out: gathered into one response, or streamed as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from hybrid_kv.serve.http.errors import ApiError, ended_early
from hybrid_kv.serve.http.forms import Form, Json, finish_of, report_of, usage_of
from hybrid_kv.serve.http.service import ParsedRequest, Service
from hybrid_kv.serve.requests import Finished, Happening, Prefilled, RequestHandle, Token

T = TypeVar("T")

NO_BUFFER = {"cache-control": "no-store", "x-accel-buffering": "no"}
"""Keeps proxies from holding events back."""


async def gathered(
    service: Service, order: ParsedRequest, forms: Sequence[Form], http: HttpRequest, extended: bool
) -> Response:
    """The whole answer, unless the client leaves before.

    Args:
        forms: of each choice.
        extended: whether a choice has the `hybrid_kv` object.

    Raises:
        ApiError: a request ended without an answer.
    """
    with service.submitted(order) as tickets:
        answers = await unless_left(http, _read_all(tickets))
    choices = []
    for number, (form, (tokens, end)) in enumerate(zip(forms, answers, strict=True)):
        _check_end(tokens, end)
        service.ended(end)
        choice = {"index": number, **form.whole(tokens, finish_of(end.reason))}
        choices.append({**choice, "hybrid_kv": report_of(end)} if extended else choice)
    ends = [end for _, end in answers]
    usage = _usage(order, ends)
    return JSONResponse({**_head(service, order, forms[0].name), "choices": choices, **usage})


async def _read_all(tickets: Sequence[RequestHandle]) -> list[tuple[list[Token], Finished]]:
    return await asyncio.gather(*map(_read, tickets))


async def _read(ticket: RequestHandle) -> tuple[list[Token], Finished]:
    tokens: list[Token] = []
    async for event in ticket.aevents():
        if isinstance(event, Token):
            tokens.append(event)
        elif isinstance(event, Finished):
            return tokens, event
    raise AssertionError("a ticket ends with Finished")


async def unless_left(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """Result of some work, which is cancelled when the client leaves.

    Raises:
        ApiError: it has left.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(http))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError(499, "the client has left")  # nobody is there to read it
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(http: HttpRequest) -> None:
    """Returns when the client has gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _check_end(tokens: Sequence[Token], end: Finished) -> None:
    """Raises ApiError for an end that is no answer; what came before time ran out is one."""
    if end.reason in ("error", "cancelled") or (end.reason == "timeout" and not tokens):
        raise ended_early(end.reason, end.error)


def _usage(order: ParsedRequest, ends: Sequence[Finished]) -> Json:
    usages = [end.usage for end in ends]
    return {"usage": usage_of(usages[:: order.choices], usages)}


def _head(service: Service, order: ParsedRequest, name: str) -> Json:
    head = {"id": order.ident, "object": name, "created": order.created, "model": service.name}
    return {**head, "system_fingerprint": None}


class EventStream(StreamingResponse):
    """Server-sent events of tickets, which are released however it ends.

    Args:
        events: lines that begin with "data:" or ":", without the empty line behind them.
    """

    def __init__(
        self, service: Service, tickets: list[RequestHandle], events: AsyncIterator[str]
    ) -> None:
        super().__init__(_lines(events), 200, NO_BUFFER, "text/event-stream")
        self._release: Callable[[], None] = lambda: service.release(tickets)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._release()


async def _lines(events: AsyncIterator[str]) -> AsyncIterator[str]:
    async for event in events:
        yield f"{event}\n\n"


def streamed(
    service: Service,
    order: ParsedRequest,
    forms: Sequence[Form],
    *,
    include_usage: bool,
    extended: bool,
) -> EventStream:
    """The answer in chunks; prefill shows as comments, which clients pass over."""
    tickets = service.submit(order)
    events = _chunks(service, order, forms, tickets, include_usage, extended)
    return EventStream(service, tickets, events)


async def _chunks(
    service: Service,
    order: ParsedRequest,
    forms: Sequence[Form],
    tickets: list[RequestHandle],
    include_usage: bool,
    extended: bool,
) -> AsyncIterator[str]:
    head = _head(service, order, forms[0].chunk_name)
    if include_usage:
        head["usage"] = None

    def chunk(number: int, choice: Json) -> str:
        return event({**head, "choices": [{"index": number, **choice}]})

    for number, form in enumerate(forms):
        if (first := form.first()) is not None:
            yield chunk(number, first)
    held: list[list[Token]] = [[] for _ in forms]  # tokens without text wait for the next
    ends: dict[int, Finished] = {}
    async for number, happened in merged(tickets):
        match happened:
            case Prefilled(done=done, total=total):
                yield f": prefill {done}/{total}"
            case Token():
                held[number].append(happened)
                if happened.text:
                    yield chunk(number, forms[number].chunk(held[number]))
                    held[number] = []
            case Finished():
                ends[number] = happened
                service.ended(happened)
                any_token = happened.usage.completion_tokens > 0
                failed = happened.reason in ("error", "cancelled")
                if failed or (happened.reason == "timeout" and not any_token):
                    yield event(ended_early(happened.reason, happened.error).body)
                    return
                if held[number]:
                    yield chunk(number, forms[number].chunk(held[number]))
                last = forms[number].last(finish_of(happened.reason))
                if extended:
                    last["hybrid_kv"] = report_of(happened)
                yield chunk(number, last)
    if include_usage:
        in_order = [ends[number] for number in range(len(forms))]
        yield event({**head, "choices": [], **_usage(order, in_order)})
    yield "data: [DONE]"


async def merged(tickets: Sequence[RequestHandle]) -> AsyncIterator[tuple[int, Happening]]:
    """Events of several requests as they happen, each with the number of its request."""
    queue: asyncio.Queue[tuple[int, Happening]] = asyncio.Queue()

    async def follow(number: int, ticket: RequestHandle) -> None:
        async for happened in ticket.aevents():
            queue.put_nowait((number, happened))

    tasks = [asyncio.create_task(follow(*each)) for each in enumerate(tickets)]
    open_tickets = len(tickets)
    try:
        while open_tickets:
            number, happened = await queue.get()
            open_tickets -= isinstance(happened, Finished)
            yield number, happened
    finally:
        for task in tasks:
            task.cancel()


def event(content: Any, name: str | None = None) -> str:
    """One server-sent event."""
    data = f"data: {json.dumps(content, ensure_ascii=False, allow_nan=False)}"
    return data if name is None else f"event: {name}\n{data}"
