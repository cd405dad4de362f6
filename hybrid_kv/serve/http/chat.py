"""Chats: schemas of messages, tools and their calls, how a model is told of tools, and how its
calls are read and required.

Calls are read in the forms that models of today write: JSON between `<tool_call>` and its end
(Hermes, Qwen), functions and parameters in tags there (Qwen Coder), or an answer that is JSON
(Llama, Mistral). A model whose chat template has no place for tools is told of them in a system
message, in Hermes' words.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from hybrid_kv.errors import ConfigError, said
from hybrid_kv.serve.grammars import SPACING, GrammarText
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


_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a call is required of a model: begin, JSON, end.

    arguments: their name. between: what stands between two calls. around: all of them. added: words
    of these that are tokens of their own.
    """

    begin: str = f"{_BEGIN}\n"
    end: str = f"\n{_END}"
    arguments: str = "arguments"
    between: str = "\n"
    around: tuple[str, str] = ("", "")
    added: frozenset[str] = frozenset()

    @classmethod
    def of(cls, template: str, *, takes_tools: bool, added: Collection[str]) -> CallForm:
        """Form that a chat template speaks of; `added` to the words of its tokenizer."""
        if not takes_tools or _BEGIN in template:
            return cls(added=frozenset({_BEGIN, _END}.intersection(added)))
        if '"parameters": dictionary' in template:  # Llama 3
            return cls("", "", "parameters", "; ")
        return cls("", "", between=", ", around=("[", "]"))

    def required(self, functions: Sequence[dict[str, Any]], *, several: bool) -> GrammarText:
        """Grammar of an answer that is one call of these functions, or more where `several`."""
        more = f" ({self._said(self.between)} {self._said(self.begin)} call)*" if several else ""
        first, last = map(self._said, self.around)
        start = f"start: {first} {self._said(self.begin)} call{more} {last}"
        return GrammarText("lark", "\n".join([start, *self._calls(functions)]))

    def offered(self, functions: Sequence[dict[str, Any]]) -> GrammarText:
        """Grammar of an answer that may call these functions, and then keeps to their schemas.

        Raises:
            ConfigError: nothing says where in such an answer a call begins.
        """
        if not self.begin:
            raise ConfigError(
                "strict functions of this model need 'tool_choice': 'required' or the name of one, "
                "because nothing says where in a text its calls begin; leave strict out else"
            )
        lines = ["start: called* TEXT", "TEXT: /(.|\\n)*/"]
        if _BEGIN in self.added:
            lines.append(f"called: TEXT {self._said(self.begin)} call")
        else:
            lines.append(f"begun[lazy]: TEXT {self._said(self.begin)}")
            lines.append("called: begun call")
        return GrammarText("lark", "\n".join([*lines, *self._calls(functions)]))

    def _calls(self, functions: Sequence[dict[str, Any]]) -> list[str]:
        """Rules of a call behind its beginning."""
        lines = [f"call: {' | '.join(f'call_{number}' for number in range(len(functions)))}"]
        for number, function in enumerate(functions):
            call = json.dumps({"x-guidance": SPACING, **self._schema_of(function)})
            lines.append(f"call_{number}: %json {call} {self._said(self.end)}")
        return lines

    def _said(self, text: str) -> str:
        """A text in a Lark grammar: empty, in quotes, or as a token's name."""
        parts = re.split(f"({_BEGIN}|{_END})", text)
        return " ".join(part if part in self.added else json.dumps(part) for part in parts if part)

    def _schema_of(self, function: dict[str, Any]) -> dict[str, Any]:
        parameters = dict(function["parameters"])
        # What refers to definitions does so from the root.
        roots = {name: parameters.pop(name) for name in _DEFINITIONS if name in parameters}
        properties = {"name": {"const": function["name"]}, self.arguments: parameters}
        return {
            "type": "object",
            "properties": properties,
            "required": ["name", self.arguments],
            "additionalProperties": False,
            **roots,
        }


_DEFINITIONS = ("$defs", "definitions")


