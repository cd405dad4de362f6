"""Answers on their way out: gathered into one response, or streamed as server-sent events.

Each choice has the JSON form of a chat or of a completion.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any, Protocol, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from hybrid_kv.serve.http.chat import CallReader
from hybrid_kv.serve.http.schemas import ApiError, ended_early
from hybrid_kv.serve.http.service import ParsedRequest, Service
from hybrid_kv.serve.requests import (
    Finished,
    Happening,
    Prefilled,
    Reason,
    RequestHandle,
    Token,
    Usage,
)

T = TypeVar("T")
Json = dict[str, Any]
Piece = Callable[[int], str]

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
        answers = await unless_left(http, read_all(tickets))
    ends = [end for _, end in answers]
    for end in ends:
        service.ended(end)
    if failed := [end for end in ends if end.reason in FAILED]:
        made = sum(end.usage.completion_tokens for end in ends)
        partial = [text_of(tokens) for tokens, _ in answers]
        raise ended_early(failed[0].reason, failed[0].error, made, partial)
    choices = []
    for number, (form, (tokens, end)) in enumerate(zip(forms, answers, strict=True)):
        choice = {"index": number, **form.whole(tokens, finish_of(end.reason))}
        own = {"hybrid_kv": report_of(end, errors_of(tokens))} if extended else {}
        choices.append({**choice, **own})
    usage = _usage(order, ends)
    return JSONResponse({**_head(service, order, forms[0].name), "choices": choices, **usage})


async def read_all(tickets: Sequence[RequestHandle]) -> list[tuple[list[Token], Finished]]:
    """Tokens and end of each request, in order."""
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


FAILED = ("error", "cancelled", "timeout")
"""Reasons of an end that is none of an answer: clients take 'length' for what they asked for."""


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
    errors: list[list[Json]] = [[] for _ in forms]  # those wait for a chunk
    ends: dict[int, Finished] = {}
    async for number, happened in merged(tickets):
        match happened:
            case Prefilled(done=done, total=total):
                yield f": prefill {done}/{total}"
            case Token():
                held[number].append(happened)
                errors[number] += errors_of([happened])
                if happened.text:
                    for piece in forms[number].chunks(held[number]):
                        yield chunk(number, with_errors(piece, errors[number]))
                        errors[number] = []
                    held[number] = []
            case Finished():
                ends[number] = happened
                service.ended(happened)
                if happened.reason in FAILED:
                    made = happened.usage.completion_tokens
                    yield event(ended_early(happened.reason, happened.error, made).body)
                    return
                report = report_of(happened, errors[number]) if extended else None
                for piece in _last_chunks(forms[number], held[number], happened, report):
                    yield chunk(number, piece)
    if include_usage:
        in_order = [ends[number] for number in range(len(forms))]
        yield event({**head, "choices": [], **_usage(order, in_order)})
    yield "data: [DONE]"


def _last_chunks(
    form: Form, held: Sequence[Token], end: Finished, report: Json | None
) -> list[Json]:
    """Tokens that were held, and the end with what it cost; None where nobody asks."""
    before = form.chunks(held) if held else []
    *rest, last = form.last(finish_of(end.reason))
    return [*before, *rest, last if report is None else {**last, "hybrid_kv": report}]


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


# JSON forms of a choice --------------------------------------------------------------------------

_LEAST_LOGPROB = -9999.0
"""Value that the interface writes for a probability of zero."""


class Form(Protocol):
    """JSON form of one choice.

    name: of the object; chunk_name: of a chunk of it.
    """

    name: str
    chunk_name: str

    def whole(self, tokens: Sequence[Token], finish: str) -> Json: ...

    def first(self) -> Json | None: ...

    def chunks(self, tokens: Sequence[Token]) -> list[Json]:
        """Of new tokens; none where what they say is held back."""
        ...

    def last(self, finish: str) -> list[Json]:
        """Chunks of the text that was held back, and of the end."""
        ...


class ChatForm:
    """/v1/chat/completions.

    Args:
        piece: the text of one token; None where log probabilities were not asked for.
        calls: reads calls out of the text; None where there is nothing to call.
    """

    name, chunk_name = "chat.completion", "chat.completion.chunk"

    def __init__(self, piece: Piece | None, calls: CallReader | None = None) -> None:
        self._piece, self._calls = piece, calls
        self._given = 0  # calls that have gone out

    def whole(self, tokens: Sequence[Token], finish: str) -> Json:
        message: Json = {"role": "assistant", "content": text_of(tokens), "refusal": None}
        if (reader := self._calls) is not None:
            shown = reader.add(text_of(tokens)) + reader.close()
            if reader.calls:
                message |= {"content": shown or None, "tool_calls": reader.calls}
        finish = self._finish(finish)
        return {"message": message, "logprobs": self._logprobs(tokens), "finish_reason": finish}

    def first(self) -> Json:
        return _chunk({"role": "assistant", "content": ""})

    def chunks(self, tokens: Sequence[Token]) -> list[Json]:
        text = text_of(tokens)
        shown = text if self._calls is None else self._calls.add(text)
        calls, logprobs = self._new_calls(), self._logprobs(tokens)
        if not (shown or calls or logprobs):
            return []
        return [_chunk({"content": shown, **calls}, logprobs)]

    def last(self, finish: str) -> list[Json]:
        rest = "" if self._calls is None else self._calls.close()
        calls = self._new_calls()
        left = [_chunk({"content": rest, **calls})] if rest or calls else []
        return [*left, _chunk({}, finish=self._finish(finish))]

    def _new_calls(self) -> Json:
        """Whole calls that have come since; nothing where there are none."""
        calls = [] if self._calls is None else self._calls.calls
        new = [{"index": number, **call} for number, call in enumerate(calls)][self._given :]
        self._given = len(calls)
        return {"tool_calls": new} if new else {}

    def _finish(self, finish: str) -> str:
        has_called = self._calls is not None and bool(self._calls.calls)
        return "tool_calls" if has_called and finish == "stop" else finish

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if self._piece is None:
            return None
        return {"content": [self._entry(token) for token in tokens], "refusal": None}

    def _entry(self, token: Token) -> Json:
        top = [self._named(idx, logprob) for idx, logprob in token.top]
        return {**self._named(token.id, token.logprob), "top_logprobs": top}

    def _named(self, idx: int, logprob: float | None) -> Json:
        assert self._piece is not None
        text = self._piece(idx)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _chunk(delta: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
    return {"delta": delta, "logprobs": logprobs, "finish_reason": finish}


class CompletionForm:
    """/v1/completions; one for each choice, because it counts characters."""

    name = chunk_name = "text_completion"

    def __init__(self, piece: Piece | None) -> None:
        self._piece, self._offset = piece, 0

    def whole(self, tokens: Sequence[Token], finish: str) -> Json:
        return {
            "text": text_of(tokens),
            "logprobs": self._logprobs(tokens),
            "finish_reason": finish,
        }

    def first(self) -> None:
        return None

    def chunks(self, tokens: Sequence[Token]) -> list[Json]:
        logprobs = self._logprobs(tokens)
        return [{"text": text_of(tokens), "logprobs": logprobs, "finish_reason": None}]

    def last(self, finish: str) -> list[Json]:
        return [{"text": "", "logprobs": None, "finish_reason": finish}]

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if self._piece is None:
            return None
        texts = [self._piece(token.id) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {self._piece(idx): _finite(logprob) for idx, logprob in token.top}
                for token in tokens
            ],
            "text_offset": offsets,
        }


def text_of(tokens: Sequence[Token]) -> str:
    """Text of several tokens together."""
    return "".join(token.text for token in tokens)


def finish_of(reason: Reason) -> str:
    """In the interface's words, of an end that is not `FAILED`."""
    return "stop" if reason == "stop" else "length"


