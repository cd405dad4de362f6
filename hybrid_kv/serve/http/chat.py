"""Schemas of chats: messages, tools and their calls."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from hybrid_kv.errors import said
from hybrid_kv.serve.http.schemas import ANYTHING, Generating, StrictSchema, Text, refusal


class TextPart(StrictSchema):
    """A piece of a message's content."""

    type: Literal["text"]
    text: Text


class CalledFunction(StrictSchema):
    """A function with the arguments of one call, as JSON in a text."""

    unserved: ClassVar = {"parsed_arguments": (ANYTHING,)}  # of OpenAI's client

    name: Text
    arguments: Text

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> CalledFunction:
        try:
            parsed = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise refusal(
                f"arguments of a call must be a JSON object in a text, got {said(self.arguments)}",
                "arguments",
            )
        return self


class ToolCall(StrictSchema):
    """A call in a message of the assistant."""

    unserved: ClassVar = {"index": (ANYTHING,)}

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction

    def rendered(self) -> dict[str, Any]:
        """As chat templates take it: with the arguments as an object."""
        arguments = json.loads(self.function.arguments or "{}")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class ChatMessage(StrictSchema):
    """A message: text, whole or in parts; calls of the assistant; what a tool answered."""

    unserved: ClassVar = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "parsed": (ANYTHING,),  # of OpenAI's client
        "reasoning": (),
        "reasoning_content": (),
        "refusal": (),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    name: Text | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Text | None = None

    @model_validator(mode="after")
    def _parts_agree(self) -> ChatMessage:
        if self.content is None and not self.tool_calls:
            raise refusal("content must be text, or text in parts, got none", "content")
        if self.tool_calls and self.role != "assistant":
            raise refusal(f"tool_calls are the assistant's, got role '{self.role}'", "tool_calls")
        if (self.tool_call_id is None) != (self.role != "tool"):
            raise refusal(
                "tool_call_id is expected in messages of a tool, and in no others, got role "
                f"'{self.role}'",
                "tool_call_id",
            )
        if self.name is not None and self.role != "tool":
            raise refusal(
                f"'name' is not served here but in messages of a tool, got {said(self.name)}; "
                "leave it out",
                "name",
            )
        return self

    @property
    def text(self) -> str:
        """All parts together."""
        whole = self.content or ""
        return whole if isinstance(whole, str) else "".join(part.text for part in whole)

    def rendered(self) -> dict[str, Any]:
        """As chat templates take it."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [call.rendered() for call in self.tool_calls]
        own = {"name": self.name, "tool_call_id": self.tool_call_id}
        return {**message, **{name: value for name, value in own.items() if value is not None}}


Messages: TypeAlias = Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]


class Function(StrictSchema):
    """A function that the model may call.

    parameters: JSON schema of its arguments. strict: its calls keep to the schema.
    """

    name: Annotated[Text, Field(min_length=1, max_length=256)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictSchema):
    """A tool of a chat; all are functions."""

    type: Literal["function"]
    function: Function

    def rendered(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"parameters": _NO_PARAMETERS, **function}}


_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class FunctionName(StrictSchema):
    """A function by its name."""

    name: Text


class NamedTool(StrictSchema):
    """The one tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(Generating):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _settings_agree(self) -> ChatRequest:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise refusal(
                f"max_tokens and max_completion_tokens must agree, got {self.max_tokens} and "
                f"{self.max_completion_tokens}; leave max_tokens out",
                "max_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise refusal(
                "top_logprobs needs logprobs, got it without; add 'logprobs': true", "top_logprobs"
            )
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise refusal(f"tools must have names of their own, got {', '.join(names)}", "tools")
        if isinstance(self.tool_choice, NamedTool):
            if (name := self.tool_choice.function.name) not in names:
                raise refusal(
                    f"tool_choice must name one of tools ({', '.join(names) or 'none'}), got "
                    f"{said(name)}",
                    "tool_choice",
                )
        elif self.tool_choice == "required" and not names:
            raise refusal("tool_choice 'required' needs tools, got none", "tool_choice")
        if self.callable and self.grammar is not None:
            raise refusal(
                "an answer by a schema or grammar can hold no call, got both; leave one out, or "
                "add 'tool_choice': 'none'",
                "tools",
            )
        return self

    @property
    def callable(self) -> list[Tool]:
        """Tools that the answer may call."""
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool for tool in self.tools or [] if tool.function.name == name]
        return [] if self.tool_choice == "none" else list(self.tools or [])

    @property
    def must_call(self) -> bool:
        """Whether the answer is a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)


class TokenizeRequest(StrictSchema):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise refusal("one of prompt and messages is expected; give one of them", "prompt")
        return self