def in_plain_words(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Messages for a template without a place for tools: what they say is put into texts."""
    plain = []
    for message in messages:
        text = message["content"]
        for call in message.get("tool_calls", ()):
            text += f"\n{_BEGIN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{_END}"
        if message["role"] == "tool":
            answer = f"<tool_response>\n{text}\n</tool_response>"
            plain.append({"role": "user", "content": answer})
        else:
            plain.append({"role": message["role"], "content": text.strip("\n")})
    if not tools:
        return plain
    described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    told = _TOLD.format(tools=described)
    if plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{told}"}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


_TOLD = f"""You may call functions. Their signatures stand between <tools> and </tools>:
<tools>
{{tools}}
</tools>
To call one, write its name and its arguments as JSON:
{_BEGIN}
{{{{"name": "NAME", "arguments": {{{{}}}}}}}}
{_END}"""


class CallReader:
    """Divides the text of an answer, as it comes, into what is shown and calls.

    What looks like a call and is none, or calls what is no tool, is shown.

    calls: whole ones so far, in OpenAI's form.

    Args:
        functions: that may be called.
    """

    def __init__(self, functions: Sequence[dict[str, Any]]) -> None:
        self._parameters = {each["name"]: each.get("parameters", {}) for each in functions}
        self._held, self._has_shown = "", False
        self.calls: list[dict[str, Any]] = []

    def add(self, text: str) -> str:
        """Text that can be shown after some more of the answer."""
        self._held += text
        shown = ""
        while True:
            before, mark, rest = self._held.partition(_BEGIN)
            if not mark or _END not in rest:
                break
            written, _, self._held = rest.partition(_END)
            calls = self._read(written)
            self.calls += calls
            shown += before.rstrip() if calls else f"{before}{_BEGIN}{written}{_END}"
        return shown + self._safe(len(self._held), shown)

    def close(self) -> str:
        """Text that is left to show at the end of the answer."""
        before, mark, rest = self._held.partition(_BEGIN)
        calls = self._read(rest if mark else before) if mark or self._may_be_json() else []
        self.calls += calls
        held, self._held = self._held, ""
        if not calls:
            return held if held.strip() or not self.calls else ""
        return before.rstrip() if mark else ""

    def _may_be_json(self) -> bool:
        """Whether nothing was shown, and what is held begins as JSON, or not at all yet."""
        return not self._has_shown and self._held.lstrip()[:1] in ("", "{", "[")

    def _safe(self, end: int, shown: str) -> str:
        """Takes what is held and cannot be the beginning of a call."""
        if self._may_be_json() and not shown.strip():
            return ""
        found = self._held.find(_BEGIN)
        if found >= 0:
            end = found
        else:
            for count in range(min(len(_BEGIN) - 1, end), 0, -1):
                if self._held.endswith(_BEGIN[:count]):
                    end -= count
                    break
        kept = len(self._held[:end].rstrip())  # white space before a call belongs to it
        text, self._held = self._held[:kept], self._held[kept:]
        self._has_shown |= bool(text or shown)
        return text

    def _read(self, written: str) -> list[dict[str, Any]]:
        """Calls in a text that is nothing else; none where it is no call of a tool."""
        if (tagged := _FUNCTION.fullmatch(written)) is not None:
            name, inside = tagged[1].strip(), tagged[2]
            if name not in self._parameters:
                return []
            types = self._parameters[name].get("properties", {})
            arguments = {
                key.strip(): _value(value, types.get(key.strip(), {}))
                for key, value in _PARAMETER.findall(inside)
            }
            return [_call(name, arguments)]
        try:
            parsed = json.loads(written, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return self._read_several(written)
        listed = parsed if isinstance(parsed, list) else [parsed]
        calls = [call for each in listed if (call := self._as_call(each)) is not None]
        return calls if len(calls) == len(listed) else []

    def _read_several(self, written: str) -> list[dict[str, Any]]:
        """Calls with semicolons between them, as Llama writes several."""
        parts = re.split(r"(?<=\})\s*;\s*(?=\{)", written)
        read = [self._read(part) for part in parts] if len(parts) > 1 else [[]]
        return [call for calls in read for call in calls] if all(read) else []

    def _as_call(self, parsed: object) -> dict[str, Any] | None:
        if not isinstance(parsed, Mapping) or parsed.get("name") not in self._parameters:
            return None
        arguments = parsed.get("arguments", parsed.get("parameters", {}))
        if isinstance(arguments, str):  # JSON in a text
            try:
                arguments = json.loads(arguments or "{}", parse_constant=_no_constant)
            except (ValueError, RecursionError):
                return None
        return _call(parsed["name"], arguments) if isinstance(arguments, dict) else None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    """A parameter between tags: text, where its schema says so or it is nothing else."""
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