def usage_of(prompts: Sequence[Usage], all_choices: Sequence[Usage]) -> Json:
    """Tokens of a request; a prompt counts once for all of its choices.

    Args:
        prompts: of the first choice of each prompt.
    """
    prompt = sum(usage.prompt_tokens for usage in prompts)
    completion = sum(usage.completion_tokens for usage in all_choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.reused_tokens for usage in prompts)},
    }


def report_of(end: Finished, errors: Sequence[Json] = ()) -> Json:
    """Costs of an answer: the `hybrid_kv` object of a choice.

    Args:
        errors: of its tokens, as `errors_of` gives them, or of those that have not gone out.
    """
    report = asdict(end.report)
    itl = report.pop("itl_ms")
    report["places"] = [
        {"position": position, "weight": weight} for position, weight in report["places"]
    ]
    report = {name: None if _is_nan(value) else value for name, value in report.items()}
    told = {"errors": list(errors)} if errors else {}
    return {"ended_by": end.reason, "tpot_ms": fmean(itl) if itl else None, **report, **told}


def errors_of(tokens: Sequence[Token]) -> list[Json]:
    """Errors of tokens, where they were asked for: `kl` and `kl_bar` in nats, `flip` as a share."""
    return [{"token": one.id, **error_of(one)} for one in tokens if one.error is not None]


def error_of(token: Token) -> Json:
    """Error of one token that has one."""
    given = {name: getattr(token.error, name) for name in ("kl", "kl_bar", "flip")}
    return {name: None if _is_nan(value) else value for name, value in given.items()}


def with_errors(content: Json, errors: Sequence[Json]) -> Json:
    """A piece of a stream, with the errors of its tokens if there are some."""
    return {**content, "hybrid_kv": {"errors": list(errors)}} if errors else content


def _finite(logprob: float | None) -> float | None:
    if logprob is None or math.isnan(logprob):
        return None
    return max(logprob, _LEAST_LOGPROB)


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
