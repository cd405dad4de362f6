"""/v1/responses: a chat in the form of OpenAI's newer interface, in the parts that clients use.

A request is turned into that of a chat. Nothing is stored, so none continues an earlier response.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import count
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, FiniteFloat
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from hybrid_kv.serve.http.answers import (
    EventStream,
    Json,
    errors_of,
    event,
    merged,
    read_all,
    report_of,
    text_of,
    unless_left,
    with_errors,
)
from hybrid_kv.serve.http.chat import CallReader, ChatRequest, Function
from hybrid_kv.serve.http.schemas import ANYTHING, Extensions, StrictSchema, Text, ended_early
from hybrid_kv.serve.http.service import ParsedRequest, Service, new_ident
from hybrid_kv.serve.requests import Finished, Prefilled, RequestHandle, Token, Usage

DELTA = "response.output_text.delta"
"""Kind of the events that bring text."""


class ResponsePart(StrictSchema):
    """A piece of a message's text."""

    unserved: ClassVar = {"annotations": (ANYTHING,), "logprobs": (ANYTHING,)}

    type: Literal["input_text", "output_text", "text"]
    text: Text


class ResponseMessage(StrictSchema):
    """A message of the input, or of an earlier output."""

    unserved: ClassVar = {"id": (ANYTHING,), "status": (ANYTHING,), "phase": (ANYTHING,)}

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[ResponsePart]


class ResponseCall(StrictSchema):
    """A call of an earlier output."""

    unserved: ClassVar = {
        "id": (ANYTHING,),
        "status": (ANYTHING,),
        "parsed_arguments": (ANYTHING,),
    }

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class ResponseCallOutput(StrictSchema):
    """The answer of a function to a call."""

    unserved: ClassVar = {"id": (ANYTHING,), "status": (ANYTHING,)}

    type: Literal["function_call_output"]
    call_id: Text
    output: Text


class ResponseTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class ResponseToolChoice(StrictSchema):
    """The function that must be called."""

    type: Literal["function"]
    name: Text


