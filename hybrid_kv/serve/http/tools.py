"""Tools of a chat: how a model is told of them, and how its calls are read and required.

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
from typing import Any

from hybrid_kv.errors import ConfigError
from hybrid_kv.serve.grammars import SPACING, GrammarText

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