class TextFormat(StrictSchema):
    """The form of the answer; name and `strict` change nothing."""

    unserved: ClassVar = {"name": (ANYTHING,), "strict": (ANYTHING,), "description": (ANYTHING,)}

    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextSettings(StrictSchema):
    """Settings of the answer's text."""

    unserved: ClassVar = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class ResponsesRequest(StrictSchema):
    """POST /v1/responses."""

    unserved: ClassVar = {
        **dict.fromkeys(("background", "stream_options"), (False, {})),
        **dict.fromkeys(("conversation", "max_tool_calls", "previous_response_id", "prompt"), ()),
        **dict.fromkeys(("metadata", "prompt_cache_key", "safety_identifier"), (ANYTHING,)),
        **dict.fromkeys(("store", "user"), (ANYTHING,)),
        "include": ([],),
        "reasoning": ({},),
        "service_tier": ("auto", "default"),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    model: str
    input: Text | list[ResponseMessage | ResponseCall | ResponseCallOutput]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    hybrid_kv: Extensions | None = None

    def as_chat(self) -> ChatRequest:
        """The request of a chat that asks for the same.

        Raises:
            pydantic.ValidationError: its parts do not agree.
        """
        choice: Any = self.tool_choice
        if isinstance(choice, ResponseToolChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        given = {
            "model": self.model,
            "messages": list(self._messages()),
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [_tool_of_a_chat(tool) for tool in self.tools or []],
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._response_format(),
            "hybrid_kv": self.hybrid_kv,
        }
        return ChatRequest.model_validate(given)

    def _messages(self) -> Iterator[dict[str, Any]]:
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        calls: list[dict[str, Any]] = []
        for item in self.input:
            if isinstance(item, ResponseCall):  # those in a row are of one message
                function = {"name": item.name, "arguments": item.arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
                continue
            if calls:
                yield {"role": "assistant", "content": None, "tool_calls": calls}
                calls = []
            if isinstance(item, ResponseCallOutput):
                yield {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
            else:
                whole = item.content
                text = whole if isinstance(whole, str) else "".join(part.text for part in whole)
                yield {"role": item.role, "content": text}
        if calls:
            yield {"role": "assistant", "content": None, "tool_calls": calls}

    def _response_format(self) -> dict[str, Any] | None:
        asked = None if self.text is None else self.text.format
        if asked is None:
            return None
        named = {} if asked.schema_ is None else {"json_schema": {"schema": asked.schema_}}
        return {"type": asked.type, **named}


def _tool_of_a_chat(tool: ResponseTool) -> dict[str, Any]:
    function = tool.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "function", "function": function}


async def answer_response(service: Service, asked: ResponsesRequest, http: HttpRequest) -> Response:
    """The whole response, or its events.

    Raises:
        ApiError: the request ended without an answer.
    """
    chat = asked.as_chat()
    order = await unless_left(http, service.of_chat(chat))
    functions = [tool.rendered()["function"] for tool in chat.callable]
    made = ResponseForm(service, asked, order, CallReader(functions) if functions else None)
    if asked.stream:
        tickets = service.submit(order)
        return EventStream(service, tickets, _events(service, made, tickets))
    with service.submitted(order) as tickets:
        ((tokens, end),) = await unless_left(http, read_all(tickets))
    if end.reason in ("error", "cancelled") or not tokens:
        raise ended_early(end.reason, end.error)
    service.ended(end)
    for _ in made.add(text_of(tokens)):
        pass
    for _ in made.close():
        pass
    return JSONResponse(made.response(end, errors_of(tokens)))


async def _events(
    service: Service, made: ResponseForm, tickets: list[RequestHandle]
) -> AsyncIterator[str]:
    numbers, errors, waiting = count(), list[Json](), list[Json]()

    def said(kind: str, **content: Any) -> str:
        return event({"type": kind, "sequence_number": next(numbers), **content}, kind)

    for kind in ("response.created", "response.in_progress"):
        yield said(kind, response=made.response())
    async for _, happened in merged(tickets):
        match happened:
            case Prefilled(done=done, total=total):
                yield f": prefill {done}/{total}"
            case Token(text=text):
                waiting += (new := errors_of([happened]))
                errors += new
                for kind, content in made.add(text):
                    told = waiting if kind == DELTA else []
                    yield said(kind, **with_errors(content, told))
                    waiting = [] if told else waiting
            case Finished():
                service.ended(happened)
                failed = happened.reason in ("error", "cancelled")
                if failed or not happened.usage.completion_tokens:
                    why = ended_early(happened.reason, happened.error)
                    yield said("error", code=why.code, message=why.message, param=why.param)
                    return
                for kind, content in made.close():
                    yield said(kind, **content)
                response = made.response(happened, errors)
                yield said(f"response.{response['status']}", response=response)


class ResponseForm:
    """JSON form of one response, whose output grows.

    Args:
        calls: reads calls out of the text; None where there is nothing to call.
    """

    def __init__(
        self,
        service: Service,
        asked: ResponsesRequest,
        order: ParsedRequest,
        calls: CallReader | None,
    ) -> None:
        self._model, self._asked, self._created = service.name, asked, order.created
        self._ident, self._calls = new_ident("resp"), calls
        self._output: list[dict[str, Any]] = []
        self._given = 0  # calls that are in the output

    def add(self, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Takes more of the answer's text; events, by kind."""
        yield from self._show(text if self._calls is None else self._calls.add(text))

    def close(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The events at the end of the text."""
        yield from self._show("" if self._calls is None else self._calls.close())
        if not self._output:
            yield from self._begin_message()
        yield from self._end_message()

    def response(self, end: Finished | None = None, errors: Sequence[Json] = ()) -> dict[str, Any]:
        """The response as it is.

        Args:
            end: of its request, when it has ended. errors: of its tokens, see `errors_of`.
        """
        asked, reason, error = self._asked, None, None
        status = "in_progress" if end is None else "completed"
        if end is not None and end.reason == "timeout":
            why = ended_early(end.reason, end.error, end.usage.completion_tokens)
            status, error = "failed", {"code": "server_error", "message": why.message}
        elif end is not None and end.reason != "stop":
            status, reason = "incomplete", {"reason": "max_output_tokens"}
        made: dict[str, Any] = {
            "id": self._ident,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": error,
            "incomplete_details": reason,
            "model": self._model,
            "output": self._output,
            "previous_response_id": None,
            "truncation": "disabled",
            "usage": None if end is None else _usage(end.usage),
            "metadata": {},
        }
        same = ("instructions", "max_output_tokens", "temperature", "top_p")
        made |= {name: getattr(asked, name) for name in same}
        choice = asked.tool_choice
        made["tool_choice"] = "auto" if choice is None else _plain(choice)
        made["tools"] = [_plain(tool) for tool in asked.tools or []]
        made["parallel_tool_calls"] = asked.parallel_tool_calls is not False
        made["text"] = {"format": {"type": "text"}} if asked.text is None else _plain(asked.text)
        if end is not None and asked.hybrid_kv is not None:
            made["hybrid_kv"] = report_of(end, errors)
        return made

    def _show(self, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if text:
            if not self._output or self._output[-1]["type"] != "message":
                yield from self._begin_message()
            self._output[-1]["content"][0]["text"] += text
            place = self._place()
            yield DELTA, {**place, "delta": text, "logprobs": []}
        calls = [] if self._calls is None else self._calls.calls
        for call in calls[self._given :]:
            yield from self._end_message()
            yield from self._call(call)
        self._given = len(calls)

    def _place(self) -> dict[str, Any]:
        """Of the newest message's text."""
        number = len(self._output) - 1
        return {"item_id": self._output[-1]["id"], "output_index": number, "content_index": 0}

    def _item(self, stage: str) -> tuple[str, dict[str, Any]]:
        item = {**self._output[-1]}
        return f"response.output_item.{stage}", {
            "output_index": len(self._output) - 1,
            "item": item,
        }

    def _begin_message(self) -> Iterator[tuple[str, dict[str, Any]]]:
        item = {"type": "message", "id": new_ident("msg"), "status": "in_progress"}
        self._output.append({**item, "role": "assistant", "content": []})
        yield self._item("added")
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._output[-1]["content"] = [part]
        yield "response.content_part.added", {**self._place(), "part": {**part}}

    def _end_message(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self._output or self._output[-1]["status"] == "completed":
            return
        self._output[-1]["status"] = "completed"
        (part,), place = self._output[-1]["content"], self._place()
        yield "response.output_text.done", {**place, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**place, "part": {**part}}
        yield self._item("done")

    def _call(self, call: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = {"type": "function_call", "id": new_ident("fc"), "call_id": call["id"], "name": name}
        self._output.append({**item, "arguments": "", "status": "in_progress"})
        yield self._item("added")
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        kind = "response.function_call_arguments"
        yield f"{kind}.delta", {**place, "delta": arguments}
        self._output[-1] |= {"arguments": arguments, "status": "completed"}
        yield f"{kind}.done", {**place, "name": name, "arguments": arguments}
        yield self._item("done")


def _plain(asked: Any) -> Any:
    return asked if isinstance(asked, str) else asked.model_dump(by_alias=True, exclude_none=True)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.reused_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
